// Command patch makes a copy of gVisor's module with small changes, and patched.mod, which builds with it:
//
//	go run ./patch && CGO_ENABLED=0 go build -modfile=patched.mod .
//
// Run it in the folder above. It fails when the module does not read as expected, so that a new version cannot
// lose a change in silence. Nothing of the copy is kept in this repository.
package main

import (
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const (
	module = "gvisor.dev/gvisor"
	folder = "gvisor"
	mod    = "patched.mod"
	sum    = "patched.sum"
)

// change replaces one piece of text, which occurs exactly once, in a file of the module.
type change struct {
	file, from, to string
}

var changes = []change{
	// Registering for membarrier(2) waits for an RCU grace period, 11 ms here, and gVisor does it in each of the
	// six processes of a start. Only the last, the sentry, can use it: start.go calls it there.
	{"pkg/sentry/hostmm/membarrier.go", "func init() {", "var registerMembarrier = func() {"},

	// Whoever gives a guest memory asks oom.go first, before any lock where that can be.
	{
		"pkg/sentry/pgalloc/context.go", "// MemoryFileMapFromContext returns", `var (
	hold     func(ctx context.Context, length uint64) error
	holdFile func(length uint64) error
)

// Hold waits until there is memory for length bytes, or says why there will be none.
func Hold(ctx context.Context, length uint64) error {
	if hold == nil {
		return nil
	}
	return hold(ctx, length)
}

// HoldFile is Hold for what stays when its program ends. It does not wait.
func HoldFile(length uint64) error {
	if holdFile == nil {
		return nil
	}
	return holdFile(length)
}

// MemoryFileMapFromContext returns`,
	},
	{"pkg/sentry/mm/pma.go", "// addRSSLocked updates", `var residentSize = func(mm *MemoryManager) uint64 { return atomic.LoadUint64(&mm.curRSS) }

// addRSSLocked updates`},
	{"pkg/sentry/mm/pma.go", "fr, err := mm.mf.Allocate(uint64(allocAR.Length()), allocOpts)", `if err := pgalloc.Hold(ctx, uint64(allocAR.Length())); err != nil {
						return pstart, pgap, err
					}
					fr, err := mm.mf.Allocate(uint64(allocAR.Length()), allocOpts)`},
	{"pkg/sentry/mm/pma.go", "// Get internal mappings from the pma to copy from.", `if err := pgalloc.Hold(ctx, uint64(copyAR.Length())); err != nil {
						return pstart, pseg.PrevGap(), err
					}
					// Get internal mappings from the pma to copy from.`},
	{"pkg/sentry/kernel/shm/shm.go", "fr, err := mf.Allocate(effectiveSize,", `if err := pgalloc.Hold(ctx, effectiveSize); err != nil {
		return nil, err
	}
	fr, err := mf.Allocate(effectiveSize,`},
	{"pkg/sentry/fsimpl/tmpfs/regular_file.go", "mayHuge := rf.huge && rf.inode.fs.mf.HugepagesEnabled()\n\n	rf.dataMu.Lock()", `mayHuge := rf.huge && rf.inode.fs.mf.HugepagesEnabled()
	rf.dataMu.RLock()
	missing := required.Length() - rf.data.SpanRange(required)
	rf.dataMu.RUnlock()
	if missing > 0 {
		if err := rf.hold(ctx, max(missing, 64<<10)); err != nil { // maxOptionalBytes
			return nil, &memmap.BusError{err}
		}
	}

	rf.dataMu.Lock()`},
	{"pkg/sentry/fsimpl/tmpfs/regular_file.go", "f := fd.inode().impl.(*regularFile)\n	f.inode.mu.Lock()\n	defer f.inode.mu.Unlock()\n	// If the file is opened with O_APPEND", `f := fd.inode().impl.(*regularFile)
	if err := f.hold(ctx, uint64(srclen)); err != nil {
		return 0, offset, err
	}
	f.inode.mu.Lock()
	defer f.inode.mu.Unlock()
	// If the file is opened with O_APPEND`},
	{"pkg/sentry/fsimpl/tmpfs/regular_file.go", "// To be consistent with Linux, inode.mu must be locked throughout.", `if err := f.hold(ctx, length); err != nil {
		return err
	}
	// To be consistent with Linux, inode.mu must be locked throughout.`},
	{"pkg/sentry/fsimpl/tmpfs/regular_file.go", "func getRegularFileReadWriter(", `// hold asks for memory for a file that lies there.
func (rf *regularFile) hold(ctx context.Context, length uint64) error {
	switch {
	case rf.inode.fs.mf.IsDiskBacked():
		return nil
	case rf.memoryUsageKind == usage.Anonymous: // a shared mapping
		return pgalloc.Hold(ctx, length)
	}
	return pgalloc.HoldFile(length)
}

func getRegularFileReadWriter(`},

	// runsc closes what it inherited, and boot, not the gofer, is to have the file of kills (memory.go).
	{"runsc/sandbox/sandbox.go", "nextFD := donations.Transfer(cmd, 3)", `nextFD := donations.Transfer(cmd, 3)
	_, _ = unix.FcntlInt(60, unix.F_SETFD, 0)`},

	// A process costs the host half a megabyte before it has any memory of its own.
	{"pkg/sentry/kernel/kernel.go", "// SetMemoryFile sets", `func (t *Task) hold(length uint64) error { return pgalloc.Hold(t, length) }

// SetMemoryFile sets`},
	{"pkg/sentry/kernel/task_clone.go", "func (t *Task) Clone(args *linux.CloneArgs) (ThreadID, *SyscallControl, error) {", `func (t *Task) Clone(args *linux.CloneArgs) (ThreadID, *SyscallControl, error) {
	if err := t.hold(512 << 10); err != nil {
		return 0, nil, err
	}`},

	// A build reads what its step changed with "runsc tar rootfs-upper". That leaves out which folders hide the
	// image's folder of the same name, and holds each file in memory whole.
	{"pkg/sentry/fsimpl/tmpfs/tar.go", "	if err := tw.WriteHeader(header); err != nil {", `	if header.Typeflag == tar.TypeDir {
		const opaque = "trusted.overlay.opaque"
		if v, err := d.inode.getXattr(auth.CredentialsFromContext(ctx), &vfs.GetXattrOptions{Name: opaque}); err == nil {
			header.PAXRecords = map[string]string{"SCHILY.xattr." + opaque: v}
		}
	}
	if err := tw.WriteHeader(header); err != nil {`},
	{"pkg/sentry/fsimpl/tmpfs/tar.go", `	data := make([]byte, rf.size.RacyLoad())
	dst := usermem.BytesIOSequence(data)
	rw := getRegularFileReadWriter(rf, 0, 0)
	n, err := dst.CopyOutFrom(ctx, rw)
	putRegularFileReadWriter(rw)
	if err != nil && err != io.EOF {
		return fmt.Errorf("failed to read file content: %w", err)
	}
	if n != int64(len(data)) {
		return fmt.Errorf("failed to read all file content, got %d bytes, want %d", n, len(data))
	}
	if _, err := tw.Write(data); err != nil {
		return fmt.Errorf("failed to write file content to tar: %w", err)
	}
	return nil`, `	size := rf.size.RacyLoad()
	buf := make([]byte, min(size, 1<<20))
	for off := uint64(0); off < size; {
		data := buf[:min(uint64(len(buf)), size-off)]
		rw := getRegularFileReadWriter(rf, int64(off), 0)
		n, err := usermem.BytesIOSequence(data).CopyOutFrom(ctx, rw)
		putRegularFileReadWriter(rw)
		if err != nil && err != io.EOF {
			return fmt.Errorf("failed to read file content: %w", err)
		}
		if n != int64(len(data)) {
			return fmt.Errorf("failed to read all file content, got %d bytes, want %d", n, len(data))
		}
		if _, err := tw.Write(data); err != nil {
			return fmt.Errorf("failed to write file content to tar: %w", err)
		}
		off += uint64(n)
	}
	return nil`},
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("patch: ")
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	out, err := exec.Command("go", "mod", "download", "-json", module).Output() // a no-op where it is there already
	if err != nil {
		return fmt.Errorf("download %s: %w: %s", module, err, out)
	}
	out, err = exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return fmt.Errorf("find %s: %w", module, err)
	}
	if err := copySources(strings.TrimSpace(string(out))); err != nil {
		return err
	}
	for _, c := range changes {
		path := filepath.Join(folder, c.file)
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if n := strings.Count(string(src), c.from); n != 1 {
			return fmt.Errorf("%s has %q %d times, not once", c.file, c.from, n)
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(src), c.from, c.to, 1)), 0o644); err != nil {
			return err
		}
	}
	for from, to := range map[string]string{"go.mod": mod, "go.sum": sum} {
		b, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if to == mod {
			b = fmt.Appendf(b, "\nreplace %s => ./%s\n", module, folder)
		}
		if err := os.WriteFile(to, b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// copySources copies the module without its tests.
func copySources(dir string) error {
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(folder, rel), 0o755)
		}
		if strings.HasSuffix(path, "_test.go") {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(folder, rel), b, 0o644)
	})
}
