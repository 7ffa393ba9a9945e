package service

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/node"
)

const (
	keptBuilds    = 20        // of a project, finished; the oldest are forgotten
	keptBuildLog  = 256 << 10 // bytes of a build's log, the end of it
	allKeptBuilds = 2000      // of all projects
)

// BuildState is what a build is.
type BuildState string

const (
	BuildRunning   BuildState = "running"
	BuildSucceeded BuildState = "succeeded"
	BuildFailed    BuildState = "failed"
)

// Build is a build of a template as it is at one instant.
type Build struct {
	ID       sandlot.ID
	Name     string
	State    BuildState
	Log      []string // the last lines
	Cut      bool     // lines before them are not kept
	Template sandlot.Template
	Err      error
	Started  time.Time
	Ended    time.Time
}

// build is a build that goes on or has ended. It is this process's: a restart forgets it, and the node undoes what
// was under way.
type build struct {
	project sandlot.ID
	cancel  context.CancelFunc

	mu      sync.Mutex
	now     Build
	first   int // number of now.Log[0]
	bytes   int
	changed chan struct{} // closed and replaced at every change
}

func (b *build) log(line string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Log = append(b.now.Log, line)
	b.bytes += len(line) + 1
	for b.bytes > keptBuildLog {
		b.bytes -= len(b.now.Log[0]) + 1
		b.now.Log = b.now.Log[1:]
		b.first++
		b.now.Cut = true
	}
	b.tell()
}

func (b *build) tell() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// see returns the build with the lines from number from on, the number of the next line, and what closes when there
// is more.
func (b *build) see(from int) (Build, int, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	seen := b.now
	next := b.first + len(b.now.Log)
	seen.Log = slices.Clone(b.now.Log[min(max(from-b.first, 0), len(b.now.Log)):])
	return seen, next, b.changed
}

// builds are those that are kept.
type builds struct {
	mu     sync.Mutex
	closed bool
	all    map[sandlot.ID]*build
}

// add keeps b, unless its project has one under way.
func (s *builds) add(b *build) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errNotReady
	}
	var ended []*build
	total := len(s.all)
	for _, o := range s.all {
		if o.project != b.project {
			continue
		}
		seen, _, _ := o.see(1 << 62)
		if seen.State == BuildRunning {
			return sandlot.Errorf(sandlot.CodeConflict, "the project has a build under way: wait for its end").
				With("build", string(seen.ID)).With("retry_after_s", 10)
		}
		ended = append(ended, o)
	}
	if total >= allKeptBuilds && len(ended) == 0 {
		return sandlot.Errorf(sandlot.CodeCapacity, "this server remembers no more builds now").With("retry_after_s", 60)
	}
	slices.SortFunc(ended, func(a, b *build) int { return a.now.Started.Compare(b.now.Started) }) // set once
	for len(ended) >= keptBuilds || total >= allKeptBuilds && len(ended) > 0 {
		delete(s.all, ended[0].now.ID)
		ended, total = ended[1:], total-1
	}
	if s.all == nil {
		s.all = map[sandlot.ID]*build{}
	}
	s.all[b.now.ID] = b
	return nil
}

func (s *builds) find(project, id sandlot.ID) (*build, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.all[id]; b != nil && b.project == project {
		return b, nil
	}
	return nil, sandlot.Errorf(sandlot.CodeNotFound, "no such build: this server remembers the last %d of a project, until it restarts", keptBuilds)
}

// BuildTemplate begins to build a template of the project and returns at once; Build and WatchBuild say how it goes
// on. req.Project is not used. Codes: invalid_request, conflict.
func (s *Service) BuildTemplate(_ context.Context, g authz.Grant, req node.BuildRequest) (Build, error) {
	if s.closing.Load() || !s.ready.Load() {
		return Build{}, errNotReady
	}
	if _, err := sandlot.ParseName(req.Name); err != nil {
		return Build{}, invalid("name: %s", message(err)).With("field", "name")
	}
	if (req.Definition == "") == (req.Import == nil) {
		return Build{}, invalid("exactly one of definition and from is needed").With("field", "definition")
	}
	req.Project = g.Project.ID
	ctx, cancel := context.WithCancel(context.Background()) // ends with the build or Close
	b := &build{project: g.Project.ID, cancel: cancel, changed: make(chan struct{}), now: Build{
		ID: sandlot.NewID(sandlot.PrefixBuild), Name: req.Name, State: BuildRunning, Started: s.clock.Now().UTC().Truncate(time.Millisecond),
	}}
	if err := s.builds.add(b); err != nil {
		cancel()
		return Build{}, err
	}
	s.loops.Go(func() {
		defer cancel()
		t, err := s.node.BuildTemplate(ctx, req, b.log)
		s.tmpl.drop(g.Project.ID)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.now.State, b.now.Template, b.now.Err = BuildSucceeded, t, err
		if err != nil {
			b.now.State = BuildFailed
			if ctx.Err() != nil {
				b.now.Err = sandlot.Errorf(sandlot.CodeTimeout, "the build was cancelled")
			}
			s.log.Info("a template was not built", "project", g.Project.ID, "template", req.Name, "error", err)
		}
		b.now.Ended = s.clock.Now().UTC().Truncate(time.Millisecond)
		b.tell()
	})
	seen, _, _ := b.see(0)
	return seen, nil
}

// Build tells of a build of the project. Codes: not_found.
func (s *Service) Build(_ context.Context, g authz.Grant, id sandlot.ID) (Build, error) {
	b, err := s.builds.find(g.Project.ID, id)
	if err != nil {
		return Build{}, err
	}
	seen, _, _ := b.see(0)
	return seen, nil
}

// CancelBuild ends a build that goes on; its template stays as it was. Idempotent. Codes: not_found.
func (s *Service) CancelBuild(_ context.Context, g authz.Grant, id sandlot.ID) error {
	b, err := s.builds.find(g.Project.ID, id)
	if err == nil {
		b.cancel()
	}
	return err
}

// WatchBuild gives line each line of a build's log, those before it was called first, and returns the build when it
// has ended. The build goes on when ctx ends. Codes: not_found, and what line returns.
func (s *Service) WatchBuild(ctx context.Context, g authz.Grant, id sandlot.ID, line func(string) error) (Build, error) {
	b, err := s.builds.find(g.Project.ID, id)
	if err != nil {
		return Build{}, err
	}
	for from := 0; ; {
		seen, next, changed := b.see(from)
		from = next
		for _, l := range seen.Log {
			if err := line(l); err != nil {
				return Build{}, err
			}
		}
		if seen.State != BuildRunning {
			return seen, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Build{}, context.Cause(ctx)
		}
	}
}

// end ends those that go on, and lets none begin.
func (s *builds) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, b := range s.all {
		b.cancel()
	}
}

// BuildStep is the step that failed, "" where none did.
func (b *Build) BuildStep() string {
	var e *sandlot.Error
	if errors.As(b.Err, &e) {
		if step, ok := e.Fields["step"].(string); ok {
			return step
		}
	}
	return ""
}
