package agent

import (
	"maps"
	"path/filepath"
	"strings"

	"sandlot"
	"sandlot/internal/wire"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// environment is the fixed base, then the template's, the sandbox's and the request's variables.
func (a *Agent) environment(u *user, id *identity, extra map[string]string) []string {
	env := map[string]string{
		"PATH": defaultPath, "HOME": a.inside(u.home), "USER": u.name, "LOGNAME": u.name, "SHELL": u.shell,
		"LANG": "C.UTF-8", "TERM": "dumb",
	}
	maps.Copy(env, id.env)
	maps.Copy(env, extra)
	out := make([]string, 0, len(env))
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	return out
}

// inside maps an absolute path of the sandbox to what a process must be given.
func (a *Agent) inside(path string) string {
	if a.root == "" {
		return path
	}
	return filepath.Join(a.root, path)
}

// checkEnv refuses what a process could not be given.
func checkEnv(env map[string]string) error {
	if len(env) > sandlot.MaxEnvVars {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "env has more than %d variables", sandlot.MaxEnvVars)
	}
	total := 0
	for k, v := range env {
		if !validEnvName(k) {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "env has a name that is not letters, digits and '_', not starting with a digit")
		}
		if strings.IndexByte(v, 0) >= 0 {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "env %s has a NUL byte in its value", clip(k, 64))
		}
		total += len(k) + len(v)
	}
	if total > sandlot.MaxEnvBytes {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "env has more than %d bytes", sandlot.MaxEnvBytes)
	}
	return nil
}

func validEnvName(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || i > 0 && c >= '0' && c <= '9') {
			return false
		}
	}
	return s != ""
}

// checkExec bounds a request; what it passes is safe to hand to execve.
func checkExec(e *wire.Exec) error {
	if len(e.Argv) == 0 || e.Argv[0] == "" {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "argv is empty")
	}
	total := 0
	for _, arg := range e.Argv {
		if strings.IndexByte(arg, 0) >= 0 {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "argv has a NUL byte")
		}
		total += len(arg) + 1
	}
	if total > sandlot.MaxArgvBytes {
		return sandlot.Errorf(sandlot.CodeTooLarge, "argv has more than %d bytes", sandlot.MaxArgvBytes)
	}
	if int64(len(e.Stdin)) > sandlot.MaxStdinBytes {
		return sandlot.Errorf(sandlot.CodeTooLarge, "stdin has more than %d bytes", sandlot.MaxStdinBytes)
	}
	if e.TimeoutMS < 0 || e.TimeoutMS > sandlot.MaxExecTimeout.Milliseconds() {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the timeout is negative or over %s", sandlot.MaxExecTimeout)
	}
	if e.Collect < 0 || e.Collect > sandlot.MaxOutputBytes {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "collect is negative or over %d", sandlot.MaxOutputBytes)
	}
	return checkEnv(e.Env)
}

func clip(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}
