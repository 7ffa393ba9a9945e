package template

import (
	"os"
	"strings"
	"testing"
)

func TestCheckRequirements(t *testing.T) {
	shipped, err := os.ReadFile("../../templates/python-3.12/requirements.lock")
	if err != nil {
		t.Fatal(err)
	}
	if err := checkRequirements(shipped); err != nil {
		t.Errorf("the shipped file: %v", err)
	}
	hash := " --hash=sha256:" + strings.Repeat("ab", 32)
	for line, ok := range map[string]bool{
		"requests==2.32.5" + hash:                                 true,
		"requests==2.32.5 \\\n   " + hash + " \\\n  " + hash:      true,
		"a[b,c]==1 ; python_version < '3.13'" + hash + " # why":   true,
		"requests==2.32.5":                                        false,
		"requests>=2" + hash:                                      false,
		"--index-url http://169.254.169.254/":                     false,
		"a==1" + hash + "\n-r /etc/shadow":                        false,
		"a==1" + hash + " --index-url http://x":                   false,
		"a @ file:///etc/shadow" + hash:                           false,
		"-e git+ssh://host/x" + hash:                              false,
		"a==1; x --find-links=/etc" + hash:                        false,
		"./x.whl" + hash:                                          false,
		"a==1" + strings.ReplaceAll(hash, "--hash", "--ha\\\nsh"): false,
		"# nothing": false,
	} {
		if err := checkRequirements([]byte(line)); (err == nil) != ok {
			t.Errorf("%q: %v, want ok %v", line, err, ok)
		}
	}
}
