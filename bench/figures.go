package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"sandlot/internal/devserver"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

const (
	poolSize    = 4
	streamBytes = 64 << 20
	fileBytes   = 200 << 20
	pause       = 10 * time.Millisecond
)

func (b *bench) warm(ctx context.Context) (*devserver.Server, error) {
	return b.start(ctx, gvisor.Name, map[string]int{peerTemplate: poolSize})
}

// box is a sandbox of a server with a full pool.
func (b *bench) box(ctx context.Context) (*devserver.Server, devserver.Sandbox, error) {
	s, err := b.warm(ctx)
	if err != nil {
		return nil, devserver.Sandbox{}, err
	}
	sb, err := s.Create(ctx, map[string]any{"template": peerTemplate})
	return s, sb, err
}

func createWarm(ctx context.Context, b *bench) error {
	s, err := b.warm(ctx)
	if err != nil {
		return err
	}
	var total, call, first []float64
	for range b.n(60) {
		if err := s.Await(ctx); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond) // as a caller that comes by itself, not on the heels of a fill
		begun := time.Now()
		sb, err := s.Create(ctx, map[string]any{"template": peerTemplate})
		if err != nil {
			return err
		}
		created := time.Since(begun)
		if _, err := s.Exec(ctx, sb.ID, map[string]any{"cmd": []string{"/bin/true"}}); err != nil {
			return err
		}
		ready := time.Since(begun)
		if err := s.Delete(ctx, sb.ID); err != nil {
			return err
		}
		if !sb.Timings.FromPool {
			return errors.New("a create with a full pool was not served from it")
		}
		total, call, first = append(total, sb.Timings.TotalMS), append(call, ms(created)), append(first, ms(ready))
	}
	b.metric("create_warm_total", "ms", total)
	b.metric("create_warm_http", "ms", call)
	b.metric("create_first_exec", "ms", first)
	b.ratio("create_warm_http_vs_runsc", "create_warm_http", "runsc_run_exec", "<=0.05")
	b.ratio("create_warm_http_vs_ours", "create_warm_http", "runsc_ours_run_exec", "none")
	return nil
}

func createCold(ctx context.Context, b *bench) error {
	s, err := b.start(ctx, gvisor.Name, map[string]int{})
	if err != nil {
		return err
	}
	var cold, first []float64
	for range b.n(30) {
		begun := time.Now()
		sb, err := s.Create(ctx, map[string]any{"template": peerTemplate})
		if err != nil {
			return err
		}
		cold = append(cold, ms(time.Since(begun)))
		if _, err := s.Exec(ctx, sb.ID, map[string]any{"cmd": []string{"/bin/true"}}); err != nil {
			return err
		}
		first = append(first, ms(time.Since(begun)))
		if err := s.Delete(ctx, sb.ID); err != nil {
			return err
		}
		if sb.Timings.Source != "cold" {
			return errors.New("a create without a pool was not cold")
		}
	}
	b.metric("create_cold", "ms", cold)
	b.metric("create_cold_first_exec", "ms", first)
	b.ratio("create_cold_vs_runsc", "create_cold", "runsc_run_exec", "<=0.9")
	b.ratio("create_cold_vs_ours", "create_cold", "runsc_ours_run_exec", "none")
	return nil
}

func execTrue(ctx context.Context, b *bench) error {
	s, sb, err := b.box(ctx)
	if err != nil {
		return err
	}
	call := func(int) error {
		_, err := s.Exec(ctx, sb.ID, map[string]any{"cmd": []string{"/bin/true"}})
		return err
	}
	// The agent's own fork and exec, in a machine beside it, in turn with the calls; each comes by itself, as a
	// caller's do who looks at an answer before the next.
	var inside, outside []float64
	err = b.withAgent(ctx, func(c *guest.Client) error {
		for range b.n(200) {
			time.Sleep(pause)
			d, err := c.BenchForkExec(ctx, wire.Exec{Argv: []string{"/bin/true"}})
			if err != nil {
				return err
			}
			inside = append(inside, float64(d.DurationUS)/1000)
			time.Sleep(pause)
			one, err := times(ctx, 1, call)
			if err != nil {
				return err
			}
			outside = append(outside, one...)
		}
		return nil
	})
	if err != nil {
		return err
	}
	chain, err := times(ctx, b.n(200), call)
	if err != nil {
		return err
	}
	shell, err := times(ctx, b.n(100), func(int) error {
		_, err := s.Exec(ctx, sb.ID, map[string]any{"cmd": "true"})
		return err
	})
	if err != nil {
		return err
	}
	b.metric("exec_true", "ms", outside)
	b.metric("exec_true_guest", "ms", inside)
	b.metric("exec_true_chain", "ms", chain) // one after the other without a pause
	b.metric("exec_sh", "ms", shell)
	b.ratio("exec_true_vs_guest", "exec_true", "exec_true_guest", "<=1.25")
	b.ratio("exec_true_vs_runsc", "exec_true", "runsc_exec_true", "<=0.5")
	b.ratio("exec_true_vs_ours", "exec_true", "runsc_ours_exec_true", "none")
	return s.Delete(ctx, sb.ID)
}

func execStream(ctx context.Context, b *bench) error {
	s, sb, err := b.box(ctx)
	if err != nil {
		return err
	}
	var got []float64
	for range b.n(5) {
		body, _ := json.Marshal(map[string]any{"stream": true, "cmd": fmt.Sprintf("yes 'a line of output as programs print it' | head -c %d", streamBytes)})
		begun := time.Now()
		resp, err := s.Request(ctx, "POST", "/"+sb.ID+"/exec", bytes.NewReader(body))
		if err != nil {
			return err
		}
		n, err := io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err != nil || n < streamBytes {
			return fmt.Errorf("%d bytes: %w", n, err)
		}
		got = append(got, mbps(streamBytes, time.Since(begun)))
	}
	b.metric("exec_stream", "MB/s", got)
	b.ratio("exec_stream_vs_runsc", "exec_stream", "runsc_exec_stream", "none")
	return s.Delete(ctx, sb.ID)
}

// sustained creates without a pause, first until the pool is dry, then on.
func sustained(ctx context.Context, b *bench) error {
	s, err := b.start(ctx, gvisor.Name, map[string]int{peerTemplate: 20})
	if err != nil {
		return err
	}
	var ids []string
	burst := func(n int) (float64, error) {
		begun := time.Now()
		for range n {
			sb, err := s.Create(ctx, map[string]any{"template": peerTemplate})
			if err != nil {
				return 0, err
			}
			ids = append(ids, sb.ID)
		}
		return float64(n) / time.Since(begun).Seconds(), nil
	}
	warm, err := burst(20)
	if err != nil {
		return err
	}
	b.metric("creates_per_s_warm", "1/s", []float64{warm})
	dry, err := burst(b.n(30))
	if err != nil {
		return err
	}
	b.metric("creates_per_s_dry", "1/s", []float64{dry})
	for _, id := range ids {
		if err := s.Delete(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// idle holds many sandboxes at once and weighs them.
func idle(ctx context.Context, b *bench) error {
	s, err := b.start(ctx, gvisor.Name, map[string]int{})
	if err != nil {
		return err
	}
	n := 100
	if b.quick {
		n = 10
	}
	var ids []string
	for range n {
		sb, err := s.Create(ctx, map[string]any{"template": peerTemplate})
		if err != nil {
			return err
		}
		ids = append(ids, sb.ID)
	}
	time.Sleep(3 * time.Second)
	usage, begun := cpuOf(s.NodeDir()), time.Now()
	time.Sleep(5 * time.Second)
	busy := 100 * (cpuOf(s.NodeDir()) - usage) / time.Since(begun).Seconds() / float64(n)
	b.metric("idle_cpu_percent", "%", []float64{busy}) // of one CPU, for each sandbox
	var pss []float64
	groups, _ := filepath.Glob("/sys/fs/cgroup/memory" + cgroupOf(s.NodeDir()) + "/sbx*/cgroup.procs")
	v2, _ := filepath.Glob("/sys/fs/cgroup" + cgroupOf(s.NodeDir()) + "/sbx*/cgroup.procs")
	for _, g := range append(groups, v2...) {
		procs, _ := os.ReadFile(g)
		kb := 0.0
		for f := range strings.FieldsSeq(string(procs)) {
			var pid int
			if _, err := fmt.Sscan(f, &pid); err == nil {
				kb += devserver.ProcKB(pid, "smaps_rollup", "Pss")
			}
		}
		pss = append(pss, kb/1024)
	}
	if len(pss) != n {
		return fmt.Errorf("%d sandboxes, but %d cgroups", n, len(pss))
	}
	answers, err := times(ctx, n, func(i int) error {
		r, err := s.Exec(ctx, ids[i], map[string]any{"cmd": []string{"/bin/echo", ids[i]}})
		if err == nil && strings.TrimSpace(r.Stdout) != ids[i] {
			err = fmt.Errorf("sandbox %s answered %q", ids[i], r.Stdout)
		}
		return err
	})
	if err != nil {
		return err
	}
	b.metric("idle_pss_mb", "MB", pss) // bar: <= 45
	b.metric("idle_answer", "ms", answers)
	b.metric("server_rss_mb", "MB", []float64{s.RSS()})
	for _, id := range ids {
		if err := s.Delete(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// cpuOf is the CPU time, in seconds, that all machines of a node have used.
func cpuOf(nodeDir string) float64 {
	b, err := os.ReadFile("/sys/fs/cgroup/cpuacct" + cgroupOf(nodeDir) + "/cpuacct.usage")
	if err == nil {
		var ns float64
		_, _ = fmt.Sscan(string(b), &ns)
		return ns / 1e9
	}
	b, _ = os.ReadFile("/sys/fs/cgroup" + cgroupOf(nodeDir) + "/cpu.stat")
	var us float64
	_, _ = fmt.Sscanf(string(b), "usage_usec %f", &us)
	return us / 1e6
}

func cgroupOf(nodeDir string) string {
	return "/sandlot-" + filepath.Base(gvisor.RunDir(nodeDir))
}

// listThousand lists a thousand sandboxes of the memory engine.
func listThousand(ctx context.Context, b *bench) error {
	s, err := b.start(ctx, "memory", map[string]int{})
	if err != nil {
		return err
	}
	for range 1000 {
		if _, err := s.Create(ctx, map[string]any{"template": peerTemplate}); err != nil {
			return err
		}
	}
	got, err := times(ctx, b.n(30), func(int) error {
		seen, cursor := 0, ""
		for {
			var page struct {
				Sandboxes  []json.RawMessage
				NextCursor string `json:"next_cursor"`
			}
			if err := s.Call(ctx, "GET", "?limit=200&cursor="+cursor, nil, &page); err != nil {
				return err
			}
			seen += len(page.Sandboxes)
			if cursor = page.NextCursor; cursor == "" {
				break
			}
		}
		if seen != 1000 {
			return fmt.Errorf("%d sandboxes listed", seen)
		}
		return nil
	})
	if err != nil {
		return err
	}
	b.metric("list_1000", "ms", got)
	return nil
}
