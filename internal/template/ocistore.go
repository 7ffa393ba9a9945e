package template

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// An OCI layout, as a folder or in a tar, and the tar of `docker save`. Both are a stranger's files: opened
// below an os.Root, regular ones only, and read with a limit.

// layoutStore is an OCI layout whose files open opens.
type layoutStore struct {
	open func(name string) (io.ReadCloser, error)
	root io.Closer
}

func openLayout(def *os.Root, dir string) (imageStore, error) {
	root, err := def.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return &layoutStore{
		open: func(name string) (io.ReadCloser, error) { return openInput(root, name) },
		root: root,
	}, nil
}

func (s *layoutStore) close() { s.root.Close() }

func (s *layoutStore) read(name string) ([]byte, error) {
	f, err := s.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxOCIManifest+1))
	if err == nil && len(data) > maxOCIManifest {
		err = badImage("%s has over %d bytes", name, maxOCIManifest)
	}
	return data, err
}

func (s *layoutStore) digest(context.Context) (string, error) {
	data, err := s.read("index.json")
	if errors.Is(err, fs.ErrNotExist) {
		return "", badImage("there is no index.json: this is not an OCI layout")
	}
	if err != nil {
		return "", err
	}
	var index v1.IndexManifest
	if err := json.Unmarshal(data, &index); err != nil {
		return "", badImage("index.json is not valid: %v", err)
	}
	if len(index.Manifests) == 1 {
		return index.Manifests[0].Digest.String(), nil
	}
	var have []string
	for _, d := range index.Manifests[:min(len(index.Manifests), 20)] {
		have = append(have, fmt.Sprintf("%s %.80s", d.Digest, d.Annotations["org.opencontainers.image.ref.name"]))
	}
	return "", badImage("the layout has %d images; say which by digest:\n%s", len(index.Manifests), strings.Join(have, "\n"))
}

func blobName(digest string) (string, error) {
	if !digestForm.MatchString(digest) {
		return "", badImage("%.100q is not sha256: and 64 hexadecimal digits", digest)
	}
	return "blobs/sha256/" + strings.TrimPrefix(digest, "sha256:"), nil
}

func (s *layoutStore) manifest(_ context.Context, digest string) ([]byte, error) {
	name, err := blobName(digest)
	if err != nil {
		return nil, err
	}
	data, err := s.read(name)
	if errors.Is(err, fs.ErrNotExist) {
		err = badImage("the layout has no image %s", digest)
	}
	return data, err
}

func (s *layoutStore) blob(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	name, err := blobName(d.Digest.String())
	if err != nil {
		return nil, err
	}
	r, err := s.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		err = badImage("the layout lacks blob %s", d.Digest)
	}
	return r, err
}

const maxArchiveEntries = 20_000

// archiveStore is a tar with an OCI layout or what `docker save` writes. Newer ones hold both: then it is the
// layout that counts.
type archiveStore struct {
	layoutStore
	file  *os.File
	parts map[string]archivePart
	saved []savedImage // of `docker save` alone
}

// archivePart is where a file of the archive is, or the file that it is a link to.
type archivePart struct {
	at, size int64
	link     string
}

// savedImage is an entry of docker save's manifest.json.
type savedImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func openArchive(def *os.Root, name string) (imageStore, error) {
	f, err := openInput(def, name)
	if err != nil {
		return nil, err
	}
	a := &archiveStore{file: f, parts: make(map[string]archivePart)}
	a.layoutStore = layoutStore{open: a.part, root: f}
	err = a.scan()
	if err == nil && !a.has("index.json") {
		err = a.readSaved()
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path.Base(name), err)
	}
	return a, nil
}

func (a *archiveStore) has(name string) bool { _, ok := a.parts[name]; return ok }

// scan notes where each file is.
func (a *archiveStore) scan() error {
	var magic [2]byte
	if _, err := io.ReadFull(a.file, magic[:]); err == nil && magic == [2]byte{0x1f, 0x8b} {
		return badImage("the archive is compressed: gunzip it first")
	}
	if _, err := a.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	tr := tar.NewReader(a.file)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return badImage("not a tar, or a broken one: %v", err)
		}
		if len(a.parts) >= maxArchiveEntries {
			return badImage("more than %d entries", maxArchiveEntries)
		}
		name := path.Clean(h.Name)
		at, err := a.file.Seek(0, io.SeekCurrent)
		if err != nil {
			return err
		}
		switch h.Typeflag {
		case tar.TypeReg:
			a.parts[name] = archivePart{at: at, size: h.Size}
		case tar.TypeSymlink: // older docker save writes a repeated layer once
			a.parts[name] = archivePart{link: path.Join(path.Dir(name), h.Linkname)}
		case tar.TypeLink:
			a.parts[name] = archivePart{link: path.Clean(h.Linkname)}
		}
	}
}

// part opens a file of the archive; only names that scan found exist.
func (a *archiveStore) part(name string) (io.ReadCloser, error) {
	p, ok := a.parts[path.Clean(name)]
	if ok && p.link != "" {
		p, ok = a.parts[p.link]
	}
	if !ok || p.link != "" {
		return nil, fmt.Errorf("%.200q: %w", name, fs.ErrNotExist)
	}
	return io.NopCloser(io.NewSectionReader(a.file, p.at, p.size)), nil
}

func (a *archiveStore) readSaved() error {
	data, err := a.read("manifest.json")
	if errors.Is(err, fs.ErrNotExist) {
		return badImage("neither index.json nor manifest.json: not an OCI layout and not from `docker save`")
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &a.saved); err != nil {
		return badImage("manifest.json is not valid: %v", err)
	}
	if len(a.saved) == 0 || len(a.saved) > maxOCIIndex {
		return badImage("manifest.json lists %d images, not 1 to %d", len(a.saved), maxOCIIndex)
	}
	return nil
}

// digest of a saved image is its ID: that of its configuration.
func (a *archiveStore) digest(ctx context.Context) (string, error) {
	if a.saved == nil {
		return a.layoutStore.digest(ctx)
	}
	var have []string
	for _, s := range a.saved {
		config, err := a.read(s.Config)
		if err != nil {
			return "", badImage("the archive lacks a configuration: %v", err)
		}
		if len(a.saved) == 1 {
			return digestOf(config), nil
		}
		if len(have) < 20 {
			have = append(have, fmt.Sprintf("%s %.80s", digestOf(config), strings.Join(s.RepoTags, " ")))
		}
	}
	return "", badImage("the archive has %d images; say which by digest:\n%s", len(a.saved), strings.Join(have, "\n"))
}

// savedImage returns the image with this ID. Its layers are known by their diff IDs alone.
func (a *archiveStore) savedImage(id, platform string) (*ociImage, error) {
	for _, s := range a.saved {
		config, err := a.read(s.Config)
		if err != nil {
			return nil, badImage("the archive lacks a configuration: %v", err)
		}
		if digestOf(config) != id {
			continue
		}
		img, err := parseConfig(config, platform)
		if err != nil {
			return nil, err
		}
		if len(s.Layers) != len(img.layers) {
			return nil, badImage("the archive has %d layers and its configuration %d", len(s.Layers), len(img.layers))
		}
		for i, name := range s.Layers {
			img.layers[i].desc.Annotations = map[string]string{savedName: name}
		}
		return img, nil
	}
	return nil, badImage("the archive has no image %s", id)
}

// savedName tells blob the file of a saved layer, which has no digest of its own.
const savedName = "name"

func (a *archiveStore) blob(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	if a.saved == nil {
		return a.layoutStore.blob(ctx, d)
	}
	r, err := a.part(d.Annotations[savedName])
	if err != nil {
		return nil, badImage("the archive lacks a layer: %v", err)
	}
	return r, nil
}
