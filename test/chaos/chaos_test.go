// Package chaos kills the real server at every step it can be killed at, and checks after the restart that
// nothing acknowledged is lost and nothing on the host is left without an owner.
package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"sandlot/internal/devserver"
	"sandlot/internal/failpoint"
	"sandlot/internal/testenv"

	// Their failpoints.
	_ "sandlot/internal/engine/gvisor"
	_ "sandlot/internal/node"
	_ "sandlot/internal/service"
)

func start(t *testing.T, pool int) *devserver.Server {
	t.Helper()
	testenv.Root(t)
	bin := filepath.Dir(testenv.Bin(t, "sandlot"))
	testenv.Template(t, "base")
	s, err := devserver.Start(t.Context(), devserver.Config{
		Bin: bin, Templates: testenv.TemplatesDir(t), StateDir: t.TempDir(), Engine: "gvisor",
		Pool: map[string]int{"base": pool}, Options: `log_level = "warn"`,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
		if left := testenv.Census(t, s.NodeDir()); len(left) > 0 {
			t.Errorf("left after stop and reap: %q", left)
		}
		if t.Failed() {
			t.Log(s.Log())
		}
	})
	return s
}

// keeper is a sandbox that was acknowledged, with a file and a process that must not be lost.
type keeper struct {
	id, pid string
}

func newKeeper(t *testing.T, s *devserver.Server) keeper {
	t.Helper()
	sb, err := s.Create(t.Context(), map[string]any{"template": "base"})
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Exec(t.Context(), sb.ID, map[string]any{"cmd": "echo precious > kept; nohup sleep 5000 >/dev/null 2>&1 & echo $!"})
	if err != nil {
		t.Fatal(err)
	}
	return keeper{sb.ID, strings.TrimSpace(r.Stdout)}
}

func (k keeper) check(t *testing.T, s *devserver.Server) {
	t.Helper()
	r, err := s.Exec(t.Context(), k.id, map[string]any{"cmd": "cat kept && kill -0 " + k.pid + " && echo alive"})
	if err != nil || r.Stdout != "precious\nalive\n" {
		t.Errorf("an acknowledged sandbox after the restart: %+v, %v", r, err)
	}
}

// restart starts the server again and waits until it answers.
func restart(t *testing.T, s *devserver.Server, env ...string) {
	t.Helper()
	if err := s.Restart(t.Context(), env...); err != nil {
		t.Fatal(err)
	}
}

// running lists the sandboxes that the server says are running.
func running(t *testing.T, s *devserver.Server) []string {
	t.Helper()
	var page struct {
		Sandboxes []struct{ ID, State string }
	}
	if err := s.Call(t.Context(), http.MethodGet, "?limit=200", nil, &page); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, sb := range page.Sandboxes {
		if sb.State == "running" {
			ids = append(ids, sb.ID)
		}
	}
	return ids
}

var sandboxID = regexp.MustCompile(`sbx[a-z0-9]{20}`)

// owned checks that every running sandbox answers, and that whatever the host has belongs to one of them.
func owned(t *testing.T, s *devserver.Server) {
	t.Helper()
	ids := running(t, s)
	for _, id := range ids {
		if r, err := s.Exec(t.Context(), id, map[string]any{"cmd": []string{"echo", "here"}}); err != nil || r.Stdout != "here\n" {
			t.Errorf("%s is said to be running, but: %+v, %v", id, r, err)
		}
	}
	for _, line := range testenv.Census(t, s.NodeDir()) {
		if id := sandboxID.FindString(line); id != "" && !slices.Contains(ids, id) {
			t.Errorf("left without an owner: %s", line)
		}
	}
}

// died says whether either half of the server ended: the HTTP half, which was api, goes with the node half. What
// a caller sees of it differs: a broken connection, or an answer that the node is out of reach.
func died(s *devserver.Server, api int) bool {
	for range 100 {
		if s.APIPID() != api {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return false
}

// ops does one of everything that changes something, until something fails. It returns what was acknowledged:
// sandboxes that must live and sandboxes that must not.
func ops(t *testing.T, s *devserver.Server) (alive, deleted []string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for range 2 {
		sb, err := s.Create(ctx, map[string]any{"template": "base"})
		if err != nil {
			return alive, deleted
		}
		alive = append(alive, sb.ID)
		if _, err := s.Exec(ctx, sb.ID, map[string]any{"cmd": "true"}); err != nil {
			return alive, deleted
		}
		resp, err := s.Request(ctx, http.MethodPut, "/"+sb.ID+"/files/content?path=f", strings.NewReader("whole"))
		if err != nil {
			return alive, deleted
		}
		resp.Body.Close()
	}
	id := alive[0]
	alive = alive[1:]
	if err := s.Delete(ctx, id); err != nil {
		return alive, deleted
	}
	return alive, append(deleted, id)
}

// TestKillAtEachFailpoint is item 51: kill -9 of whichever half passes the point.
func TestKillAtEachFailpoint(t *testing.T) {
	s := start(t, 0)
	k := newKeeper(t, s)
	points := slices.DeleteFunc(failpoint.Names(), func(n string) bool {
		// Passed at a start only, or never without a pool: TestKillDuringReap and TestKillWithPool. Or by a build:
		// the template package kills those.
		return n == "node.reconcile.listed" || n == "node.claim.taken" || strings.HasPrefix(n, "template.")
	})
	if len(points) < 15 {
		t.Fatalf("only %d failpoints: %q", len(points), points)
	}
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			s.Kill()
			restart(t, s, failpoint.EnvVar+"="+point+"=kill")
			api := s.APIPID()
			alive, deleted := ops(t, s)
			if !died(s, api) {
				t.Errorf("nothing died at %s", point)
			}
			s.Kill()
			restart(t, s)
			k.check(t, s)
			owned(t, s)
			now := running(t, s)
			for _, id := range alive {
				// A delete that was not acknowledged may have happened or not.
				if !slices.Contains(now, id) && !strings.Contains(point, "destroy") && !strings.Contains(point, "delete") {
					t.Errorf("%s was acknowledged and is lost", id)
				}
			}
			for _, id := range deleted {
				if slices.Contains(now, id) {
					t.Errorf("%s was deleted, and runs", id)
				}
			}
			for _, id := range now {
				if id != k.id {
					upload(t, s, id)
					if err := s.Delete(t.Context(), id); err != nil {
						t.Errorf("delete %s: %v", id, err)
					}
				}
			}
			owned(t, s)
		})
	}
}

// upload checks that a file is there whole or not at all.
func upload(t *testing.T, s *devserver.Server, id string) {
	t.Helper()
	resp, err := s.Request(t.Context(), http.MethodGet, "/"+id+"/files/content?path=f", nil)
	var status *devserver.StatusError
	if errors.As(err, &status) && status.Status == http.StatusNotFound {
		return
	}
	if err != nil {
		t.Errorf("read the uploaded file: %v", err)
		return
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); string(b) != "whole" {
		t.Errorf("an upload is there in part: %q, %v", b, err)
	}
}

// TestKillDuringReap kills the server while it removes what an earlier kill left.
func TestKillDuringReap(t *testing.T) {
	s := start(t, 0)
	k := newKeeper(t, s)
	for _, point := range []string{"node.reconcile.listed", "gvisor.destroy.killed", "gvisor.destroy.unmounted"} {
		t.Run(point, func(t *testing.T) {
			s.Kill()
			restart(t, s, failpoint.EnvVar+"=service.create.claimed=kill")
			if sb, err := s.Create(t.Context(), map[string]any{"template": "base"}); err == nil {
				t.Fatalf("%s was made past the failpoint", sb.ID)
			}
			s.Kill()
			if err := s.Restart(t.Context(), failpoint.EnvVar+"="+point+"=kill"); err == nil {
				t.Errorf("nothing died at %s", point)
				s.Kill()
			}
			restart(t, s)
			k.check(t, s)
			owned(t, s)
		})
	}
}

// TestKillWithPool kills the server with a full pool and at a claim. Nobody can say afterwards whether a
// pooled machine was touched, so none may be handed out again.
func TestKillWithPool(t *testing.T) {
	s := start(t, 2)
	k := newKeeper(t, s)
	if err := s.Await(t.Context()); err != nil {
		t.Fatal(err)
	}
	old := machines(t, s)
	s.Kill()
	restart(t, s, failpoint.EnvVar+"=node.claim.taken=kill")
	for _, id := range machines(t, s) {
		if id != k.id && slices.Contains(old, id) {
			t.Errorf("%s was in the pool of the server that was killed, and is still there", id)
		}
	}
	k.check(t, s)
	if _, err := s.Create(t.Context(), map[string]any{"template": "base"}); err == nil {
		t.Error("nothing died at the claim")
	}
	s.Kill()
	restart(t, s)
	k.check(t, s)
	if got := running(t, s); !slices.Equal(got, []string{k.id}) {
		t.Errorf("running: %q, want %q alone", got, k.id)
	}
	if got := machines(t, s); len(got) != 3 {
		t.Errorf("machines: %q, want the keeper and two pooled ones", got)
	}
}

// machines lists the machines of which the host has files.
func machines(t *testing.T, s *devserver.Server) []string {
	t.Helper()
	entries, err := filepath.Glob(filepath.Join(s.NodeDir(), "machines", "sbx*"))
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range entries {
		entries[i] = filepath.Base(e)
	}
	return entries
}

// TestKillWhileBusy kills the server at random instants of a storm of operations.
func TestKillWhileBusy(t *testing.T) {
	s := start(t, 2)
	k := newKeeper(t, s)
	for round := range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		acked := make(chan string, 1000)
		done := make(chan struct{})
		for range 4 {
			go func() {
				defer func() { done <- struct{}{} }()
				for ctx.Err() == nil {
					sb, err := s.Create(ctx, map[string]any{"template": "base"})
					if err != nil {
						return
					}
					acked <- sb.ID
					if _, err := s.Exec(ctx, sb.ID, map[string]any{"cmd": "echo x > f; sync"}); err != nil {
						return
					}
				}
			}()
		}
		time.Sleep(time.Duration(300+230*round) * time.Millisecond)
		s.Kill()
		cancel()
		for range 4 {
			<-done
		}
		close(acked)
		restart(t, s)
		k.check(t, s)
		now := running(t, s)
		for id := range acked {
			if !slices.Contains(now, id) {
				t.Errorf("round %d: %s was acknowledged and is lost", round, id)
			}
		}
		for _, id := range now {
			if id == k.id {
				continue
			}
			if _, err := s.Exec(t.Context(), id, map[string]any{"cmd": "true"}); err != nil {
				t.Errorf("round %d: %s does not answer: %v", round, id, err)
			}
			if err := s.Delete(t.Context(), id); err != nil {
				t.Errorf("round %d: delete %s: %v", round, id, err)
			}
		}
	}
	if got := running(t, s); fmt.Sprint(got) != fmt.Sprint([]string{k.id}) {
		t.Errorf("running at the end: %q", got)
	}
}
