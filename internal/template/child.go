package template

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// A process whose argv[0] is childName is a child of runJob: it never reaches main. This way any program that
// builds templates, tests included, is its own helper binary.
func init() {
	if len(os.Args) == 1 && os.Args[0] == childName {
		runtime.LockOSThread() // capabilities belong to a thread
		if err := childMain(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

func childMain() error {
	spec := os.NewFile(3, "job")
	var j job
	if err := json.NewDecoder(spec).Decode(&j); err != nil {
		return fmt.Errorf("reading the job: %w", err)
	}
	spec.Close()
	unix.Umask(0o022)
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	if err := unix.Sethostname([]byte("sandbox")); err != nil {
		return err
	}
	if j.Action == actionHost {
		if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return fmt.Errorf("mounting /proc: %w", err)
		}
		return replace(j.Argv, j.Env)
	}
	if err := mountStack(&j); err != nil {
		return err
	}
	if j.Action == actionImage {
		return replace(j.Argv, j.Env)
	}
	// Folders of the host are picked up before the root changes and put down after it.
	binds := make(map[string]int)
	for from, name := range j.Binds {
		fd, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return fmt.Errorf("opening %s: %w", from, err)
		}
		binds[name] = fd
	}
	if err := enter(j.Mount); err != nil {
		return err
	}
	switch j.Action {
	case actionExec:
		return runInside(&j, binds)
	case actionExtract:
		return extract(os.Stdin)
	case actionLayers:
		return extractLayers(os.Stdin)
	case actionPrepare:
		return prepare()
	case actionFinish:
		return finish()
	}
	return fmt.Errorf("no action %q", j.Action)
}

func replace(argv, env []string) error {
	p, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return fmt.Errorf("%s: %w", p, unix.Exec(p, argv, env))
}

// mountStack mounts the layers at j.Mount. Paths in overlayfs's options are relative, so that no character of
// the cache folder's own path can matter.
func mountStack(j *job) error {
	if err := unix.Chdir(j.Dir); err != nil {
		return fmt.Errorf("%s: %w", j.Dir, err)
	}
	opts := "lowerdir=" + strings.Join(j.Lowers, ":") + ",index=off,metacopy=off,redirect_dir=off,xino=off"
	flags := uintptr(unix.MS_NODEV)
	var err error
	if j.Upper == "" {
		err = unix.Mount("overlay", j.Mount, "overlay", flags|unix.MS_RDONLY, opts)
	} else {
		opts += ",upperdir=" + j.Upper + ",workdir=" + j.Work
		// "volatile" makes fsync free: a layer that a crash interrupts is thrown away whole, and a
		// finished one is synced before it gets its name.
		err = unix.Mount("overlay", j.Mount, "overlay", flags, opts+",volatile")
		if errors.Is(err, unix.EINVAL) {
			err = unix.Mount("overlay", j.Mount, "overlay", flags, opts)
		}
	}
	if err != nil {
		return fmt.Errorf("stacking layers with overlayfs in %s (the cache must be on a disk file system such as ext4 or xfs): %w", j.Dir, err)
	}
	return nil
}

// enter makes dir the root and lets go of the host's.
func enter(dir string) error {
	if err := unix.Chdir(dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("changing the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leaving the old root: %w", err)
	}
	return unix.Chdir("/")
}

// runInside runs j.Argv with the image as root directory.
func runInside(j *job, binds map[string]int) error {
	if err := mountInside(); err != nil {
		return err
	}
	for name, fd := range binds {
		to := path.Join(buildDir, name)
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := unix.MoveMount(fd, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("binding %s: %w", to, err)
		}
		const ro = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
		if err := unix.Mount("", to, "", ro, ""); err != nil {
			return fmt.Errorf("binding %s read-only: %w", to, err)
		}
	}
	uncover, err := cover(j.Files)
	if err != nil {
		return errors.Join(err, uncover())
	}
	if err := dropCapabilities(); err != nil {
		return errors.Join(err, uncover())
	}
	cmd := exec.Command(j.Argv[0], j.Argv[1:]...)
	cmd.Env = j.Env
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return errors.Join(cmd.Run(), uncover())
}

// mountInside gives programs /proc, a /dev without devices of the host, and a /tmp and /run that no layer
// keeps.
func mountInside() error {
	const quiet = unix.MS_NOSUID | unix.MS_NODEV
	for _, m := range []struct {
		fstype, at, opts string
		flags            uintptr
	}{
		{"proc", "/proc", "", quiet | unix.MS_NOEXEC},
		{"tmpfs", "/dev", "mode=0755,size=64m", unix.MS_NOSUID},
		{"tmpfs", "/dev/shm", "mode=1777", quiet},
		{"devpts", "/dev/pts", "newinstance,ptmxmode=0666,mode=0620", unix.MS_NOSUID | unix.MS_NOEXEC},
		{"tmpfs", "/tmp", "mode=1777", quiet},
		{"tmpfs", "/run", "mode=0755", quiet},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fstype, m.at, m.fstype, m.flags, m.opts); err != nil {
			return fmt.Errorf("mounting %s: %w", m.at, err)
		}
	}
	for name, dev := range map[string]uint64{
		"null": unix.Mkdev(1, 3), "zero": unix.Mkdev(1, 5), "full": unix.Mkdev(1, 7),
		"random": unix.Mkdev(1, 8), "urandom": unix.Mkdev(1, 9), "tty": unix.Mkdev(5, 0),
	} {
		p := "/dev/" + name
		if err := unix.Mknod(p, unix.S_IFCHR|0o666, int(dev)); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		if err := os.Chmod(p, 0o666); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd",
		"stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, "/dev/"+name); err != nil {
			return err
		}
	}
	return os.Mkdir(buildDir, 0o755)
}

// cover puts each content over a file of the image. uncover is never nil, takes them away again, and
// removes the files that had to be made.
func cover(files map[string]string) (uncover func() error, err error) {
	var undo []func() error
	uncover = func() error {
		var errs []error
		for _, f := range undo {
			errs = append(errs, f())
		}
		return errors.Join(errs...)
	}
	n := 0
	for target, content := range files {
		n++
		from := path.Join(buildDir, fmt.Sprintf("cover%d", n))
		if err := os.WriteFile(from, []byte(content), 0o755); err != nil {
			return uncover, err
		}
		info, err := os.Lstat(target)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if err := os.MkdirAll(path.Dir(target), 0o755); err != nil {
				return uncover, err
			}
			if err := os.WriteFile(target, nil, 0o644); err != nil {
				return uncover, err
			}
			undo = append(undo, func() error { return os.Remove(target) })
		case err != nil:
			return uncover, err
		case !info.Mode().IsRegular():
			return uncover, fmt.Errorf("%s of the image is not a regular file", target)
		}
		if err := unix.Mount(from, target, "", unix.MS_BIND, ""); err != nil {
			return uncover, fmt.Errorf("covering %s: %w", target, err)
		}
		undo = append([]func() error{func() error { return unix.Unmount(target, unix.MNT_DETACH) }}, undo...)
	}
	return uncover, nil
}

// keptCapabilities is what installing packages takes. None opens a device, mounts, loads, traces or leaves the
// root directory.
var keptCapabilities = map[uintptr]bool{
	unix.CAP_CHOWN: true, unix.CAP_DAC_OVERRIDE: true, unix.CAP_FOWNER: true, unix.CAP_FSETID: true,
	unix.CAP_KILL: true, unix.CAP_SETGID: true, unix.CAP_SETUID: true, unix.CAP_SETPCAP: true,
	unix.CAP_SETFCAP: true, unix.CAP_NET_BIND_SERVICE: true, unix.CAP_AUDIT_WRITE: true,
	// dpkg runs maintainer scripts after a chroot to "/". Without mount or mknod it leads nowhere: the
	// host's root is not mounted in this namespace.
	unix.CAP_SYS_CHROOT: true,
}

// dropCapabilities lowers the bounding set of this thread, and so of what it starts.
func dropCapabilities() error {
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		if keptCapabilities[c] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("dropping capability %d: %w", c, err)
		}
	}
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}

// extract unpacks a tree (tree.go) with the image as root directory: links in the image are followed, and
// cannot lead out of it.
func extract(r io.Reader) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := extractEntry(h, tr); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
}

func extractEntry(h *tar.Header, r io.Reader) error {
	name, err := imagePath(h.Name)
	if err != nil {
		return err
	}
	p := "/" + name
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		return err
	}
	mode := fs.FileMode(h.Mode & 0o777)
	switch h.Typeflag {
	case tar.TypeDir:
		if err := os.Mkdir(p, mode); err != nil {
			// A folder, or a link to one such as /bin, keeps its mode and owner: others rely on them.
			if info, serr := os.Stat(p); serr != nil || !info.IsDir() {
				return err
			}
			return nil
		}
	case tar.TypeReg:
		if err := removeOld(p); err != nil {
			return err
		}
		f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, r)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := removeOld(p); err != nil {
			return err
		}
		if err := os.Symlink(h.Linkname, p); err != nil {
			return err
		}
		return os.Lchown(p, h.Uid, h.Gid)
	default:
		return fmt.Errorf("an entry of type %q", h.Typeflag)
	}
	if err := os.Lchown(p, h.Uid, h.Gid); err != nil {
		return err
	}
	return unix.Chmod(p, uint32(h.Mode&0o7777)) // after chown, which clears set-uid
}

// removeOld removes what is at p, unless it is a folder that holds something.
func removeOld(p string) error {
	if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
