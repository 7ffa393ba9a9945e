package service

import (
	"context"
	"strings"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/node"
)

// templatesFresh bounds the age of the cached list: a template that was just built is found at once,
// because an unknown name asks the node; a rebuilt one's defaults apply after it.
const templatesFresh = time.Minute

type templateCache struct {
	mu   sync.Mutex
	at   time.Time
	list []node.TemplateInfo
}

// Templates lists what sandboxes can be made from, with the state of each pool.
func (s *Service) Templates(ctx context.Context) ([]node.TemplateInfo, error) {
	list, err := s.node.Templates(ctx)
	if err != nil {
		return nil, err
	}
	s.tmpl.mu.Lock()
	s.tmpl.at, s.tmpl.list = time.Now(), list
	s.tmpl.mu.Unlock()
	return list, nil
}

// template finds a template by its name or name@digest. The node decides at the create itself; this is
// for its defaults, and for a clear error.
func (s *Service) template(ctx context.Context, ref string) (node.TemplateInfo, error) {
	name, digest, _ := strings.Cut(ref, "@")
	if _, err := sandlot.ParseName(name); err != nil {
		return node.TemplateInfo{}, invalid("template: %s", message(err)).With("field", "template")
	}
	if digest != "" && !isDigest(digest) {
		return node.TemplateInfo{}, invalid("template: a digest is sha256: and 64 hex digits").With("field", "template")
	}
	s.tmpl.mu.Lock()
	list, at := s.tmpl.list, s.tmpl.at
	s.tmpl.mu.Unlock()
	if t, ok := pick(list, name, digest); ok && time.Since(at) < templatesFresh {
		return t, nil
	}
	list, err := s.Templates(ctx)
	if err != nil {
		return node.TemplateInfo{}, err
	}
	if t, ok := pick(list, name, digest); ok {
		return t, nil
	}
	known := make([]string, 0, len(list))
	for _, t := range list {
		known = append(known, t.Name)
	}
	return node.TemplateInfo{}, sandlot.Errorf(sandlot.CodeNotFound, "no template %q", ref).With("templates", known)
}

func pick(list []node.TemplateInfo, name, digest string) (node.TemplateInfo, bool) {
	for _, t := range list {
		if t.Name == name && (digest == "" || t.Digest == digest) {
			return t, true
		}
	}
	return node.TemplateInfo{}, false
}

func isDigest(s string) bool {
	hex, ok := strings.CutPrefix(s, "sha256:")
	return ok && len(hex) == 64 && strings.Trim(hex, "0123456789abcdef") == ""
}
