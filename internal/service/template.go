package service

import (
	"context"
	"strings"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/node"
)

// templatesFresh bounds the age of a cached list: a template that was just built is found at once,
// because an unknown name asks the node; a rebuilt one's defaults apply after it.
const (
	templatesFresh    = time.Minute
	templatesProjects = 1000 // cached lists
)

type templateCache struct {
	mu    sync.Mutex
	lists map[sandlot.ID]templateList // by project
}

type templateList struct {
	at   time.Time
	list []node.TemplateInfo
}

func (c *templateCache) get(project sandlot.ID) []node.TemplateInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.lists[project]; time.Since(l.at) < templatesFresh {
		return l.list
	}
	return nil
}

func (c *templateCache) put(project sandlot.ID, list []node.TemplateInfo) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lists == nil || len(c.lists) >= templatesProjects {
		c.lists = map[sandlot.ID]templateList{}
	}
	c.lists[project] = templateList{time.Now(), list}
}

func (c *templateCache) drop(project sandlot.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.lists, project)
}

// Templates lists what the project's sandboxes can be made from, with the state of each pool.
func (s *Service) Templates(ctx context.Context, g authz.Grant) ([]node.TemplateInfo, error) {
	return s.templates(ctx, g.Project.ID)
}

func (s *Service) templates(ctx context.Context, project sandlot.ID) ([]node.TemplateInfo, error) {
	list, err := s.node.Templates(ctx, project)
	if err != nil {
		return nil, err
	}
	s.tmpl.put(project, list)
	return list, nil
}

// TemplateVersions lists the versions of one template, the newest first. Codes: not_found.
func (s *Service) TemplateVersions(ctx context.Context, g authz.Grant, name string) ([]node.TemplateInfo, error) {
	if _, err := sandlot.ParseName(name); err != nil {
		return nil, noTemplate(name)
	}
	return s.node.Versions(ctx, g.Project.ID, name)
}

// RemoveTemplate removes one of the project's own templates, or NAME@DIGEST. Codes: not_found, conflict,
// forbidden.
func (s *Service) RemoveTemplate(ctx context.Context, g authz.Grant, ref string) error {
	name, digest, versioned := strings.Cut(ref, "@")
	if _, err := sandlot.ParseName(name); err != nil || versioned && !isDigest(digest) {
		return noTemplate(ref)
	}
	defer s.tmpl.drop(g.Project.ID)
	return s.node.RemoveTemplate(ctx, g.Project.ID, ref)
}

func noTemplate(ref string) *sandlot.Error {
	return sandlot.Errorf(sandlot.CodeNotFound, "no template %.100q", ref)
}

// template finds a template by its name or name@digest. The node decides at the create itself; this is
// for its defaults, and for a clear error.
func (s *Service) template(ctx context.Context, project sandlot.ID, ref string) (node.TemplateInfo, error) {
	name, digest, _ := strings.Cut(ref, "@")
	if _, err := sandlot.ParseName(name); err != nil {
		return node.TemplateInfo{}, invalid("template: %s", message(err)).With("field", "template")
	}
	if digest != "" && !isDigest(digest) {
		return node.TemplateInfo{}, invalid("template: a digest is sha256: and 64 hex digits").With("field", "template")
	}
	if t, ok := pick(s.tmpl.get(project), name, digest); ok {
		return t, nil
	}
	list, err := s.templates(ctx, project)
	if err != nil {
		return node.TemplateInfo{}, err
	}
	if t, ok := pick(list, name, digest); ok {
		return t, nil
	}
	if digest != "" { // an older version, perhaps
		versions, err := s.node.Versions(ctx, project, name)
		if err != nil && !isNotFound(err) {
			return node.TemplateInfo{}, err
		}
		if t, ok := pick(versions, name, digest); ok {
			return t, nil
		}
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
