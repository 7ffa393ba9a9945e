package template

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// The user that each template has.
const (
	userName = "user"
	userID   = 1000
	userHome = "/home/user"
)

// standardDirs exist in each image, whatever it was made from: a sandbox mounts on them.
var standardDirs = []struct {
	path  string
	mode  fs.FileMode
	owner owner
}{
	{"/.sandlot", 0o755, ownerRoot},
	{"/dev", 0o755, ownerRoot},
	{"/etc", 0o755, ownerRoot},
	{"/etc/sudoers.d", 0o750, ownerRoot},
	{"/home", 0o755, ownerRoot},
	{userHome, 0o755, ownerUser},
	{"/proc", 0o555, ownerRoot},
	{"/root", 0o700, ownerRoot},
	{"/run", 0o755, ownerRoot},
	{"/sys", 0o555, ownerRoot},
	{"/tmp", fs.ModeSticky | 0o777, ownerRoot},
	{"/var/tmp", fs.ModeSticky | 0o777, ownerRoot},
	{"/workspace", 0o755, ownerUser},
}

// prepare runs in the child, with the image as root directory: it makes the standard folders and the user.
func prepare() error {
	if err := makeStandardDirs(); err != nil {
		return err
	}
	shell, err := ensureBash()
	if err != nil {
		return err
	}
	for _, account := range []struct {
		file, root, user string
		mode             fs.FileMode
		create           bool
	}{
		{"/etc/passwd", "root:x:0:0:root:/root:" + shell, fmt.Sprintf("%s:x:%d:%d::%s:%s", userName, userID, userID, userHome, shell), 0o644, true},
		{"/etc/group", "root:x:0:", fmt.Sprintf("%s:x:%d:", userName, userID), 0o644, true},
		{"/etc/shadow", "root:*:19000:0:99999:7:::", userName + ":*:19000:0:99999:7:::", 0o640, true},
		{"/etc/gshadow", "root:*::", userName + ":!::", 0o640, false},
	} {
		old, err := readAccounts(account.file)
		if errors.Is(err, fs.ErrNotExist) {
			if !account.create {
				continue
			}
			old = []byte(account.root + "\n")
		} else if err != nil {
			return err
		}
		write := os.WriteFile // keeps the file's owner and mode
		if info, err := os.Lstat(account.file); err != nil || !info.Mode().IsRegular() {
			write = writeNewBytes
		}
		if err := write(account.file, []byte(addAccount(string(old), account.user)), account.mode); err != nil {
			return err
		}
	}
	if err := copySkeleton(); err != nil {
		return err
	}
	return writeNew("/etc/sudoers.d/sandlot", userName+" ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
}

const (
	maxAccountBytes = 4 << 20
	badAccounts     = "the image's "
)

// readAccounts reads an account file, which is a stranger's when the image is.
func readAccounts(name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxAccountBytes {
		return nil, fmt.Errorf(badAccounts+"%s is not a file of at most %d bytes", name, maxAccountBytes)
	}
	return os.ReadFile(name)
}

// bashOfSh stands in for bash in an image that has none: commands, cells and terminals name bash.
const bashOfSh = "#!/bin/sh\nexec /bin/sh \"$@\"\n"

// ensureBash returns the shell of accounts and makes the image's sh answer to the name bash where there is no
// other. An image without any shell stays so: in it, only argument lists can be run.
func ensureBash() (string, error) {
	for _, p := range []string{"/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"} {
		if isProgram(p) {
			return p, nil
		}
	}
	if !isProgram("/bin/sh") {
		return "/bin/bash", nil
	}
	return "/bin/sh", writeNew("/bin/bash", bashOfSh, 0o755)
}

func isProgram(p string) bool {
	info, err := os.Stat(p)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// addAccount appends line to an account file, in place of any account with its name or number: an image may
// bring a user 1000 of its own.
func addAccount(file, line string) string {
	fields := strings.Split(line, ":")
	hasID := len(fields) > 2 && fields[2] == fmt.Sprint(userID)
	var b strings.Builder
	for old := range strings.Lines(file) {
		f := strings.Split(strings.TrimSuffix(old, "\n"), ":")
		if f[0] == fields[0] || hasID && len(f) > 2 && f[2] == fields[2] {
			continue
		}
		b.WriteString(strings.TrimSuffix(old, "\n") + "\n")
	}
	return b.String() + line + "\n"
}

// copySkeleton puts the distribution's dot files into the user's home.
func copySkeleton() error {
	entries, err := os.ReadDir("/etc/skel")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		to := filepath.Join(userHome, e.Name())
		if _, err := os.Lstat(to); err == nil || !e.Type().IsRegular() {
			continue
		}
		data, err := os.ReadFile(filepath.Join("/etc/skel", e.Name()))
		if err == nil {
			err = writeNew(to, string(data), 0o644)
		}
		if err == nil {
			err = os.Lchown(to, userID, userID)
		}
		if err != nil {
			return err
		}
	}
	return err
}

// finish runs in the child as the last layer: it takes away what belongs to one build or one host, and
// writes the few files that each sandbox fills in for itself.
func finish() error {
	for _, dir := range []string{
		"/.sandlot", "/dev", "/proc", "/run", "/sys", "/tmp", "/var/tmp", "/workspace",
		"/var/cache/apt", "/var/lib/apt/lists",
	} {
		if err := empty(dir); err != nil {
			return err
		}
	}
	if err := makeStandardDirs(); err != nil {
		return err
	}
	for _, pattern := range []string{
		"/.dockerenv", "/etc/.pwd.lock", "/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-", "/etc/subuid-", "/etc/subgid-",
		"/etc/ssh/ssh_host_*", "/root/.bash_history", "/root/.npm", "/root/.cache/pip", "/var/cache/debconf/*-old",
		"/var/cache/ldconfig/aux-cache", "/var/lib/dbus/machine-id", "/var/lib/dpkg/*-old", "/var/lib/systemd/random-seed",
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, p := range found {
			if err := os.RemoveAll(p); err != nil {
				return err
			}
		}
	}
	if err := removeLogs(); err != nil {
		return err
	}
	for _, f := range []struct{ path, content string }{
		{"/etc/hostname", "sandbox\n"},
		{"/etc/hosts", "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"},
		{"/etc/machine-id", ""},
		{"/etc/resolv.conf", ""},
		{"/etc/default/locale", "LANG=C.UTF-8\n"},
	} {
		if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
			return err
		}
		if err := writeNew(f.path, f.content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// makeStandardDirs makes each standard folder a real one, with its mode and owner.
func makeStandardDirs() error {
	for _, d := range standardDirs {
		info, err := os.Lstat(d.path)
		if err == nil && !info.IsDir() {
			if err := os.Remove(d.path); err != nil {
				return err
			}
		}
		if err := os.MkdirAll(d.path, 0o755); err != nil {
			return err
		}
		if err := os.Lchown(d.path, int(d.owner), int(d.owner)); err != nil {
			return err
		}
		if err := os.Chmod(d.path, d.mode); err != nil {
			return err
		}
	}
	return nil
}

// empty removes what is in dir, when it is a folder.
func empty(dir string) error {
	if info, err := os.Lstat(dir); err != nil || !info.IsDir() {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// removeLogs removes the files, not the folders, below /var/log.
func removeLogs() error {
	return filepath.WalkDir("/var/log", func(p string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() {
			return err
		}
		return os.Remove(p)
	})
}

// writeNew makes p a regular file of its own with this content, whatever was there.
func writeNew(p, content string, mode fs.FileMode) error {
	return writeNewBytes(p, []byte(content), mode)
}

func writeNewBytes(p string, content []byte, mode fs.FileMode) error {
	if err := removeOld(p); err != nil {
		return err
	}
	if err := os.WriteFile(p, content, mode); err != nil {
		return err
	}
	return os.Chmod(p, mode)
}
