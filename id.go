package sandlot

import (
	"crypto/rand"
	"encoding/base32"
	"fmt"
	"io"
)

// ID is the one identifier type. Only an ID that passed ParseID may become a path, a host label, a
// cgroup or a link name: lower-case letters and digits, it starts with a letter, 4 to 40 characters.
type ID string

// idEncoding is base32 in lower case without padding or vowels' look-alikes: safe in DNS labels and paths.
var idEncoding = base32.NewEncoding("abcdefghjkmnpqrstuvwxyz023456789").WithPadding(base32.NoPadding)

// Prefixes say what an ID names. They are part of the ID.
const (
	PrefixSandbox = "sbx"
	PrefixOrg     = "org"
	PrefixProject = "prj"
	PrefixToken   = "tok"
	PrefixUser    = "usr"
	PrefixRequest = "req"
	PrefixEvent   = "evt"
	PrefixBuild   = "bld"
)

// NewID returns prefix followed by 100 random bits in base32 (20 characters). IDs are never reused.
func NewID(prefix string) ID { return newID(rand.Reader, prefix) }

func newID(r io.Reader, prefix string) ID {
	var b [13]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		panic("sandlot: no randomness: " + err.Error()) // crypto/rand never fails on Linux
	}
	return ID(prefix + idEncoding.EncodeToString(b[:])[:20])
}

// ParseID checks s against the identifier rule. Its error never contains s.
func ParseID(s string) (ID, error) {
	if len(s) < 4 || len(s) > 40 {
		return "", Errorf(CodeInvalidRequest, "an id has 4 to 40 characters")
	}
	for i := range len(s) {
		c := s[i]
		if c >= 'a' && c <= 'z' || i > 0 && c >= '0' && c <= '9' {
			continue
		}
		return "", Errorf(CodeInvalidRequest, "an id has lower-case letters and digits only and starts with a letter")
	}
	return ID(s), nil
}

// ParseName checks a name that people choose (template, project ref, sandbox name): lower-case letters,
// digits, '-' and '.', it starts with a letter or digit, has no "..", and at most 63 characters.
func ParseName(s string) (string, error) {
	if s == "" || len(s) > 63 {
		return "", Errorf(CodeInvalidRequest, "a name has 1 to 63 characters")
	}
	for i := range len(s) {
		c := s[i]
		alnum := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		if alnum || i > 0 && (c == '-' || c == '.' && s[i-1] != '.') {
			continue
		}
		return "", Errorf(CodeInvalidRequest, "a name has lower-case letters, digits, '-' and '.', and starts with a letter or digit")
	}
	return s, nil
}

func (id ID) String() string { return string(id) }

// GoString keeps IDs readable in test failures.
func (id ID) GoString() string { return fmt.Sprintf("ID(%q)", string(id)) }
