package projectapi

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/service"
	"sandlot/internal/wire"
)

type fileBody struct {
	Name       string    `json:"name"`
	Path       string    `json:"path" doc:"Absolute"`
	Type       string    `json:"type" enum:"file,dir,symlink,fifo,socket,device"`
	Size       int64     `json:"size"`
	Mode       string    `json:"mode" doc:"Octal, such as 0644"`
	User       string    `json:"user"`
	Group      string    `json:"group"`
	ModifiedAt time.Time `json:"modified_at"`
	Target     string    `json:"target,omitempty" doc:"Of a symlink"`
}

type fileList struct {
	Path    string     `json:"path"`
	Entries []fileBody `json:"entries" doc:"By name"`
	Next    string     `json:"next_cursor,omitempty" doc:"Pass it as cursor for the next page; absent on the last"`
}

type fileEvent struct {
	Type string `json:"type" enum:"ready,create,write,remove,rename,chmod,overflow,error"`
	Path string `json:"path,omitempty"`
}

func showFile(f wire.FileInfo) fileBody {
	return fileBody{
		Name: f.Name, Path: f.Path, Type: f.Type, Size: f.Size, Mode: f.Mode, User: f.User, Group: f.Group, ModifiedAt: f.ModTime, Target: f.Target,
	}
}

func (a api) files() []*route.Operation {
	codes := []sandlot.Code{sandlot.CodeNotRunning, sandlot.CodeSandboxUnhealthy, sandlot.CodeTimeout}
	path := route.Param{Name: "path", Help: "Relative paths are below /workspace", Required: true}
	dir := route.Param{Name: "path", Help: "Relative paths are below /workspace; default /workspace"}
	user := route.Param{Name: "user", Help: "Whose rights count; default user"}
	recursive := route.Param{Name: "recursive", Type: "boolean", Help: "Also what is below"}
	op := func(id, method, what string, o route.Operation) *route.Operation {
		o.ID, o.Method, o.Path, o.Tag, o.Action = id, method, base+"/{id}/files/"+what, "files", authz.Write
		o.Codes = append(o.Codes, codes...)
		o.Params = append(o.Params, user)
		return &o
	}
	return []*route.Operation{
		op("listFiles", http.MethodGet, "list", route.Operation{
			Summary: "List a directory", Response: fileList{}, Handle: a.listFiles, Params: []route.Param{
				dir, {Name: "limit", Type: "integer", Help: "1 to 1000, default 1000"}, {Name: "cursor", Help: "next_cursor of the page before"},
			},
		}),
		op("statFile", http.MethodGet, "stat", route.Operation{
			Summary: "Describe a file; a link itself, not what it names", Response: fileBody{}, Handle: a.statFile, Params: []route.Param{dir},
		}),
		op("readFile", http.MethodGet, "content", route.Operation{
			Summary: "A file's bytes", Detail: "One range by `Range` (206). Files over 256 MiB come in ranges only.", Raw: "application/octet-stream",
			Codes: []sandlot.Code{sandlot.CodeRange, sandlot.CodeTooLarge}, Handle: a.readFile,
			Params: []route.Param{path, {Name: "Range", In: "header", Help: "bytes=FROM-TO, one range"}},
		}),
		op("headFile", http.MethodHead, "content", route.Operation{
			Summary: "A file's size and time", Handle: a.headFile, Params: []route.Param{path},
		}),
		op("writeFile", http.MethodPut, "content", route.Operation{
			Summary: "Write a file, whole or not at all", Detail: "Makes parent directories. At most 256 MiB.", RawBody: "application/octet-stream",
			Status: http.StatusNoContent, Codes: []sandlot.Code{sandlot.CodeConflict, sandlot.CodeDiskFull}, Handle: a.writeFile, Params: []route.Param{path},
		}),
		op("deleteFile", http.MethodDelete, "content", route.Operation{
			Summary: "Delete a file or an empty directory", Status: http.StatusNoContent, Codes: []sandlot.Code{sandlot.CodeConflict},
			Handle: a.deleteFile, Params: []route.Param{path, recursive},
		}),
		op("makeDirectory", http.MethodPost, "mkdir", route.Operation{
			Summary: "Make a directory and its parents", Status: http.StatusNoContent, Codes: []sandlot.Code{sandlot.CodeConflict, sandlot.CodeDiskFull},
			Handle: a.mkdir, Params: []route.Param{path},
		}),
		op("moveFile", http.MethodPost, "move", route.Operation{
			Summary: "Rename a file or directory", Status: http.StatusNoContent, Codes: []sandlot.Code{sandlot.CodeConflict},
			Handle: a.move, Params: []route.Param{path, {Name: "to", Help: "The new path", Required: true}},
		}),
		op("downloadArchive", http.MethodGet, "archive", route.Operation{
			Summary: "A directory as tar", Detail: "Compressed when `Accept-Encoding` has gzip.", Raw: "application/x-tar",
			Codes: []sandlot.Code{sandlot.CodeTooLarge, sandlot.CodeConflict}, Handle: a.archive, Params: []route.Param{dir},
		}),
		op("uploadArchive", http.MethodPut, "archive", route.Operation{
			Summary: "Unpack a tar into a directory", Detail: "Compressed with `Content-Encoding: gzip`. A refused archive changes nothing.",
			RawBody: "application/x-tar", Status: http.StatusNoContent, Codes: []sandlot.Code{sandlot.CodeConflict, sandlot.CodeDiskFull},
			Handle: a.unpack, Params: []route.Param{dir},
		}),
		op("watchFiles", http.MethodGet, "watch", route.Operation{
			Summary: "Changes in a directory as they happen", Raw: "text/event-stream", Stream: true, Handle: a.watch,
			Detail: "Events: `{\"type\":\"ready\"}` when the watch stands, then `{\"type\":\"create\"|\"write\"|\"remove\"|\"rename\"|\"chmod\",\"path\":…}`; " +
				"`overflow` says that some were lost.",
			Codes: []sandlot.Code{sandlot.CodeShuttingDown}, Params: []route.Param{dir, recursive},
		}),
	}
}

// at reads the sandbox and the path; deflt stands for an absent one.
func at(q *route.Request, deflt string) (sandlot.ID, service.At, error) {
	id, err := q.SandboxID()
	p := q.Query("path")
	if p == "" {
		p = deflt
	}
	return id, service.At{Path: p, User: q.Query("user")}, err
}

func (a api) listFiles(q *route.Request) error {
	id, where, err := at(q, ".")
	if err != nil {
		return err
	}
	limit, err := q.QueryInt("limit", 1000, 1, 1000)
	if err != nil {
		return err
	}
	after := q.Query("cursor")
	if len(after) > sandlot.MaxNameBytes || strings.ContainsAny(after, "/\x00") {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "cursor is not one that this list gave").With("field", "cursor")
	}
	l, err := a.service.ListFiles(q.Context(), q.Grant, id, where, after, int(limit))
	if err != nil {
		return err
	}
	out := fileList{Path: l.Path, Entries: make([]fileBody, len(l.Entries)), Next: l.Next}
	for i, f := range l.Entries {
		out.Entries[i] = showFile(f)
	}
	return q.JSON(out)
}

func (a api) statFile(q *route.Request) error {
	id, where, err := at(q, ".")
	if err != nil {
		return err
	}
	f, err := a.service.StatFile(q.Context(), q.Grant, id, where)
	if err != nil {
		return err
	}
	return q.JSON(showFile(f))
}

func (a api) readFile(q *route.Request) error {
	id, where, err := at(q, "")
	if err != nil {
		return err
	}
	c, err := a.service.ReadFile(q.Context(), q.Grant, id, where, q.R.Header.Get("Range"))
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	status := http.StatusOK
	h := q.W.Header()
	if c.Partial {
		status = http.StatusPartialContent
		h.Set("Content-Range", "bytes "+strconv.FormatInt(c.Offset, 10)+"-"+strconv.FormatInt(c.Offset+c.Size-1, 10)+"/"+strconv.FormatInt(c.Total, 10))
	}
	contentHeader(h, c.Size, c.ModTime)
	q.W.WriteHeader(status)
	return q.Copy(c)
}

func contentHeader(h http.Header, size int64, modified time.Time) {
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Accept-Ranges", "bytes")
	if size >= 0 {
		h.Set("Content-Length", strconv.FormatInt(size, 10))
	}
	if !modified.IsZero() {
		h.Set("Last-Modified", modified.UTC().Format(http.TimeFormat))
	}
}

// headFile asks for one byte, which tells the whole size.
func (a api) headFile(q *route.Request) error {
	id, where, err := at(q, "")
	if err != nil {
		return err
	}
	c, err := a.service.ReadFile(q.Context(), q.Grant, id, where, "bytes=0-0")
	switch {
	case sandlot.ErrorCode(err) == sandlot.CodeRange: // there is no first byte
		contentHeader(q.W.Header(), 0, time.Time{})
	case err != nil:
		return err
	default:
		defer func() { _ = c.Close() }()
		contentHeader(q.W.Header(), c.Total, c.ModTime)
	}
	q.W.WriteHeader(http.StatusOK)
	return nil
}

func (a api) writeFile(q *route.Request) error {
	id, where, err := at(q, "")
	if err != nil {
		return err
	}
	body := q.Upload(sandlot.MaxFileBytes)
	defer func() { _ = body.Close() }()
	if err := a.service.WriteFile(q.Context(), q.Grant, id, where, body, q.R.ContentLength); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) deleteFile(q *route.Request) error {
	id, where, err := at(q, "")
	if err != nil {
		return err
	}
	recursive, err := q.QueryBool("recursive")
	if err != nil {
		return err
	}
	if err := a.service.DeleteFile(q.Context(), q.Grant, id, where, recursive); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) mkdir(q *route.Request) error {
	id, where, err := at(q, "")
	if err != nil {
		return err
	}
	if err := a.service.Mkdir(q.Context(), q.Grant, id, where); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) move(q *route.Request) error {
	id, where, err := at(q, "")
	if err != nil {
		return err
	}
	if err := a.service.MoveFile(q.Context(), q.Grant, id, where, q.Query("to")); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) archive(q *route.Request) error {
	id, where, err := at(q, ".")
	if err != nil {
		return err
	}
	gzip := acceptsGzip(q.R.Header.Get("Accept-Encoding"))
	r, err := a.service.Pack(q.Context(), q.Grant, id, where, gzip)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	h := q.W.Header()
	h.Set("Content-Type", "application/x-tar")
	h.Set("Vary", "Accept-Encoding")
	if gzip {
		h.Set("Content-Encoding", "gzip")
	}
	q.W.WriteHeader(http.StatusOK)
	return q.Copy(r)
}

// acceptsGzip reads an Accept-Encoding header: gzip by name, and not with weight zero.
func acceptsGzip(header string) bool {
	for part := range strings.SplitSeq(header, ",") {
		name, params, _ := strings.Cut(part, ";")
		if strings.EqualFold(strings.TrimSpace(name), "gzip") {
			q, ok := strings.CutPrefix(strings.TrimSpace(params), "q=")
			weight, err := strconv.ParseFloat(q, 64)
			return !ok || err == nil && weight > 0
		}
	}
	return false
}

func (a api) unpack(q *route.Request) error {
	id, where, err := at(q, ".")
	if err != nil {
		return err
	}
	gzip := false
	switch enc := q.R.Header.Get("Content-Encoding"); strings.ToLower(enc) {
	case "", "identity":
		kind := q.R.Header.Get("Content-Type")
		gzip = kind == "application/gzip" || kind == "application/x-gzip"
	case "gzip":
		gzip = true
	default:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "an archive is plain or has Content-Encoding: gzip")
	}
	body := q.Upload(2 * sandlot.MaxFileBytes) // the content's limit is the agent's to keep; headers come on top
	defer func() { _ = body.Close() }()
	if err := a.service.Unpack(q.Context(), q.Grant, id, where, body, q.R.ContentLength, gzip); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) watch(q *route.Request) error {
	id, where, err := at(q, ".")
	if err != nil {
		return err
	}
	recursive, err := q.QueryBool("recursive")
	if err != nil {
		return err
	}
	ctx, cancel := q.Stream()
	defer cancel()
	w, err := a.service.WatchFiles(ctx, q.Grant, id, where, recursive)
	if err != nil {
		return route.Cause(ctx, err)
	}
	defer w.Close()
	sse := route.NewSSE(q, cancel)
	defer sse.End()
	if err := sse.Event(fileEvent{Type: "ready"}); err != nil {
		return err
	}
	for {
		e, ok, err := w.Next()
		if err != nil {
			err = route.Cause(ctx, err)
			sse.Error(err)
			return err
		}
		if !ok {
			continue
		}
		if err := sse.Event(fileEvent{e.Op, e.Path}); err != nil {
			return err
		}
	}
}
