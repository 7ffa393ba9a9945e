package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"sandlot/internal/template"
)

// peerTemplate is the image that everything here starts from.
const peerTemplate = "base"

// rootDir shows the template's image as a directory, as the plain tools want it.
func (b *bench) rootDir(ctx context.Context) (dir string, done func() error, err error) {
	store, err := template.Open(b.templates)
	if err != nil {
		return "", nil, err
	}
	tpl, err := store.Get(peerTemplate)
	if err != nil {
		return "", nil, err
	}
	dir = filepath.Join(b.dir, "root")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, err
	}
	if out, err := exec.CommandContext(ctx, "mount", "-t", "erofs", "-o", "loop,ro", tpl.Image, dir).CombinedOutput(); err != nil {
		return "", nil, fmt.Errorf("mount the image: %w: %s", err, out)
	}
	return dir, func() error {
		return exec.Command("umount", dir).Run() // also after ctx has ended
	}, nil
}

// runsc is a plain use of the pinned runsc: a bundle with a directory root.
type runsc struct {
	bin, state, bundle string
}

func (b *bench) plainRunsc(root, name string) (*runsc, error) {
	r := &runsc{bin: filepath.Join(b.bin, name), state: filepath.Join(b.dir, "runsc"), bundle: filepath.Join(b.dir, "bundle")}
	spec := map[string]any{
		"ociVersion": "1.0.0",
		"process": map[string]any{
			"user": map[string]any{"uid": 0, "gid": 0}, "args": []string{"sleep", "1000"}, "cwd": "/",
			"env": []string{"PATH=/usr/bin:/bin"},
		},
		"root":     map[string]any{"path": root},
		"hostname": "peer",
		"mounts":   []any{map[string]any{"destination": "/proc", "type": "proc", "source": "proc"}},
		"linux": map[string]any{
			"cgroupsPath": "/sandlot-bench",
			"namespaces": []any{
				map[string]any{"type": "pid"}, map[string]any{"type": "ipc"}, map[string]any{"type": "uts"},
				map[string]any{"type": "mount"}, map[string]any{"type": "network"},
			},
		},
	}
	j, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(r.bundle, 0o700); err != nil {
		return nil, err
	}
	return r, os.WriteFile(filepath.Join(r.bundle, "config.json"), j, 0o600)
}

func (r *runsc) cmd(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, r.bin, append([]string{"--root=" + r.state, "--network=sandbox", "--overlay2=root:memory"}, args...)...)
}

func (r *runsc) run(ctx context.Context, id string) error {
	return r.cmd(ctx, "run", "--detach", "--bundle="+r.bundle, id).Run()
}

func (r *runsc) exec(ctx context.Context, id string, args ...string) error {
	return r.cmd(ctx, append([]string{"exec", id}, args...)...).Run()
}

func (r *runsc) remove(id string) {
	_ = r.cmd(context.Background(), "delete", "--force", id).Run()
}

// runscPeer measures one runsc.
func (b *bench) runscPeer(ctx context.Context, root, prefix, name string) error {
	r, err := b.plainRunsc(root, name)
	if err != nil {
		return err
	}
	var both []float64
	for i := range b.n(20) {
		id := fmt.Sprintf("peer%d", i)
		begun := time.Now()
		err := errors.Join(r.run(ctx, id), r.exec(ctx, id, "/bin/true"))
		both = append(both, ms(time.Since(begun)))
		r.remove(id)
		if err != nil {
			return fmt.Errorf("runsc: %w", err)
		}
	}
	b.metric(prefix+"_run_exec", "ms", both)
	if err := r.run(ctx, "peer"); err != nil {
		return err
	}
	defer r.remove("peer")
	var execs []float64
	for range b.n(50) {
		time.Sleep(pause)
		one, err := times(ctx, 1, func(int) error { return r.exec(ctx, "peer", "/bin/true") })
		if err != nil {
			return err
		}
		execs = append(execs, one...)
	}
	b.metric(prefix+"_exec_true", "ms", execs)
	begun := time.Now()
	cmd := r.cmd(ctx, "exec", "peer", "head", "-c", fmt.Sprint(streamBytes), "/dev/zero")
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, out)
	if err := errors.Join(err, cmd.Wait()); err != nil || n != streamBytes {
		return fmt.Errorf("runsc exec of head: %d bytes, %w", n, err)
	}
	b.metric(prefix+"_exec_stream", "MB/s", []float64{mbps(n, time.Since(begun))})
	return nil
}

// peers measures the plain tools.
func peers(ctx context.Context, b *bench) (err error) {
	root, done, err := b.rootDir(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	// gVisor as it is at the pinned version, and as Sandlot builds it.
	for _, p := range []struct{ prefix, name string }{{"runsc", "runsc-plain"}, {"runsc_ours", "runsc"}} {
		if err := b.runscPeer(ctx, root, p.prefix, p.name); err != nil {
			return err
		}
	}
	for _, p := range []struct {
		name string
		argv []string
	}{
		{"bwrap_true", []string{"bwrap", "--ro-bind", root, "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "/bin/true"}},
		{"nspawn_true", []string{"systemd-nspawn", "-q", "--read-only", "--register=no", "--keep-unit", "-D", root, "/bin/true"}},
		{"chroot_true", []string{"chroot", root, "/bin/true"}},
	} {
		if _, err := exec.LookPath(p.argv[0]); err != nil {
			fmt.Printf("# %s: not installed\n", p.name)
			continue
		}
		got, err := times(ctx, b.n(20), func(int) error { return exec.CommandContext(ctx, p.argv[0], p.argv[1:]...).Run() })
		if err != nil {
			fmt.Printf("# %s: does not work on this machine: %v\n", p.name, err)
			continue
		}
		b.metric(p.name, "ms", got)
	}
	return nil
}

func mbps(n int64, d time.Duration) float64 { return float64(n) / 1e6 / d.Seconds() }
