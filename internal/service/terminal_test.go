package service

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"sandlot"
)

// A terminal that is watched and shows something keeps no sandbox; what is typed into it does.
func TestTerminalActivity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		defer w.close()
		watched := w.create(CreateRequest{IdleTimeout: 60 * time.Second})
		typed := w.create(CreateRequest{IdleTimeout: 60 * time.Second})
		tid := string(sandlot.NewID("trm"))
		ended := make(chan error, 2)
		for _, sb := range []sandlot.Sandbox{watched, typed} {
			s, err := w.TerminalStream(t.Context(), w.grant, sb.ID, tid)
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				defer s.Close()
				var err error
				for err == nil {
					_, _, err = s.Next()
				}
				ended <- err
			}()
		}
		for range 10 {
			time.Sleep(30 * time.Second)
			if err := w.TerminalInput(t.Context(), w.grant, typed.ID, tid, []byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if got := w.get(watched.ID); got.State != sandlot.StateStopped || got.Reason != sandlot.ReasonIdleTimeout {
			t.Errorf("watched for five minutes: %v %v", got.State, got.Reason)
		}
		if got := w.get(typed.ID); got.State != sandlot.StateRunning {
			t.Errorf("typed into each 30 s: %v %v", got.State, got.Reason)
		}
		if err := <-ended; sandlot.ErrorCode(err) != sandlot.CodeNotRunning {
			t.Errorf("the stream of a sandbox that stopped: %v", err)
		}
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if got := w.get(typed.ID); got.Reason != sandlot.ReasonIdleTimeout {
			t.Errorf("nobody types any more: %v %v", got.State, got.Reason)
		}
		<-ended
	})
}

func TestTerminalRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		defer w.close()
		sb := w.create(CreateRequest{})
		for name, req := range map[string]TerminalRequest{
			"cols": {Cols: -1}, "rows": {Rows: 1001}, "cwd": {Cwd: "a\x00b"}, "env": {Env: map[string]string{"A=B": ""}},
			"user": {User: "../x"}, "argv": {Argv: []string{"a\x00b"}}, "empty": {Argv: []string{""}},
		} {
			if _, err := w.OpenTerminal(t.Context(), w.grant, sb.ID, req); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
				t.Errorf("%s: %v", name, err)
			}
		}
		tid := string(sandlot.NewID("trm"))
		if err := w.TerminalInput(t.Context(), w.grant, sb.ID, tid, []byte(strings.Repeat("x", maxTermInput+1))); sandlot.ErrorCode(err) != sandlot.CodeTooLarge {
			t.Errorf("too much input: %v", err)
		}
		for _, tid := range []string{"", "x", "../../files", "trm/../x", tid + "/.."} {
			if _, err := w.TerminalStream(t.Context(), w.grant, sb.ID, tid); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
				t.Errorf("%q: %v", tid, err)
			}
			if err := w.CloseTerminal(t.Context(), w.grant, sb.ID, tid); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
				t.Errorf("%q: %v", tid, err)
			}
		}
	})
}
