package service

import (
	"fmt"
	"testing"
	"time"

	"sandlot"
)

func TestValidation(t *testing.T) {
	w := newWorld(t, func(p *sandlot.Plan) { p.MaxVCPU, p.MaxMemoryMB, p.MaxLifetime = 2, 4096, time.Hour })
	defer w.close()
	big := make(map[string]string)
	for i := range 1001 {
		big[fmt.Sprint("V", i)] = ""
	}
	for name, req := range map[string]CreateRequest{
		"vcpu over the plan":     {VCPU: 3},
		"negative vcpu":          {VCPU: -1},
		"memory over the plan":   {MemoryMB: 4097},
		"memory below":           {MemoryMB: 64},
		"disk":                   {DiskGB: 21},
		"idle":                   {IdleTimeout: 29 * time.Second},
		"lifetime over the plan": {Lifetime: 2 * time.Hour},
		"overflow":               {Lifetime: 1<<63 - 1},
		"name":                   {Name: "../x"},
		"env name":               {Env: map[string]string{"A=B": ""}},
		"env value":              {Env: map[string]string{"A": "x\x00y"}},
		"env count":              {Env: big},
		"env size":               {Env: map[string]string{"A": string(make([]byte, 300<<10))}},
		"metadata":               {Metadata: map[string]string{"": "x"}},
		"egress mode":            {Egress: sandlot.Egress{Mode: "some"}},
		"egress hosts":           {Egress: sandlot.Egress{Mode: sandlot.EgressOpen, Hosts: []string{"a"}}},
		"egress host":            {Egress: sandlot.Egress{Hosts: []string{"a b"}}},
		"preview":                {Preview: "some"},
		"isolation":              {Isolation: "some"},
		"key":                    {Key: "a\nb"},
	} {
		if _, err := w.Create(t.Context(), w.grant, req); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
	// adversarial item 6: names that people choose never become a path, an argument or a log line
	for _, name := range []string{"../x", "a/b", "-rf", "--root=/", "$(id)", "a\nb", "a\x00", string(make([]byte, 10<<10)), "\u202ebase", "bаse", ".hidden", "base@sha256:../x"} {
		if _, err := w.Create(t.Context(), w.grant, CreateRequest{Template: name}); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("template %q: %v", name, err)
		}
	}
	if _, err := w.Create(t.Context(), w.grant, CreateRequest{Template: "con"}); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("an unknown template: %v", err)
	}
	w.census(0)
	b := w.create(CreateRequest{})
	// adversarial item 7: of argv, cwd, env and user
	for name, req := range map[string]ExecRequest{
		"none":     {},
		"nul":      {Argv: []string{"a\x00b"}},
		"huge":     {Argv: []string{string(make([]byte, 2<<20))}},
		"cwd":      {Argv: []string{"a"}, Cwd: "/proc/../x"},
		"uid":      {Argv: []string{"a"}, User: "0:0"},
		"user":     {Argv: []string{"a"}, User: "../"},
		"env":      {Argv: []string{"a"}, Env: map[string]string{"": "x"}},
		"env line": {Argv: []string{"a"}, Env: map[string]string{"A\nB": "x"}},
		"timeout":  {Argv: []string{"a"}, Timeout: 25 * time.Hour},
	} {
		if _, err := w.Exec(t.Context(), w.grant, b.ID, req); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
}
