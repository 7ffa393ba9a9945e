package hostos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

// BlankDisk makes, once, an empty ext4 image of gib GiB in dir and returns its path. It has no journal,
// because a sandbox does not outlive its host, and no reserved blocks: all of it is the sandbox's.
func BlankDisk(ctx context.Context, dir string, gib int) (string, error) {
	path := filepath.Join(dir, fmt.Sprintf("blank-%dg.ext4", gib))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	tmp, err := os.CreateTemp(dir, ".blank-*")
	if err != nil {
		return "", err
	}
	defer os.Remove(tmp.Name())
	err = tmp.Truncate(int64(gib) << 30)
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal,^resize_inode",
		"-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", tmp.Name())
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mkfs.ext4: %w: %.300s", err, out)
	}
	return path, os.Rename(tmp.Name(), path)
}

// CopySparse copies src to a new file dst and keeps its holes. It clones where the filesystem can.
func CopySparse(src, dst string) (err error) {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := out.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			os.Remove(dst)
		}
	}()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		return nil
	}
	fi, err := in.Stat()
	if err != nil {
		return err
	}
	if err := out.Truncate(fi.Size()); err != nil {
		return err
	}
	for off := int64(0); ; {
		data, err := unix.Seek(int(in.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // holes to the end
		}
		if err != nil {
			return err
		}
		hole, err := unix.Seek(int(in.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(out, data), io.NewSectionReader(in, data, hole-data)); err != nil {
			return err
		}
		off = hole
	}
}

// MountImage attaches image to a loop device and mounts its ext4 on dir, which must exist. The device goes
// by itself with the mount. Nobody can set uids or reach devices through it. Trim gives back what is freed.
func MountImage(image, dir string) error {
	img, err := os.OpenFile(image, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer img.Close()
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("loop devices: %w", err)
	}
	defer ctl.Close()
	for range 64 { // another process may take the free one first
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return fmt.Errorf("no free loop device: %w", err)
		}
		name := fmt.Sprintf("/dev/loop%d", n)
		dev, err := os.OpenFile(name, os.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		config := &unix.LoopConfig{Fd: uint32(img.Fd())}
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		copy(config.Info.File_name[:len(config.Info.File_name)-1], image)
		err = unix.IoctlLoopConfigure(int(dev.Fd()), config)
		if errors.Is(err, unix.EBUSY) {
			dev.Close()
			continue
		}
		if err == nil {
			err = unix.Mount(name, dir, "ext4", unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID, "noinit_itable,errors=continue")
		}
		dev.Close() // a mount keeps the device; without one autoclear frees it here
		if err != nil {
			return fmt.Errorf("mount %s: %w", image, err)
		}
		return nil
	}
	return fmt.Errorf("no free loop device after 64 tries")
}

// Unmount unmounts dir. One that is not mounted, or not there, is no error.
func Unmount(dir string) error {
	err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EBUSY) {
		err = unix.Unmount(dir, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Trim gives back to the image's file what its filesystem at dir has freed. Doing it at each removal instead
// (the mount option discard) costs a third of the time of replacing a large file.
func Trim(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	all := struct{ start, length, minlen uint64 }{length: ^uint64(0)} // struct fstrim_range
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fitrim, uintptr(unsafe.Pointer(&all))); errno != 0 {
		return fmt.Errorf("trim %s: %w", dir, errno)
	}
	return nil
}

// fitrim is _IOWR('X', 121, struct fstrim_range).
const fitrim = 0xc0185879

// Allocated says how many bytes a sparse file takes.
func Allocated(path string) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, err
	}
	return st.Blocks * 512, nil
}

// DiskUsage says how full the filesystem at dir is, in bytes.
func DiskUsage(dir string) (used, total int64, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, 0, err
	}
	return int64(fs.Blocks-fs.Bfree) * fs.Bsize, int64(fs.Blocks) * fs.Bsize, nil
}

// DiskFree says how many bytes anybody could still write at dir.
func DiskFree(dir string) (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, err
	}
	return int64(fs.Bavail) * fs.Bsize, nil
}
