package projectapi

import (
	"encoding/base64"
	"net/http"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/node"
	"sandlot/internal/service"
)

// templateBase is not below base: there, a template could have the name of what a sandbox has.
const templateBase = "/api/v1/projects/{ref}/templates"

type templateList struct {
	Templates []templateBody `json:"templates"`
}

type templateBody struct {
	Name        string        `json:"name"`
	Digest      string        `json:"digest"`
	Description string        `json:"description"`
	Contents    []string      `json:"contents"`
	Kernels     []string      `json:"kernels"`
	Default     sizeBody      `json:"default_size"`
	ImageBytes  int64         `json:"image_bytes"`
	BuiltAt     time.Time     `json:"built_at"`
	BuildMS     int64         `json:"build_ms"`
	Own         bool          `json:"own" doc:"The project's; else the server's, for every project"`
	Pool        node.PoolInfo `json:"pool" doc:"Machines that wait ready"`
}

type templateDetail struct {
	templateBody
	Env      map[string]string `json:"env"`
	Start    []string          `json:"start" doc:"Runs before a sandbox is ready"`
	Ready    []string          `json:"ready" doc:"Ends with 0 when start is up"`
	Versions []versionBody     `json:"versions" doc:"The current one first, then the newest; each is a template of its own as name@digest"`
}

type versionBody struct {
	Digest     string    `json:"digest"`
	ImageBytes int64     `json:"image_bytes"`
	BuiltAt    time.Time `json:"built_at"`
	BuildMS    int64     `json:"build_ms"`
}

type sizeBody struct {
	VCPU     int `json:"vcpu"`
	MemoryMB int `json:"memory_mb"`
	DiskGB   int `json:"disk_gb"`
}

type buildRequest struct {
	Name       string         `json:"name" doc:"Of the template: lower-case letters, digits, dots and hyphens"`
	Definition string         `json:"definition,omitempty" doc:"The text of template.toml"`
	Files      []buildFile    `json:"files,omitempty" doc:"What the definition names, at most 200"`
	From       *importRequest `json:"from,omitempty" doc:"Instead of definition: an image of a registry"`
	Stream     bool           `json:"stream,omitempty" doc:"Answer with the log as events, until the build ends"`
}

type buildFile struct {
	Path          string  `json:"path" doc:"In the definition's folder"`
	Content       *string `json:"content,omitempty" doc:"Text,"`
	ContentBase64 *string `json:"content_base64,omitempty" doc:"or bytes"`
	Executable    bool    `json:"executable,omitempty"`
}

type importRequest struct {
	OCI        string            `json:"oci" doc:"NAME[:TAG][@sha256:…], of a public registry"`
	Platform   string            `json:"platform,omitempty" doc:"As linux/arm64; default: the host's"`
	Kernels    []string          `json:"kernels,omitempty" doc:"Languages whose kernels start ahead"`
	VCPU       int               `json:"vcpu,omitempty" doc:"Default size of sandboxes: all three or none"`
	MemoryMB   int               `json:"memory_mb,omitempty"`
	DiskGB     int               `json:"disk_gb,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	Start      []string          `json:"start,omitempty"`
	Ready      []string          `json:"ready,omitempty"`
	ImageStart bool              `json:"image_start,omitempty" doc:"The image's Entrypoint and Cmd are the start command"`
}

type buildBody struct {
	ID           string         `json:"id"`
	Name         string         `json:"name"`
	State        string         `json:"state" enum:"running,succeeded,failed"`
	Digest       string         `json:"digest,omitempty" doc:"Of the new version, when it succeeded"`
	Step         string         `json:"step,omitempty" doc:"The one that failed"`
	Error        map[string]any `json:"error,omitempty"`
	Log          []string       `json:"log,omitempty" doc:"Lines, the last 256 KiB"`
	LogTruncated bool           `json:"log_truncated,omitempty"`
	StartedAt    time.Time      `json:"started_at"`
	EndedAt      *time.Time     `json:"ended_at,omitempty"`
}

// logEvent is a line of a build's log.
type logEvent struct {
	Type string `json:"type"`
	Line string `json:"line"`
}

// buildEvent is a stream's first and last event.
type buildEvent struct {
	Type string `json:"type"`
	buildBody
}

func (a api) templateOps() []*route.Operation {
	one := templateBase + "/{name}"
	built := templateBase + "/builds/{build}"
	return []*route.Operation{
		{
			ID: "listTemplates", Method: http.MethodGet, Path: base + "/templates", Tag: "templates", Action: authz.Read, Response: templateList{},
			Summary: "What sandboxes can be made from", Handle: a.templates,
		},
		{
			ID: "buildTemplate", Method: http.MethodPost, Path: base + "/templates", Tag: "templates", Action: authz.Write, Request: buildRequest{},
			Response: buildBody{}, Status: http.StatusAccepted, Raw: "text/event-stream", Stream: true, Summary: "Build a template of the project",
			Detail: "From a definition, whose programs run in sandboxes, or from an image. The template is the project's; a new build of a name makes a new version, and the " +
				"name stands for the newest. Answers at once; `getTemplateBuild` tells how it goes on. With `stream`, events: `{\"type\":\"build\",…}`, " +
				"`{\"type\":\"log\",\"line\":…}`, at last `{\"type\":\"end\",…}` with state and digest, or the failed step and error. A client that goes away does not end the build. " +
				"One build of a project at a time, 30 minutes at most; 20 templates of a project, 5 versions of each.",
			Codes: []sandlot.Code{sandlot.CodeConflict, sandlot.CodeShuttingDown}, Handle: a.templateBuild,
		},
		{
			ID: "getTemplate", Method: http.MethodGet, Path: one, Tag: "templates", Action: authz.Read, Response: templateDetail{},
			Summary: "A template with its versions", Handle: a.template,
		},
		{
			ID: "deleteTemplate", Method: http.MethodDelete, Path: one, Tag: "templates", Action: authz.Write, Status: http.StatusNoContent,
			Summary: "Remove a template of the project with all versions, or one version (`name@sha256:…`)",
			Detail:  "A version that a sandbox was made from stays until that is closed.",
			Codes:   []sandlot.Code{sandlot.CodeConflict}, Handle: a.templateDelete,
		},
		{
			ID: "getTemplateBuild", Method: http.MethodGet, Path: built, Tag: "templates", Action: authz.Read, Response: buildBody{},
			Summary: "How a build goes on", Detail: "The last 20 of a project are kept, until the server restarts.", Handle: a.templateBuildGet,
		},
		{
			ID: "cancelTemplateBuild", Method: http.MethodDelete, Path: built, Tag: "templates", Action: authz.Write, Status: http.StatusNoContent,
			Summary: "End a build; the template stays as it was", Handle: a.templateBuildCancel,
		},
	}
}

func showTemplate(t node.TemplateInfo) templateBody {
	return templateBody{
		Name: t.Name, Digest: t.Digest, Description: t.Description, Contents: orEmpty(t.Contents), Kernels: orEmpty(t.Kernels),
		Default: sizeBody(t.Size), ImageBytes: t.ImageBytes, BuiltAt: t.BuiltAt, BuildMS: t.BuildMS, Own: t.Own, Pool: t.Pool,
	}
}

func (a api) templates(q *route.Request) error {
	list, err := a.service.Templates(q.Context(), q.Grant)
	if err != nil {
		return err
	}
	out := templateList{Templates: []templateBody{}}
	for _, t := range list {
		out.Templates = append(out.Templates, showTemplate(t))
	}
	return q.JSON(out)
}

func (a api) template(q *route.Request) error {
	ref := q.R.PathValue("name")
	name, digest, versioned := strings.Cut(ref, "@")
	list, err := a.service.TemplateVersions(q.Context(), q.Grant, name)
	if err != nil {
		return err
	}
	out := templateDetail{Versions: make([]versionBody, 0, len(list))}
	found := false
	for _, t := range list {
		out.Versions = append(out.Versions, versionBody{t.Digest, t.ImageBytes, t.BuiltAt, t.BuildMS})
		if found || versioned && t.Digest != digest {
			continue
		}
		found = true
		out.templateBody, out.Env, out.Start, out.Ready = showTemplate(t), t.Env, orEmpty(t.Start), orEmpty(t.Ready)
		if out.Env == nil {
			out.Env = map[string]string{}
		}
	}
	if !found {
		return sandlot.Errorf(sandlot.CodeNotFound, "no template %.100q", ref)
	}
	return q.JSON(out)
}

func (a api) templateDelete(q *route.Request) error {
	if err := a.service.RemoveTemplate(q.Context(), q.Grant, q.R.PathValue("name")); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) templateBuild(q *route.Request) error {
	var in buildRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	req := node.BuildRequest{Name: in.Name, Definition: in.Definition}
	for _, f := range in.Files {
		data, err := f.bytes()
		if err != nil {
			return err
		}
		req.Files = append(req.Files, node.BuildFile{Path: f.Path, Executable: f.Executable, Data: data})
	}
	if f := in.From; f != nil {
		req.Import = &node.ImportRequest{
			Reference: f.OCI, Platform: f.Platform, Kernels: f.Kernels, Env: f.Env, Start: f.Start, Ready: f.Ready, ImageStart: f.ImageStart,
			Size: sandlot.Size{VCPU: f.VCPU, MemoryMB: f.MemoryMB, DiskGB: f.DiskGB},
		}
	}
	b, err := a.service.BuildTemplate(q.Context(), q.Grant, req)
	if err != nil {
		return err
	}
	if !in.Stream {
		return q.JSON(showBuild(q, b))
	}
	ctx, cancel := q.Stream()
	defer cancel()
	sse := route.NewSSE(q, cancel)
	defer sse.End()
	b.Log = nil
	_ = sse.Event(buildEvent{"build", showBuild(q, b)}) // a client that is gone ends ctx
	b, err = a.service.WatchBuild(ctx, q.Grant, b.ID, func(line string) error { return sse.Event(logEvent{"log", line}) })
	if err != nil {
		sse.Error(route.Cause(ctx, err))
		return nil
	}
	b.Log = nil
	_ = sse.Event(buildEvent{"end", showBuild(q, b)})
	return nil
}

func (f *buildFile) bytes() ([]byte, error) {
	switch {
	case (f.Content == nil) == (f.ContentBase64 == nil):
		return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "files: %.100q needs exactly one of content and content_base64", f.Path).With("field", "files")
	case f.Content != nil:
		return []byte(*f.Content), nil
	}
	data, err := base64.StdEncoding.DecodeString(*f.ContentBase64)
	if err != nil {
		return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "files: %.100q: content_base64 is not standard base64", f.Path).With("field", "files")
	}
	return data, nil
}

func showBuild(q *route.Request, b service.Build) buildBody {
	out := buildBody{
		ID: string(b.ID), Name: b.Name, State: string(b.State), Digest: b.Template.Digest, Step: b.BuildStep(), Log: b.Log,
		LogTruncated: b.Cut, StartedAt: b.Started,
	}
	if b.Err != nil {
		_, body := route.Failure(b.Err, q.ID)
		out.Error = body
	}
	if !b.Ended.IsZero() {
		out.EndedAt = &b.Ended
	}
	return out
}

func (a api) buildID(q *route.Request) (sandlot.ID, error) {
	id, err := sandlot.ParseID(q.R.PathValue("build"))
	if err != nil {
		return "", sandlot.Errorf(sandlot.CodeNotFound, "no such build")
	}
	return id, nil
}

func (a api) templateBuildGet(q *route.Request) error {
	id, err := a.buildID(q)
	if err != nil {
		return err
	}
	b, err := a.service.Build(q.Context(), q.Grant, id)
	if err != nil {
		return err
	}
	return q.JSON(showBuild(q, b))
}

func (a api) templateBuildCancel(q *route.Request) error {
	id, err := a.buildID(q)
	if err != nil {
		return err
	}
	if err := a.service.CancelBuild(q.Context(), q.Grant, id); err != nil {
		return err
	}
	return q.NoContent()
}
