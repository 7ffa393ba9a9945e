package route

import (
	"encoding/json"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"sandlot"
	"sandlot/internal/authz"
)

// Document is the OpenAPI 3.1 document of a table of operations.
func Document(ops []*Operation, version string) ([]byte, error) {
	registry := huma.NewMapRegistry("#/components/schemas/", func(t reflect.Type, hint string) string {
		return strings.TrimSuffix(huma.DefaultSchemaNamer(t, hint), "Body")
	})
	doc := &huma.OpenAPI{
		OpenAPI: "3.1.0",
		Info: &huma.Info{
			Title: "Sandlot", Version: version,
			Description: "Sandboxes for AI agents: each its own machine. Errors have one shape, `ErrorEnvelope`, on every route.",
			License:     &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"},
		},
		Paths: map[string]*huma.PathItem{},
		Components: &huma.Components{
			Schemas:         registry,
			SecuritySchemes: map[string]*huma.SecurityScheme{"token": {Type: "http", Scheme: "bearer", Description: "A token of the form sl_…"}},
			Responses:       map[string]*huma.Response{},
		},
	}
	envelope := registry.Schema(reflect.TypeFor[ErrorEnvelope](), true, "")
	for _, op := range ops {
		item := doc.Paths[op.Path]
		if item == nil {
			item = &huma.PathItem{}
			doc.Paths[op.Path] = item
		}
		o, err := describe(op, registry, envelope)
		if err != nil {
			return nil, err
		}
		switch op.Method {
		case http.MethodGet:
			item.Get = o
		case http.MethodHead:
			item.Head = o
		case http.MethodPost:
			item.Post = o
		case http.MethodPut:
			item.Put = o
		case http.MethodDelete:
			item.Delete = o
		}
	}
	raw, err := json.Marshal(doc)
	if err != nil {
		return nil, err
	}
	var tree any // sorted and indented, so that a change is a readable diff
	if err := json.Unmarshal(raw, &tree); err != nil {
		return nil, err
	}
	out, err := json.MarshalIndent(tree, "", "  ")
	return append(out, '\n'), err
}

// ErrorEnvelope is the shape of every error.
type ErrorEnvelope struct {
	Error ErrorBody `json:"error"`
}

// ErrorBody is what is inside. A code's own fields come beside these.
type ErrorBody struct {
	_         struct{} `additionalProperties:"true"`
	Code      string   `json:"code" doc:"Machine readable; see the list of codes with each status"`
	Message   string   `json:"message" doc:"For people"`
	RequestID string   `json:"request_id" doc:"Also in the X-Request-Id header and the server's log"`
}

func describe(op *Operation, registry huma.Registry, envelope *huma.Schema) (*huma.Operation, error) {
	o := &huma.Operation{OperationID: op.ID, Method: op.Method, Summary: op.Summary, Description: op.Detail, Responses: map[string]*huma.Response{}}
	if op.Tag != "" {
		o.Tags = []string{op.Tag}
	}
	if op.Action != 0 {
		o.Security = []map[string][]string{{"token": {}}}
		o.Extensions = map[string]any{"x-required-scope": scopeName(op.Action)}
	}
	for _, name := range op.PathParams() {
		help := map[string]string{"ref": "The project's name", "id": "The sandbox's or token's id", "pid": "A process id inside the sandbox"}[name]
		typ := "string"
		if name == "pid" {
			typ = "integer"
		}
		o.Parameters = append(o.Parameters, &huma.Param{Name: name, In: "path", Required: true, Description: help, Schema: &huma.Schema{Type: typ}})
	}
	for _, p := range op.Params {
		in, typ, name, help := p.In, p.Type, p.Name, p.Help
		if in == "" {
			in = "query"
		}
		if typ == "" {
			typ = "string"
		}
		if p.Prefix {
			name += "KEY"
			help += " (KEY stands for any key)"
		}
		o.Parameters = append(o.Parameters, &huma.Param{Name: name, In: in, Required: p.Required, Description: help, Schema: &huma.Schema{Type: typ}})
	}
	if op.Request != nil {
		o.RequestBody = &huma.RequestBody{Required: !op.Optional, Content: map[string]*huma.MediaType{
			"application/json": {Schema: registry.Schema(reflect.TypeOf(op.Request), true, op.ID)},
		}}
	} else if op.RawBody != "" {
		o.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
			op.RawBody: {Schema: &huma.Schema{Type: "string", Format: "binary"}},
		}}
	}
	ok := &huma.Response{Description: http.StatusText(op.Status)}
	if op.Response != nil || op.Raw != "" {
		ok.Content = map[string]*huma.MediaType{}
	}
	if op.Response != nil {
		schema := registry.Schema(reflect.TypeOf(op.Response), true, op.ID)
		if op.Also != nil {
			schema = &huma.Schema{OneOf: []*huma.Schema{schema, registry.Schema(reflect.TypeOf(op.Also), true, op.ID)}}
		}
		ok.Content["application/json"] = &huma.MediaType{Schema: schema}
	}
	if op.Raw != "" {
		ok.Content[op.Raw] = &huma.MediaType{Schema: &huma.Schema{Type: "string", Format: rawFormat(op.Raw)}}
	}
	if op.Method == http.MethodHead {
		ok.Content = nil
	}
	o.Responses[strconv.Itoa(op.Status)] = ok
	byStatus := map[int][]string{}
	for _, c := range op.AllCodes() {
		byStatus[Statuses[c]] = append(byStatus[Statuses[c]], string(c))
	}
	for _, status := range slices.Sorted(maps.Keys(byStatus)) {
		r := &huma.Response{Description: "Codes: " + strings.Join(byStatus[status], ", ")}
		if op.Method != http.MethodHead {
			r.Content = map[string]*huma.MediaType{"application/json": {Schema: envelope}}
		}
		o.Responses[strconv.Itoa(status)] = r
	}
	return o, nil
}

func rawFormat(media string) string {
	if strings.HasPrefix(media, "text/") {
		return ""
	}
	return "binary"
}

func scopeName(a authz.Action) string {
	switch a {
	case authz.Read:
		return string(sandlot.ScopeRead)
	case authz.Write:
		return string(sandlot.ScopeWrite)
	case authz.Manage, authz.ManageOrg:
		return string(sandlot.ScopeAdmin)
	}
	return "any"
}

// AllCodes are the operation's own and those that every operation of its kind can fail with.
func (o *Operation) AllCodes() []sandlot.Code {
	codes := slices.Clone(o.Codes)
	codes = append(codes, sandlot.CodeInvalidRequest, sandlot.CodeInternal)
	if o.Action != 0 {
		codes = append(codes, sandlot.CodeUnauthorized, sandlot.CodeRateLimited, sandlot.CodeUnavailable)
	}
	switch o.Action {
	case authz.Read, authz.Write:
		codes = append(codes, sandlot.CodeForbidden, sandlot.CodeNotFound)
	case authz.Manage, authz.ManageOrg:
		codes = append(codes, sandlot.CodeForbidden)
	}
	if o.Request != nil || o.RawBody != "" {
		codes = append(codes, sandlot.CodeTooLarge)
	}
	slices.Sort(codes)
	return slices.Compact(codes)
}
