package template

import (
	"fmt"
	"regexp"
	"strings"
)

// lockedLine is all that a locked requirement may be. An option in the file would have the host's pip read any
// file or address that the definition's author likes.
var lockedLine = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])? ?== ?[A-Za-z0-9.!+_]+( ?; ?[A-Za-z0-9_.<>=!'"() ]{1,200})?( --hash=sha256:[0-9a-f]{64})+$`)

// checkRequirements says what in a locked requirements file is not a package with its version and hashes.
func checkRequirements(lock []byte) error {
	joined := strings.ReplaceAll(strings.ReplaceAll(string(lock), "\r\n", "\n"), "\\\n", " ")
	n := 0
	for line := range strings.Lines(joined) {
		if at := strings.Index(line, "#"); at == 0 || at > 0 && line[at-1] == ' ' {
			line = line[:at]
		}
		line = strings.Join(strings.Fields(line), " ")
		if line == "" {
			continue
		}
		if !lockedLine.MatchString(line) {
			return fmt.Errorf("pip: %.80q is not NAME==VERSION --hash=sha256:…: a locked file has nothing else, and no options", line)
		}
		n++
	}
	if n == 0 {
		return fmt.Errorf("pip: the requirements are empty")
	}
	return nil
}
