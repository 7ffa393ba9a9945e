package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
)

// Forward runs argv while addr inside the sandbox leads to the host's socket at path, and returns its exit code:
// a build's program gets packages this way. The program's end ends it.
func Forward(addr, path string, argv []string) (int, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return 0, err
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go forward(c, path)
		}
	}()
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:gosec // the host's own argument
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if code := exit.ExitCode(); code >= 0 {
			return code, nil
		}
		return 1, fmt.Errorf("%s: %s", argv[0], exit)
	}
	return 0, err
}

func forward(c net.Conn, path string) {
	defer c.Close()
	host, err := net.Dial("unix", path)
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandlot-agent: forward:", err)
		return
	}
	defer host.Close()
	go func() {
		_, _ = io.Copy(host, c)
		if half, ok := host.(*net.UnixConn); ok {
			_ = half.CloseWrite()
		}
	}()
	_, _ = io.Copy(c, host)
}
