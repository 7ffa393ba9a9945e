package template

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	scratch "github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"sandlot"
)

// entry is one of a layer's; content makes it a regular file.
type entry struct {
	tar.Header
	content string
}

func file(name, content string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content}
}

func folder(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}

func symlink(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}, ""}
}

func hardlink(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}, ""}
}

func layerTar(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size = int64(len(e.content))
		if err := tw.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(tw, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// imageOf makes an image of layers, with this host's platform.
func imageOf(t testing.TB, config v1.Config, layers ...[]byte) v1.Image {
	t.Helper()
	img := v1.Image(scratch.Image)
	for _, data := range layers {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
		if err == nil {
			img, err = mutate.AppendLayers(img, l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	p := platformOf((&ociSource{Reference: "x"}).withPlatform())
	file.OS, file.Architecture, file.Config = p.OS, p.Architecture, config
	if img, err = mutate.ConfigFile(img, file); err != nil {
		t.Fatal(err)
	}
	return img
}

func (s *ociSource) withPlatform() string {
	if err := s.checkPlace(); err != nil {
		panic(err)
	}
	return s.Platform
}

func writeLayout(t testing.TB, images ...v1.Image) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layout")
	p, err := layout.Write(dir, scratch.Index)
	for _, img := range images {
		if err == nil {
			err = p.AppendImage(img)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func imported(t *testing.T, b *builder, spec ImportSpec) (sandlot.Template, error) {
	t.Helper()
	return importedWith(t, b, spec, false)
}

// importedWith takes nothing from the cache when fresh.
func importedWith(t *testing.T, b *builder, spec ImportSpec, fresh bool) (sandlot.Template, error) {
	t.Helper()
	if spec.Name == "" {
		spec.Name = "img"
	}
	return Import(t.Context(), spec, Options{CacheDir: b.cache, Store: b.store, Log: &b.log, Fresh: fresh})
}

// unpackImage unpacks an image and lists it: folders end in "/", links have "→ target", files "= content".
func unpackImage(t *testing.T, image string) map[string]string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "root")
	if out, err := exec.Command("fsck.erofs", "--extract="+dir, image).CombinedOutput(); err != nil {
		t.Fatalf("fsck.erofs: %v\n%s", err, out)
	}
	found := make(map[string]string)
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		switch {
		case d.IsDir():
			found[rel] = "/"
		case d.Type() == os.ModeSymlink:
			to, err := os.Readlink(p)
			found[rel] = "→ " + to
			return err
		case d.Type().IsRegular():
			data, err := os.ReadFile(p)
			found[rel] = "= " + string(data)
			return err
		default:
			found[rel] = d.Type().String()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func expectTree(t *testing.T, image string, want map[string]string) {
	t.Helper()
	got := unpackImage(t, image)
	for p, w := range want {
		if got[p] != w {
			t.Errorf("%s is %.200q, want %q", p, got[p], w)
		}
	}
}

// One image, each way it can come: the same layers are found, the same image results.
func TestImportFromEachPlace(t *testing.T) {
	b := newBuilder(t)
	config := v1.Config{
		Env:        []string{"GREETING=hello", "PATH=/opt/bin:/usr/bin", "HOME=/nowhere", "bad name=1", "LANG=tlh"},
		Entrypoint: []string{"/opt/bin/serve"}, Cmd: []string{"--port", "80"}, WorkingDir: "/srv", User: "app",
	}
	img := imageOf(t, config,
		layerTar(t, folder("opt"), file("opt/a", "first"), file("./opt/bin/serve", "x"), file("etc/passwd", "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n")),
		layerTar(t, file("opt/a", "second")))
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	id, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}

	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	reference := strings.TrimPrefix(server.URL, "http://") + "/team/app:v1"
	ref, err := name.ParseReference(reference)
	if err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	saved := filepath.Join(t.TempDir(), "saved.tar")
	if err := tarball.WriteToFile(saved, ref, img); err != nil {
		t.Fatal(err)
	}
	dir := writeLayout(t, img)
	inTar := filepath.Join(t.TempDir(), "layout.tar")
	if out, err := exec.Command("tar", "-C", dir, "-cf", inTar, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	images := make(map[string]bool)
	for _, tt := range []struct {
		place, pinned string
		spec          ImportSpec
	}{
		{"registry by tag", digest.String(), ImportSpec{Reference: reference}},
		{"registry by digest", digest.String(), ImportSpec{Reference: ref.Context().Name() + "@" + digest.String()}},
		{"layout", digest.String(), ImportSpec{Layout: dir}},
		{"layout in a tar", digest.String(), ImportSpec{Archive: inTar}},
		{"docker save", id.String(), ImportSpec{Archive: saved}},
	} {
		t.Run(tt.place, func(t *testing.T) {
			tt.spec.ImageStart = true
			tt.spec.Env = map[string]string{"GREETING": "mine"}
			got, err := importedWith(t, b, tt.spec, true)
			if err != nil {
				t.Fatalf("%v\n%s", err, &b.log)
			}
			images[got.Digest] = true
			if len(got.Contents) != 1 || !strings.HasSuffix(got.Contents[0], "@"+tt.pinned) {
				t.Errorf("contents %q do not name %s", got.Contents, tt.pinned)
			}
			if e := got.Env; len(e) != 3 || e["GREETING"] != "mine" || e["PATH"] != "/opt/bin:/usr/bin" || e["LANG"] != "C.UTF-8" {
				t.Errorf("env %v", e)
			}
			if s := strings.Join(got.Start, " "); s != `/bin/sh -c cd -- "$0" && exec "$@" /srv /opt/bin/serve --port 80` {
				t.Errorf("start %q", got.Start)
			}
			if got.Size != sandlot.DefaultSize {
				t.Errorf("size %+v", got.Size)
			}
			expectTree(t, got.Image, map[string]string{
				"opt/a": "= second", "workspace": "/", "home/user": "/",
				"etc/passwd": "= root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/bash\n",
			})
		})
	}
	if len(images) != 1 {
		t.Errorf("%d images, want the same from everywhere", len(images))
	}
	if !strings.Contains(b.log.String(), `user "app" is not used`) {
		t.Errorf("the log does not say that the image's user is not used:\n%s", &b.log)
	}

	// Without ImageStart nothing starts, and the layers come from the cache: the registry is not asked.
	server.Close()
	got, err := imported(t, b, ImportSpec{Reference: ref.Context().Name() + "@" + digest.String()})
	if err != nil || got.Start != nil || got.Env["GREETING"] != "hello" {
		t.Errorf("from the cache: %v, %+v", err, got)
	}
}

func TestImportAppliesLayers(t *testing.T) {
	b := newBuilder(t)
	img := imageOf(t, v1.Config{},
		layerTar(t,
			folder("usr/lib"), symlink("lib", "usr/lib"), symlink("abs", "/usr/lib"),
			file("gone", "1"), file("keep", "1"), folder("dir"), file("dir/old", "1"), file("dir/sub/old", "1"),
			file("was-file", "1"), folder("was-dir"), file("was-dir/x", "1"),
			file("again/old", "1"), file("dup", "first"), file("dup", "last"), file("origin", "shared"), symlink("dirlink", "dir"),
		),
		layerTar(t,
			file("lib/through", "1"), file("abs/absolute", "1"), file("/rooted", "1"),
			file(".wh.gone", ""), file(".wh.never-there", ""), file("nodir/.wh.x", ""), file(".wh..wh.plnk", ""),
			// Entries come before the whiteouts that must not touch them.
			file("dir/new", "2"), file("dir/sub/new", "2"), file("dir/.wh..wh..opq", ""),
			file("again/new", "2"), file(".wh.again", ""),
			folder("was-file"), file("was-file/y", "2"), file("was-dir", "2"),
			hardlink("linked", "origin"), hardlink("linked-abs", "/origin"), hardlink("origin", "origin"),
			folder("dirlink"), file("dirlink/z", "2"),
			entry{tar.Header{Name: "dev/sda", Typeflag: tar.TypeBlock, Devmajor: 8}, ""},
			entry{tar.Header{Name: "pipe", Typeflag: tar.TypeFifo}, ""},
			entry{tar.Header{Name: "strange", Typeflag: tar.TypeReg, Uid: 4242, Gid: 1 << 30, Mode: 0o4755, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "x", "SCHILY.xattr.trusted.overlay.opaque": "y"}}, "s"},
		))
	got, err := imported(t, b, ImportSpec{Layout: writeLayout(t, img)})
	if err != nil {
		t.Fatalf("%v\n%s", err, &b.log)
	}
	expectTree(t, got.Image, map[string]string{
		"lib": "→ usr/lib", "usr/lib/through": "= 1", "usr/lib/absolute": "= 1", "rooted": "= 1",
		"gone": "", "keep": "= 1", "nodir/.wh.x": "", ".wh..wh.plnk": "", ".wh.gone": "",
		"dir/old": "", "dir/new": "= 2", "dir/sub/old": "", "dir/sub/new": "= 2", "dir/.wh..wh..opq": "",
		"again/old": "", "again/new": "= 2", "was-file": "/", "was-file/y": "= 2", "was-dir": "= 2", "was-dir/x": "",
		"dup": "= last", "linked": "= shared", "linked-abs": "= shared", "origin": "= shared",
		"dirlink": "/", "dirlink/z": "= 2", "dir/z": "", "dev/sda": "", "pipe": "",
	})
	if out := dump(t, got.Image, "--path=/strange"); !strings.Contains(out, "Uid: 4242") || !strings.Contains(out, "Xattr size: 0") && strings.Contains(out, "Xattr size:") {
		t.Errorf("owner or attributes:\n%s", out)
	}
	if out := dump(t, got.Image, "--path=/linked"); !strings.Contains(out, "Links: 3") {
		t.Errorf("hard links became copies:\n%s", out)
	}
}

// An image's own accounts, shells and links do not keep a template's account and folders away.
func TestImportMakesTheAccount(t *testing.T) {
	b := newBuilder(t)
	sh := entry{tar.Header{Name: "bin/sh", Typeflag: tar.TypeReg, Mode: 0o755}, "#!"}
	img := imageOf(t, v1.Config{}, layerTar(t, sh,
		file("opt/elsewhere", "root:x:0:0::/root:/bin/sh\nuser:x:7:7::/:/bin/false"), symlink("etc/passwd", "/opt/elsewhere"),
		file("etc/group", "root:x:0:\nnode:x:1000:\n"), symlink("home", "/opt"), symlink("workspace", "/etc"), symlink("tmp", "../../.."),
		symlink("etc/skel", "/"), symlink("etc/sudoers.d", "/opt")))
	got, err := imported(t, b, ImportSpec{Layout: writeLayout(t, img)})
	if err != nil {
		t.Fatalf("%v\n%s", err, &b.log)
	}
	expectTree(t, got.Image, map[string]string{
		"etc/passwd": "= root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", "opt/elsewhere": "= root:x:0:0::/root:/bin/sh\nuser:x:7:7::/:/bin/false",
		"etc/group": "= root:x:0:\nuser:x:1000:\n", "home": "/", "home/user": "/", "workspace": "/", "tmp": "/",
		"bin/bash": "= " + bashOfSh, "etc/sudoers.d": "/", "opt/sandlot": "",
	})

	for name, e := range map[string][]entry{
		"a folder": {folder("etc/passwd"), file("etc/passwd/x", "")},
		"huge":     {file("etc/passwd", strings.Repeat("x", maxAccountBytes+1))},
	} {
		_, err := imported(t, b, ImportSpec{Name: "bad", Layout: writeLayout(t, imageOf(t, v1.Config{}, layerTar(t, e...)))})
		if err == nil || !strings.Contains(err.Error(), "the image's /etc/passwd") || sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("%s as /etc/passwd: %v", name, err)
		}
	}
}

// rawImage is a layout whose one layer is blob, whatever it holds, announced as told.
func rawImage(t *testing.T, blob []byte, media types.MediaType, change func(manifest map[string]any, config map[string]any)) string {
	t.Helper()
	img, err := mutate.AppendLayers(scratch.Image, static.NewLayer(blob, media))
	if err != nil {
		t.Fatal(err)
	}
	dir := writeLayout(t, img)
	readJSON := func(p string) map[string]any {
		data, err := os.ReadFile(p)
		v := make(map[string]any)
		if err == nil {
			err = json.Unmarshal(data, &v)
		}
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	write := func(v any) (digest string, size int) {
		data, err := json.Marshal(v)
		if err == nil {
			digest = digestOf(data)
			err = os.WriteFile(filepath.Join(dir, "blobs/sha256", strings.TrimPrefix(digest, "sha256:")), data, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return digest, len(data)
	}
	blobPath := func(d v1.Hash, err error) string {
		if err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, "blobs", d.Algorithm, d.Hex)
	}
	manifest, config := readJSON(blobPath(img.Digest())), readJSON(blobPath(img.ConfigName()))
	config["os"], config["architecture"] = "linux", platformOf((&ociSource{Reference: "x"}).withPlatform()).Architecture
	if change != nil {
		change(manifest, config)
	}
	digest, size := write(config)
	c := manifest["config"].(map[string]any)
	c["digest"], c["size"] = digest, size
	digest, size = write(manifest)
	index := map[string]any{"schemaVersion": 2, "manifests": []any{map[string]any{"mediaType": manifest["mediaType"], "digest": digest, "size": size}}}
	data, err := json.Marshal(index)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "index.json"), data, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func diffIDs(ids ...string) func(_, config map[string]any) {
	return func(_, config map[string]any) {
		config["rootfs"] = map[string]any{"type": "layers", "diff_ids": ids}
	}
}

func gzipped(t *testing.T, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write(data)
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestImportUnderstandsCompressions(t *testing.T) {
	b := newBuilder(t)
	data := layerTar(t, file("opt/a", "x"))
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	for kind, blob := range map[string][]byte{"none": data, "gzip": gzipped(t, data), "zstd": enc.EncodeAll(data, nil), "gzip in two parts": append(gzipped(t, data[:512]), gzipped(t, data[512:])...)} {
		// The media type is wrong for all but one: what counts is the content.
		got, err := imported(t, b, ImportSpec{Layout: rawImage(t, blob, types.OCILayer, diffIDs(digestOf(data)))})
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		expectTree(t, got.Image, map[string]string{"opt/a": "= x"})
	}
}

// What a stranger's layers must not do. Each import fails with an error for the caller that says why, and
// leaves neither template nor layer nor anything outside the image.
func TestImportRefusesHostileLayers(t *testing.T) {
	b := newBuilder(t)
	host := t.TempDir()
	victim := filepath.Join(host, "victim")
	if err := os.WriteFile(victim, []byte("host"), 0o600); err != nil {
		t.Fatal(err)
	}
	plain := layerTar(t, file("a", strings.Repeat("x", 4096)))
	zip := gzipped(t, plain)
	huge := tar.Header{Name: "huge", Typeflag: tar.TypeReg, Mode: 0o644, Size: maxTreeBytes + 1}
	var b2 bytes.Buffer
	if err := tar.NewWriter(&b2).WriteHeader(&huge); err != nil {
		t.Fatal(err)
	}
	wide := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf8, 0x00, 0x00, 0x00} // a frame that asks for a window of 2 TiB
	one := func(e ...entry) []byte { return layerTar(t, e...) }
	for name, tt := range map[string]struct {
		blob   []byte
		change func(manifest, config map[string]any)
		want   string
	}{
		"dot dot":               {blob: one(file("a/../../x", "")), want: "leaves its root"},
		"dot dot in a folder":   {blob: one(folder("../x/")), want: "leaves its root"},
		"hard link out":         {blob: one(hardlink("x", "../.."+victim)), want: "leaves its root"},
		"hard link to the host": {blob: one(hardlink("x", victim)), want: "hard link"},
		"hard link via a link":  {blob: one(symlink("up", "../../../../../.."), hardlink("x", "up"+victim)), want: "hard link"},
		"hard link to a folder": {blob: one(folder("d"), hardlink("x", "d")), want: "hard link to a folder"},
		"whiteout of dot dot":   {blob: one(file("a/.wh...", "")), want: "hides nothing"},
		"whiteout of dot":       {blob: one(file("a/.wh..", "")), want: "hides nothing"},
		"whiteout of nothing":   {blob: one(file("a/.wh.", "")), want: "hides nothing"},
		"a file below a file":   {blob: one(file("a", ""), file("a/b", "")), want: "not a directory"},
		"a circle of links":     {blob: one(symlink("a", "b"), symlink("b", "a"), file("a/x", "")), want: "layer 1"},
		"the root is a file":    {blob: one(file(".", "x")), want: "root"},
		"the root is a link":    {blob: one(symlink(".", "/etc")), want: "root"},
		"a long name":           {blob: one(file(strings.Repeat("x", 256), "")), want: "is over 255 bytes"},
		"a NUL":                 {blob: bytes.Replace(one(entry{tar.Header{Name: "x", Typeflag: tar.TypeSymlink, Linkname: "QQQ", Format: tar.FormatPAX, PAXRecords: map[string]string{"X.y": "QZQ"}}, ""}), []byte("QQQ"), []byte("\x00\x00\x00"), 1), want: "header"},
		"an unknown type":       {blob: one(entry{tar.Header{Name: "x", Typeflag: 'Z'}, ""}), want: "type"},
		"a negative owner":      {blob: one(entry{tar.Header{Name: "x", Typeflag: tar.TypeReg, Uid: -5, Format: tar.FormatGNU}, ""}), want: "owner"},
		"a huge owner":          {blob: one(entry{tar.Header{Name: "x", Typeflag: tar.TypeReg, Uid: 1 << 40, Format: tar.FormatGNU}, ""}), want: "owner"},
		"a huge file":           {blob: b2.Bytes(), want: "at most"},
		"not a tar":             {blob: bytes.Repeat([]byte("no tar "), 400), want: "header"},
		"a cut tar":             {blob: plain[:1000], want: "unexpected EOF"},
		"a cut gzip":            {blob: zip[:len(zip)-9], change: diffIDs(digestOf(plain)), want: "unexpected EOF"},
		"garbage after gzip":    {blob: append(bytes.Clone(zip), "garbage that is no member of it"...), change: diffIDs(digestOf(plain)), want: "invalid header"},
		"a broken gzip":         {blob: append(append(bytes.Clone(zip[:len(zip)-8]), 1, 2, 3, 4), zip[len(zip)-4:]...), change: diffIDs(digestOf(plain)), want: "checksum"},
		"a wide zstd window":    {blob: wide, want: "window"},
		"another diff ID":       {blob: plain, change: diffIDs(digestOf([]byte("other"))), want: "archive's digest"},
		"another digest": {blob: plain, want: "blob", change: func(m, _ map[string]any) {
			m["layers"].([]any)[0].(map[string]any)["digest"] = digestOf([]byte("other"))
		}},
		"a smaller size": {blob: plain, want: "longer than it says", change: func(m, _ map[string]any) {
			m["layers"].([]any)[0].(map[string]any)["size"] = 100
		}},
		"a huge size": {blob: plain, want: "over", change: func(m, _ map[string]any) {
			m["layers"].([]any)[0].(map[string]any)["size"] = int64(1) << 60
		}},
		"a negative size": {blob: plain, want: "over", change: func(m, _ map[string]any) {
			m["layers"].([]any)[0].(map[string]any)["size"] = -1
		}},
		"a path as digest": {blob: plain, want: "hash", change: func(m, _ map[string]any) {
			m["layers"].([]any)[0].(map[string]any)["digest"] = "sha256:../../../../etc/passwd"
		}},
		"many layers": {blob: plain, want: "more than 128 layers", change: func(_, c map[string]any) {
			ids := make([]string, 129)
			for i := range ids {
				ids[i] = digestOf(plain)
			}
			diffIDs(ids...)(nil, c)
		}},
		"fewer diff IDs":       {blob: plain, change: diffIDs(), want: "1 layers and its configuration 0"},
		"another architecture": {blob: plain, want: "made for linux/s390x", change: func(_, c map[string]any) { c["architecture"] = "s390x" }},
		"another system":       {blob: plain, want: "made for windows", change: func(_, c map[string]any) { c["os"] = "windows" }},
		"an artifact":          {blob: plain, want: "artifact", change: func(_, c map[string]any) { clear(c) }},
	} {
		t.Run(name, func(t *testing.T) {
			change := tt.change
			if change == nil {
				change = diffIDs(digestOf(tt.blob))
			}
			_, err := imported(t, b, ImportSpec{Name: "hostile", Layout: rawImage(t, tt.blob, types.OCIUncompressedLayer, change)})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v, want one with %q", err, tt.want)
			}
			if code := sandlot.ErrorCode(err); code != sandlot.CodeInvalidRequest && code != sandlot.CodeTooLarge {
				t.Errorf("code %s: the caller is not told that the image is at fault: %v", code, err)
			}
		})
	}
	if data, err := os.ReadFile(victim); err != nil || string(data) != "host" {
		t.Errorf("the host's file now holds %q, %v", data, err)
	}
	if list, err := b.store.List(); err != nil || len(list) != 0 {
		t.Errorf("templates are left: %v, %v", list, err)
	}
	if layers, err := os.ReadDir(filepath.Join(b.cache, "layers")); err != nil || len(layers) != 1 {
		t.Errorf("layers are left: %v, %v", layers, err)
	}
}

// A layer of a few kilobytes that is gigabytes of zeros ends at the limit, before the disk is full.
func TestImportStopsBombs(t *testing.T) {
	var packed bytes.Buffer
	gz := gzip.NewWriter(&packed)
	tw := tar.NewWriter(gz)
	chunk := make([]byte, 1<<20)
	const each = 8 << 20
	for i := range 3 {
		if err := tw.WriteHeader(&tar.Header{Name: string(rune('a' + i)), Typeflag: tar.TypeReg, Size: each}); err != nil {
			t.Fatal(err)
		}
		for range each / len(chunk) {
			if _, err := tw.Write(chunk); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := gz.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := decompress(&packed)
	if err != nil {
		t.Fatal(err)
	}
	const limit = each + each/2
	var out countWriter
	tr := newTree(&out)
	tr.bytes = maxTreeBytes - limit
	err = addLayer(tr, tar.NewReader(r), new(leftOut))
	if sandlot.ErrorCode(err) != sandlot.CodeTooLarge || int64(out) > limit+1<<20 {
		t.Errorf("%d bytes came out, error %v", out, err)
	}
	// Padding counts too, though it is no file.
	capped := &cappedReader{r: zeros{}, left: 1 << 20, what: "x"}
	if n, err := io.Copy(io.Discard, capped); n > 1<<20 || sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
		t.Errorf("%d bytes of padding, %v", n, err)
	}
}

type countWriter int64

func (c *countWriter) Write(p []byte) (int, error) { *c += countWriter(len(p)); return len(p), nil }

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestImportPicksThePlatform(t *testing.T) {
	b := newBuilder(t)
	index := v1.ImageIndex(scratch.Index)
	for _, arch := range []string{"amd64", "arm64", "unknown"} {
		img := imageOf(t, v1.Config{}, layerTar(t, file("arch", arch)))
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		config = config.DeepCopy()
		config.Architecture = arch
		if img, err = mutate.ConfigFile(img, config); err != nil {
			t.Fatal(err)
		}
		os := "linux"
		if arch == "unknown" {
			os = "unknown" // an attestation
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: os, Architecture: arch}}})
	}
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	reference := strings.TrimPrefix(server.URL, "http://") + "/multi:latest"
	ref, err := name.ParseReference(reference)
	if err == nil {
		err = remote.WriteIndex(ref, index)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		got, err := imported(t, b, ImportSpec{Reference: reference, Platform: "linux/" + arch})
		if err != nil {
			t.Fatal(err)
		}
		expectTree(t, got.Image, map[string]string{"arch": "= " + arch})
	}
	_, err = imported(t, b, ImportSpec{Reference: reference, Platform: "linux/s390x"})
	if err == nil || !strings.Contains(err.Error(), "it is for: linux/amd64, linux/arm64") {
		t.Errorf("error %v", err)
	}
}

// FuzzLayer: whatever a layer holds, what comes out of it is a tree of paths below the root, and of entries
// that the child knows.
func FuzzLayer(f *testing.F) {
	f.Add(layerTar(f, folder("a"), file("a/b", "x"), symlink("l", "../.."), hardlink("h", "/a/b"), file("a/.wh.c", ""), file("a/.wh..wh..opq", "")))
	f.Add(layerTar(f, file("../x", "")))
	f.Add([]byte{0x1f, 0x8b, 8, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decompress(bytes.NewReader(data))
		if err != nil {
			return
		}
		defer r.Close()
		var out bytes.Buffer
		tr := newTree(&out)
		if addLayer(tr, tar.NewReader(&cappedReader{r: r, left: 1 << 20, what: "x"}), new(leftOut)) != nil || tr.close() != nil {
			return
		}
		read := tar.NewReader(&out)
		for {
			h, err := read.Next()
			if err == io.EOF {
				return
			}
			if err != nil {
				t.Fatalf("the tree cannot be read: %v", err)
			}
			if !filepath.IsLocal(h.Name) || h.Name == layerMark {
				t.Errorf("%q leaves the root", h.Name)
			}
			switch h.Typeflag {
			case tar.TypeDir, tar.TypeReg, tar.TypeSymlink:
			case tar.TypeLink:
				if !filepath.IsLocal(h.Linkname) {
					t.Errorf("%q links to %q", h.Name, h.Linkname)
				}
			default:
				t.Errorf("%q has type %q", h.Name, h.Typeflag)
			}
		}
	})
}
