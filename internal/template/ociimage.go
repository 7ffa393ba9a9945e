package template

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"

	"sandlot"
)

// What an image may be made of. Its files have the limits of a tree.
const (
	maxOCIManifest = 4 << 20
	maxOCIConfig   = 4 << 20
	maxOCILayers   = 128
	maxOCIIndex    = 1000          // entries of an index
	maxOCIDepth    = 3             // indexes in indexes
	maxLayerStream = 2 << 33       // a layer's tar, unpacked: files, headers and padding
	maxZstdWindow  = 128 << 20     // memory for one layer
	layerMark      = ".wh..wh.end" // what a tree says after each layer; no layer can have it
)

// imageStore is a place with images. What it gives is unverified.
type imageStore interface {
	// digest is that of the one image here.
	digest(ctx context.Context) (string, error)
	// manifest returns at most maxOCIManifest bytes.
	manifest(ctx context.Context, digest string) ([]byte, error)
	blob(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error)
	close()
}

// ociImage is an image whose manifest and configuration are verified.
type ociImage struct {
	config v1.ConfigFile
	layers []ociLayer
}

type ociLayer struct {
	desc   v1.Descriptor
	diffID string // digest of the tar, unpacked
	packed bool   // desc's digest and size are those of the blob
}

func badImage(format string, args ...any) error {
	return sandlot.Errorf(sandlot.CodeInvalidRequest, format, args...)
}

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// loadImage finds the platform's image below digest and reads its configuration.
func loadImage(ctx context.Context, st imageStore, digest, platform string) (*ociImage, error) {
	if a, ok := st.(*archiveStore); ok && a.saved != nil {
		return a.savedImage(digest, platform)
	}
	for range maxOCIDepth {
		data, err := st.manifest(ctx, digest)
		if err != nil {
			return nil, err
		}
		if got := digestOf(data); got != digest {
			return nil, badImage("the manifest's digest is %s, want %s", got, digest)
		}
		var probe struct {
			Manifests []v1.Descriptor `json:"manifests"`
			Layers    []v1.Descriptor `json:"layers"`
			Config    *v1.Descriptor  `json:"config"`
		}
		if err := json.Unmarshal(data, &probe); err != nil {
			return nil, badImage("the manifest is not valid: %v", err)
		}
		switch {
		case probe.Config != nil:
			return newImage(ctx, st, *probe.Config, probe.Layers, platform)
		case probe.Manifests == nil:
			return nil, badImage("the manifest is neither an image's nor an index (schema 1 is not supported: push the image anew)")
		}
		if digest, err = pickPlatform(probe.Manifests, platform); err != nil {
			return nil, err
		}
	}
	return nil, badImage("indexes are nested more than %d deep", maxOCIDepth)
}

// pickPlatform returns the digest of an index's entry for a platform. An entry that says none fits when it is
// the only one.
func pickPlatform(list []v1.Descriptor, platform string) (string, error) {
	if len(list) > maxOCIIndex {
		return "", badImage("the index has more than %d entries", maxOCIIndex)
	}
	want := platformOf(platform)
	var have []string
	for _, d := range list {
		if d.Platform == nil {
			if len(list) == 1 {
				return d.Digest.String(), nil
			}
			continue
		}
		if d.Platform.Satisfies(want) {
			return d.Digest.String(), nil
		}
		if s := d.Platform.String(); !strings.HasPrefix(s, "unknown/") {
			have = append(have, fmt.Sprintf("%.40s", s))
		}
	}
	return "", badImage("the image is not made for %s; it is for: %s", platform, strings.Join(have[:min(len(have), 20)], ", "))
}

func newImage(ctx context.Context, st imageStore, config v1.Descriptor, layers []v1.Descriptor, platform string) (*ociImage, error) {
	if config.Size < 0 || config.Size > maxOCIConfig {
		return nil, badImage("the image's configuration has over %d bytes", maxOCIConfig)
	}
	r, err := st.blob(ctx, config)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, maxOCIConfig+1))
	if err != nil {
		return nil, fmt.Errorf("the image's configuration: %w", err)
	}
	if got := digestOf(data); got != config.Digest.String() {
		return nil, badImage("the configuration's digest is %s, want %s", got, config.Digest)
	}
	img, err := parseConfig(data, platform)
	if err != nil {
		return nil, err
	}
	if len(layers) != len(img.layers) {
		return nil, badImage("the image has %d layers and its configuration %d", len(layers), len(img.layers))
	}
	for i, d := range layers {
		img.layers[i].desc, img.layers[i].packed = d, true
	}
	return img, nil
}

// parseConfig gives an image whose layers have no more than their diff ID.
func parseConfig(data []byte, platform string) (*ociImage, error) {
	img := &ociImage{}
	if err := json.Unmarshal(data, &img.config); err != nil {
		return nil, badImage("the image's configuration is not valid: %v", err)
	}
	c := &img.config
	if c.RootFS.Type != "" && c.RootFS.Type != "layers" || c.OS == "" && len(c.RootFS.DiffIDs) == 0 {
		return nil, badImage("this is not the image of a root file system (an artifact of another kind?)")
	}
	want := platformOf(platform)
	if c.OS != "" && c.OS != want.OS || c.Architecture != "" && c.Architecture != want.Architecture {
		return nil, badImage("the image is made for %.40s/%.40s, not for %s", c.OS, c.Architecture, platform)
	}
	if len(c.RootFS.DiffIDs) > maxOCILayers {
		return nil, badImage("the image has more than %d layers", maxOCILayers)
	}
	for _, d := range c.RootFS.DiffIDs {
		if !digestForm.MatchString(d.String()) {
			return nil, badImage("a layer's digest is not sha256")
		}
		img.layers = append(img.layers, ociLayer{diffID: d.String()})
	}
	return img, nil
}

// leftOut counts what an image has and a template does not take.
type leftOut struct{ devices, xattrs int }

// copyTo sends one layer's entries and the mark of its end, and checks its digests.
func (l *ociLayer) copyTo(ctx context.Context, t *tree, st imageStore, left *leftOut) error {
	if l.packed && (l.desc.Size < 0 || l.desc.Size > maxTreeBytes) {
		return badImage("it has over %d bytes", int64(maxTreeBytes))
	}
	blob, err := st.blob(ctx, l.desc)
	if err != nil {
		return err
	}
	defer blob.Close()
	limit := int64(maxLayerStream)
	if l.packed {
		limit = l.desc.Size
	}
	packed := newSum(&cappedReader{r: blob, left: limit, what: "its blob"})
	unpacked, err := decompress(packed)
	if err != nil {
		return err
	}
	defer unpacked.Close()
	sum := newSum(&cappedReader{r: unpacked, left: maxLayerStream, what: "its archive"})
	if err := addLayer(t, tar.NewReader(sum), left); err != nil {
		return err
	}
	// Archives are padded at will; digests are of all of it.
	if _, err := io.Copy(io.Discard, sum); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, packed); err != nil {
		return err
	}
	if got := "sha256:" + packed.hex(); l.packed && got != l.desc.Digest.String() {
		return badImage("its digest is %s, want %s", got, l.desc.Digest)
	}
	if got := "sha256:" + sum.hex(); got != l.diffID {
		return badImage("its archive's digest is %s, want %s", got, l.diffID)
	}
	return t.header(&tar.Header{Typeflag: tar.TypeReg}, layerMark)
}

// cappedReader gives an error, not an end, at its limit.
type cappedReader struct {
	r    io.Reader
	left int64
	what string
}

func (c *cappedReader) Read(p []byte) (int, error) {
	if int64(len(p)) > c.left+1 {
		p = p[:c.left+1]
	}
	n, err := c.r.Read(p)
	if c.left -= int64(n); c.left < 0 {
		return 0, badImage("%s is longer than it says, or than is allowed", c.what)
	}
	return n, err
}

// decompress recognizes gzip, zstd and no compression by their first bytes, as media types are often wrong.
func decompress(r io.Reader) (io.ReadCloser, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	head, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return gzip.NewReader(br)
	case bytes.Equal(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		d, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxZstdWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	}
	return io.NopCloser(br), nil
}

const whiteout = ".wh."

// addLayer rewrites a layer's archive. Leading slashes mean the image's root; paths with ".." are refused;
// devices, pipes and extended attributes are left out; owners and set-uid bits stay, as they count inside the
// sandbox only. Whiteouts go on as they are, to be carried out where the other layers are (layers.go).
func addLayer(t *tree, tr *tar.Reader, left *leftOut) error {
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := addLayerEntry(t, h, tr, left); err != nil {
			return err
		}
	}
}

func addLayerEntry(t *tree, h *tar.Header, r io.Reader, left *leftOut) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := layerPath(h.Name)
	if err != nil {
		return err
	}
	if h.Uid < 0 || h.Gid < 0 || h.Uid > 1<<31-2 || h.Gid > 1<<31-2 {
		return badImage("%q: owner %d:%d is not one", name, h.Uid, h.Gid)
	}
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "SCHILY.xattr.") {
			left.xattrs++
		}
	}
	out := &tar.Header{Typeflag: h.Typeflag, Mode: h.Mode & 0o7777, Uid: h.Uid, Gid: h.Gid}
	if base := path.Base(name); strings.HasPrefix(base, whiteout) {
		return addWhiteout(t, name, strings.TrimPrefix(base, whiteout))
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return t.header(out, name)
	case tar.TypeReg, tar.TypeGNUSparse:
		if name == "." {
			return badImage("the root is not a folder")
		}
		return t.owned(name, out, h.Size, r)
	case tar.TypeSymlink:
		return t.linkOf(name, h.Linkname, h.Uid, h.Gid)
	case tar.TypeLink:
		if out.Linkname, err = layerPath(h.Linkname); err != nil {
			return err
		}
		return t.header(out, name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		left.devices++
		return nil
	}
	return badImage("%q: an entry of type %q", name, h.Typeflag)
}

// layerPath is imagePath for a layer's archive, where some programs write absolute names.
func layerPath(p string) (string, error) {
	p = strings.TrimLeft(p, "/")
	if p == "" {
		p = "."
	}
	name, err := imagePath(p)
	if err != nil {
		return "", badImage("%v", err)
	}
	return name, nil
}

// addWhiteout passes on that target, or all in the folder ("the opaque one"), is gone.
func addWhiteout(t *tree, name, target string) error {
	if strings.HasPrefix(target, whiteout) && target != whiteout+".opq" {
		return nil // notes of a storage driver
	}
	if target == "" || target == "." || target == ".." {
		return badImage("%q hides nothing that a folder can have", name)
	}
	return t.header(&tar.Header{Typeflag: tar.TypeReg}, name)
}
