package agent

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"sandlot"
)

const maxAccountsFile = 1 << 20 // bytes of /etc/passwd and /etc/group that are read

// user is an account of the sandbox.
type user struct {
	name   string
	uid    uint32
	gid    uint32
	groups []uint32
	home   string
	shell  string
}

func (u *user) credential() *syscall.Credential {
	return &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}
}

// users reads /etc/passwd and /etc/group again only when they changed.
type users struct {
	passwd, group string

	mu         sync.Mutex
	passwdSeen stamp
	groupSeen  stamp
	byName     map[string]*user
	userNames  map[uint32]string
	groupNames map[uint32]string
}

type stamp struct {
	mtime time.Time
	size  int64
	ino   uint64
}

func newUsers(etc string) *users {
	return &users{passwd: filepath.Join(etc, "passwd"), group: filepath.Join(etc, "group")}
}

// lookup finds an account by name. Numbers and "uid:gid" are not names.
func (us *users) lookup(name string) (*user, error) {
	if !validUserName(name) {
		return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "user must be a name of the sandbox's /etc/passwd, not a number or a pair")
	}
	us.mu.Lock()
	defer us.mu.Unlock()
	us.refresh()
	if u, ok := us.byName[name]; ok {
		return u, nil
	}
	return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "the sandbox has no user %q", name)
}

// names returns what owns a file: names where there are any, else numbers.
func (us *users) names(uid, gid uint32) (string, string) {
	us.mu.Lock()
	defer us.mu.Unlock()
	if us.byName == nil {
		us.refresh()
	}
	return nameOr(us.userNames, uid), nameOr(us.groupNames, gid)
}

func nameOr(names map[uint32]string, id uint32) string {
	if n, ok := names[id]; ok {
		return n
	}
	return strconv.FormatUint(uint64(id), 10)
}

func validUserName(name string) bool {
	if name == "" || len(name) > 32 {
		return false
	}
	digits := true
	for i := range len(name) {
		c := name[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
		digit := c >= '0' && c <= '9'
		if !letter && !(i > 0 && (digit || c == '-' || c == '.' || c == '$')) && !(i == 0 && digit) {
			return false
		}
		digits = digits && digit
	}
	return !digits
}

// refresh rereads what changed. The caller holds mu.
func (us *users) refresh() {
	p, g := stampOf(us.passwd), stampOf(us.group)
	if us.byName != nil && p == us.passwdSeen && g == us.groupSeen {
		return
	}
	us.passwdSeen, us.groupSeen = p, g
	us.byName = make(map[string]*user)
	us.userNames = make(map[uint32]string)
	us.groupNames = make(map[uint32]string)
	eachLine(us.passwd, 7, func(f []string) {
		uid, err1 := strconv.ParseUint(f[2], 10, 32)
		gid, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil || us.byName[f[0]] != nil {
			return
		}
		u := &user{name: f[0], uid: uint32(uid), gid: uint32(gid), home: f[5], shell: f[6]}
		if u.shell == "" {
			u.shell = "/bin/sh"
		}
		u.groups = []uint32{u.gid}
		us.byName[u.name] = u
		if _, ok := us.userNames[u.uid]; !ok {
			us.userNames[u.uid] = u.name
		}
	})
	eachLine(us.group, 4, func(f []string) {
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil {
			return
		}
		if _, ok := us.groupNames[uint32(gid)]; !ok {
			us.groupNames[uint32(gid)] = f[0]
		}
		for _, m := range strings.Split(f[3], ",") {
			if u := us.byName[m]; u != nil && uint32(gid) != u.gid && len(u.groups) < 64 {
				u.groups = append(u.groups, uint32(gid))
			}
		}
	})
}

func stampOf(path string) stamp {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return stamp{}
	}
	return stamp{time.Unix(st.Mtim.Unix()), st.Size, st.Ino}
}

// eachLine calls f with the fields of each line that has n of them.
func eachLine(path string, n int, f func(fields []string)) {
	b, err := readSmall(path, maxAccountsFile)
	if err != nil {
		return
	}
	s := bufio.NewScanner(bytes.NewReader(b))
	s.Buffer(make([]byte, 0, 4096), maxAccountsFile)
	for s.Scan() {
		if fields := strings.Split(s.Text(), ":"); len(fields) == n && fields[0] != "" {
			f(fields)
		}
	}
}

// readSmall reads the first limit bytes of a regular file: what the guest put in its place cannot block it.
func readSmall(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "read", Path: path, Err: errors.New("not a regular file")}
	}
	return io.ReadAll(io.LimitReader(f, limit))
}

// account resolves the user of a request.
func (a *Agent) account(name string) (*user, error) {
	if name == "" {
		name = defaultUser
	}
	u, err := a.users.lookup(name)
	if err == nil || a.switchUser || name != defaultUser && name != "root" {
		return u, err
	}
	// Users are not switched here: the two names that every sandbox has always work.
	home := "/home/user"
	if name == "root" {
		home = "/root"
	}
	return &user{name: name, uid: uint32(os.Getuid()), gid: uint32(os.Getgid()), home: home, shell: "/bin/bash"}, nil
}
