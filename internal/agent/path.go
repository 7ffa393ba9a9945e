package agent

import (
	"path"
	"strings"
	"unicode/utf8"

	"sandlot"
)

// resolve checks a path from a request and returns it relative to the sandbox's "/", cleaned: "." is "/"
// itself. Relative paths are below /workspace. A ".." component is refused rather than resolved, because
// what it means depends on links.
func resolve(p string) (string, error) {
	if p == "" {
		return "", sandlot.Errorf(sandlot.CodeInvalidRequest, "path is empty")
	}
	if len(p) > sandlot.MaxPathBytes {
		return "", sandlot.Errorf(sandlot.CodeInvalidRequest, "path has more than %d bytes", sandlot.MaxPathBytes)
	}
	if !utf8.ValidString(p) || strings.IndexByte(p, 0) >= 0 {
		return "", sandlot.Errorf(sandlot.CodeInvalidRequest, "path is not valid UTF-8 or has a NUL byte")
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == ".." {
			return "", sandlot.Errorf(sandlot.CodeInvalidRequest, `path has a ".." component`)
		}
		if len(part) > sandlot.MaxNameBytes {
			return "", sandlot.Errorf(sandlot.CodeInvalidRequest, "path has a component of more than %d bytes", sandlot.MaxNameBytes)
		}
	}
	if p[0] != '/' {
		p = workspace + "/" + p
	}
	if p = path.Clean(p); p == "/" {
		return ".", nil
	}
	return p[1:], nil
}

// shown is resolve's result as people see it.
func shown(name string) string {
	if name == "." {
		return "/"
	}
	return "/" + name
}

// join adds a component to resolve's result.
func join(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}
