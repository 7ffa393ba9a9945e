package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"sandlot/internal/devserver"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/template"
)

// pythonTemplate is what cells run in.
const pythonTemplate = "python-3.12"

// cellAnswer is what the figures need of run-code's.
type cellAnswer struct {
	DurationMS float64 `json:"duration_ms"`
	Results    []map[string]any
	Error      *struct{ Name, Value string }
	StateLost  bool `json:"state_lost"`
}

// cell runs code that must end well, and give want as its last text when want is not "".
func cell(ctx context.Context, s *devserver.Server, id, context, code, want string) (cellAnswer, error) {
	var a cellAnswer
	req := map[string]any{"code": code, "timeout_s": 300}
	if context != "" {
		req["context_id"] = context
	}
	if err := s.Call(ctx, "POST", "/"+id+"/run-code", req, &a); err != nil {
		return a, err
	}
	text := ""
	if n := len(a.Results); n > 0 {
		text, _ = a.Results[n-1]["text/plain"].(string)
	}
	if a.Error != nil || want != "" && text != want {
		return a, fmt.Errorf("cell %.40q: %q, %+v", code, text, a.Error)
	}
	return a, nil
}

func (b *bench) pythonBox(ctx context.Context) (*devserver.Server, string, error) {
	s, err := b.start(ctx, gvisor.Name, map[string]int{pythonTemplate: 2})
	if err != nil {
		return nil, "", err
	}
	if err := s.Await(ctx); err != nil {
		return nil, "", err
	}
	sb, err := s.Create(ctx, map[string]any{"template": pythonTemplate})
	if err == nil && !sb.Timings.FromPool {
		err = errors.New("a create with a full pool was not served from it")
	}
	return s, sb.ID, err
}

// cellWarm runs a cell again and again in one context, and the first one of fresh sandboxes.
func cellWarm(ctx context.Context, b *bench) error {
	var first []float64
	for range b.n(30) {
		s, id, err := b.pythonBox(ctx)
		if err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond) // as who reads the answer to create
		begun := time.Now()
		if _, err := cell(ctx, s, id, "", "1+1", "2"); err != nil {
			return err
		}
		first = append(first, ms(time.Since(begun)))
		if err := s.Delete(ctx, id); err != nil {
			return err
		}
	}
	b.metric("cell_first", "ms", first) // bar: <= 40
	s, id, err := b.pythonBox(ctx)
	if err != nil {
		return err
	}
	if err := s.Await(ctx); err != nil {
		return err
	}
	var warm, inside []float64
	for range b.n(300) {
		time.Sleep(pause)
		begun := time.Now()
		a, err := cell(ctx, s, id, "", "1+1", "2")
		if err != nil {
			return err
		}
		warm, inside = append(warm, ms(time.Since(begun))), append(inside, a.DurationMS)
	}
	b.metric("cell_warm", "ms", warm) // bar: <= 6
	b.metric("cell_warm_bridge", "ms", inside)
	b.ratio("cell_warm_vs_bridge", "cell_warm", "cell_warm_bridge", "<=1.5")
	return s.Delete(ctx, id)
}

const chart = `import matplotlib.pyplot as plt
plt.plot(range(100), [x * x for x in range(100)])
plt.title("squares")
`

// cellChart draws the same chart in a sandbox and with the template's Python on this machine, each in a new process
// and once more in it.
func cellChart(ctx context.Context, b *bench) (err error) {
	native, done, err := b.mounted(ctx, pythonTemplate)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	script := chart + "import io, time\nbegun = time.time()\n" +
		"plt.savefig(io.BytesIO(), bbox_inches='tight'); plt.close()\nprint(time.time() - start)\nstart = time.time()\n" + chart +
		"plt.savefig(io.BytesIO(), bbox_inches='tight')\nprint(time.time() - start)\n"
	var first, second, nativeFirst, nativeSecond []float64
	for range b.n(9) {
		cmd := exec.CommandContext(ctx, "chroot", "--userspec=1000:1000", native, "/usr/local/bin/python3", "-c", "import time\nstart = time.time()\n"+script)
		cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/home/user", "MPLBACKEND=agg", "LANG=C.UTF-8"}
		var said bytes.Buffer
		cmd.Stderr = &said
		out, err := cmd.Output()
		var x, y float64
		if _, serr := fmt.Sscan(string(out), &x, &y); err != nil || serr != nil {
			return fmt.Errorf("native Python: %w, %w: %.300s", err, serr, said.String())
		}
		nativeFirst, nativeSecond = append(nativeFirst, 1000*x), append(nativeSecond, 1000*y)

		s, id, err := b.pythonBox(ctx)
		if err != nil {
			return err
		}
		if err := s.Await(ctx); err != nil {
			return err
		}
		for _, to := range []*[]float64{&first, &second} {
			begun := time.Now()
			a, err := cell(ctx, s, id, "", chart, "")
			if err != nil {
				return err
			}
			if n := len(a.Results); n == 0 || a.Results[n-1]["image/png"] == nil {
				return errors.New("the cell gave no chart")
			}
			*to = append(*to, ms(time.Since(begun)))
		}
		if err := s.Delete(ctx, id); err != nil {
			return err
		}
	}
	b.metric("matplotlib_first", "ms", first)
	b.metric("matplotlib_first_native", "ms", nativeFirst)
	b.metric("matplotlib_second", "ms", second)
	b.metric("matplotlib_second_native", "ms", nativeSecond)
	b.ratio("matplotlib_first_vs_native", "matplotlib_first", "matplotlib_first_native", "<=3")
	b.ratio("matplotlib_second_vs_native", "matplotlib_second", "matplotlib_second_native", "<=2")
	return err
}

// mounted shows a template's image as a root directory that can be written to, in memory.
func (b *bench) mounted(ctx context.Context, name string) (dir string, done func() error, err error) {
	store, err := template.Open(b.templates)
	if err != nil {
		return "", nil, err
	}
	tpl, err := store.Get(name)
	if err != nil {
		return "", nil, err
	}
	at, err := os.MkdirTemp(b.dir, "native-")
	if err != nil {
		return "", nil, err
	}
	image, memory, dir := at+"/image", at+"/memory", at+"/root"
	var mounts []string
	done = func() error { // also after ctx has ended
		var errs error
		for _, m := range slices.Backward(mounts) {
			errs = errors.Join(errs, syscall.Unmount(m, 0))
		}
		mounts = nil
		return errs
	}
	for _, m := range [][]string{
		{image, "-t", "erofs", "-o", "loop,ro", tpl.Image},
		{memory, "-t", "tmpfs", "tmpfs"},
		{dir, "-t", "overlay", "-o", "lowerdir=" + image + ",upperdir=" + memory + "/upper,workdir=" + memory + "/work", "overlay"},
		{dir + "/proc", "-t", "proc", "proc"}, // the interpreter finds its library by it
		{dir + "/dev", "--bind", "/dev"},
	} {
		err := os.MkdirAll(m[0], 0o755)
		if err == nil {
			var out []byte
			if out, err = exec.CommandContext(ctx, "mount", append(m[1:], m[0])...).CombinedOutput(); err != nil {
				err = fmt.Errorf("mount: %w: %s", err, out)
			}
		}
		if err == nil {
			mounts = append(mounts, m[0])
			if m[0] == memory {
				err = errors.Join(os.Mkdir(memory+"/upper", 0o755), os.Mkdir(memory+"/work", 0o755))
			}
		}
		if err != nil {
			return "", nil, errors.Join(err, done())
		}
	}
	return dir, done, nil
}

// contextsTwenty has twenty contexts of one sandbox answer at once, and weighs an idle kernel.
func contextsTwenty(ctx context.Context, b *bench) error {
	s, id, err := b.pythonBox(ctx)
	if err != nil {
		return err
	}
	if err := s.Await(ctx); err != nil {
		return err
	}
	var mu sync.Mutex
	var failed error
	all := func(code string) float64 {
		var wg sync.WaitGroup
		begun := time.Now()
		for i := range 20 {
			wg.Go(func() {
				if _, err := cell(ctx, s, id, fmt.Sprint("c", i), code, "2"); err != nil {
					mu.Lock()
					failed = errors.Join(failed, err)
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		return ms(time.Since(begun))
	}
	if _, err := cell(ctx, s, id, "", "1+1", "2"); err != nil {
		return err
	}
	before := pssOf(s, id)
	start := all("1+1")
	time.Sleep(2 * time.Second)
	after := pssOf(s, id)
	var again []float64
	for range b.n(20) {
		again = append(again, all("1+1"))
	}
	if failed != nil {
		return failed
	}
	b.metric("contexts_20_start", "ms", []float64{start})
	b.metric("contexts_20", "ms", again)
	b.metric("kernel_pss_mb", "MB", []float64{(after - before) / 20}) // bar: <= 15
	return s.Delete(ctx, id)
}

// pssOf is the memory of a machine's processes, in MB, pages that it shares in proportion.
func pssOf(s *devserver.Server, id string) float64 {
	kb := 0.0
	for _, pattern := range []string{"/sys/fs/cgroup/memory", "/sys/fs/cgroup"} {
		procs, err := os.ReadFile(pattern + cgroupOf(s.NodeDir()) + "/" + id + "/cgroup.procs")
		if err != nil {
			continue
		}
		for f := range strings.FieldsSeq(string(procs)) {
			var pid int
			if _, err := fmt.Sscan(f, &pid); err == nil {
				kb += devserver.ProcKB(pid, "smaps_rollup", "Pss")
			}
		}
		break
	}
	return kb / 1024
}
