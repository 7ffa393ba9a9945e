package template

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"syscall"
)

// builderVersion is part of every key: raise it when the same definition must give another image.
const builderVersion = "1"

const maxInputs = 20_000

// input is one file of the definition folder that a step uses.
type input struct {
	Path string      `json:"path"`
	Mode fs.FileMode `json:"mode"`
	Size int64       `json:"size,omitempty"`
	Sum  string      `json:"sum,omitempty"`  // sha256 of a regular file
	Link string      `json:"link,omitempty"` // target of a symbolic link
}

// layerKey is the cache key of one layer.
func layerKey(parent, kind string, step any, inputs []input) (string, error) {
	return hashJSON(struct {
		Builder, Arch, Parent, Kind string
		Step                        any
		Inputs                      []input
	}{builderVersion, runtime.GOARCH, parent, kind, step, inputs})
}

func hashJSON(v any) (string, error) {
	data, err := json.Marshal(v) // sorts map keys
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:]), nil
}

// openInput opens a regular file below root.
func openInput(root *os.Root, name string) (*os.File, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", name)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// inputsOf lists name, which is a file or a folder below root, with the hash of each file.
func inputsOf(root *os.Root, name string) ([]input, error) {
	var found []input
	var walk func(name string) error
	walk = func(name string) error {
		if len(found) >= maxInputs {
			return fmt.Errorf("more than %d files", maxInputs)
		}
		info, err := root.Lstat(name)
		if err != nil {
			return err
		}
		in := input{Path: name, Mode: info.Mode() & (fs.ModeType | 0o777)}
		switch info.Mode().Type() {
		case 0:
			if in.Sum, in.Size, err = hashInput(root, name); err != nil {
				return err
			}
		case fs.ModeSymlink:
			if in.Link, err = root.Readlink(name); err != nil {
				return err
			}
		case fs.ModeDir:
		default:
			return fmt.Errorf("%s is neither file, folder nor link", name)
		}
		found = append(found, in)
		if !info.IsDir() {
			return nil
		}
		entries, err := fs.ReadDir(root.FS(), name) // sorted
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := walk(path.Join(name, e.Name())); err != nil {
				return err
			}
		}
		return nil
	}
	return found, walk(name)
}

func hashInput(root *os.Root, name string) (sum string, size int64, err error) {
	f, err := openInput(root, name)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	size, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), size, err
}
