package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/store"
)

const sandboxColumns = `s.id, s.project, s.created_by, s.name, s.template, s.template_digest, s.isolation, s.engine,
	s.vcpu, s.memory_mb, s.disk_gb, s.state, s.reason, s.detail, s.idle_timeout, s.lifetime, s.env_names, s.metadata,
	s.egress, s.preview, s.timings, s.created_at, s.expires_at, s.last_active_at, s.ended_at`

// statements are those on the paths of create and delete: parsing one costs more than running it.
type statements struct{ insertSandbox, insertEvent, insertUsage, insertKey, endSandbox, endUsage, trimEvents *sql.Stmt }

func (s *Store) prepare(ctx context.Context) error {
	for stmt, text := range map[**sql.Stmt]string{
		&s.stmts.insertSandbox: `INSERT INTO sandboxes (id, project, created_by, name, template, template_digest, isolation, engine,
			vcpu, memory_mb, disk_gb, state, reason, detail, idle_timeout, lifetime, env_names, metadata,
			egress, preview, timings, created_at, expires_at, last_active_at)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		&s.stmts.insertEvent: `INSERT INTO events (sandbox, at, kind, name, message, fields) VALUES (?, ?, ?, ?, ?, ?)`,
		&s.stmts.insertUsage: `INSERT INTO usage (sandbox, project, org, vcpu, memory_mb, state, start_at) VALUES (?, ?, ?, ?, ?, ?, ?)`,
		&s.stmts.insertKey:   `INSERT OR REPLACE INTO idempotency (project, key, body_hash, sandbox, created_at) VALUES (?, ?, ?, ?, ?)`,
		&s.stmts.endSandbox:  `UPDATE sandboxes SET state = ?, reason = ?, detail = ?, ended_at = ? WHERE id = ? AND ended_at IS NULL`,
		&s.stmts.endUsage:    `UPDATE usage SET end_at = max(start_at, ?) WHERE sandbox = ? AND end_at IS NULL`,
		&s.stmts.trimEvents: `DELETE FROM events WHERE sandbox = ?1 AND seq <=
			(SELECT seq FROM events WHERE sandbox = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)`,
	} {
		st, err := s.write.PrepareContext(ctx, text)
		if err != nil {
			return fault(err)
		}
		*stmt = st
	}
	return nil
}

// InsertSandbox acknowledges a sandbox: the row, its first events, its open usage interval and its
// idempotency key, all or nothing.
func (s *Store) InsertSandbox(ctx context.Context, c store.Creation) error {
	b := c.Sandbox
	names, err := json.Marshal(slices.Sorted(maps.Keys(b.Env)))
	if err != nil {
		return err
	}
	metadata, err := json.Marshal(nonNil(b.Metadata))
	if err != nil {
		return err
	}
	egress, err := json.Marshal(b.Egress)
	if err != nil {
		return err
	}
	timings, err := json.Marshal(b.Timings)
	if err != nil {
		return err
	}
	return s.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.StmtContext(ctx, s.stmts.insertSandbox).ExecContext(ctx, b.ID, b.Project, b.CreatedBy, b.Name, b.Template, b.TemplateDigest,
			b.Isolation, b.Engine, b.Size.VCPU, b.Size.MemoryMB, b.Size.DiskGB, b.State, b.Reason, b.Detail,
			b.IdleTimeout.Milliseconds(), b.Lifetime.Milliseconds(), string(names), string(metadata), string(egress), b.Preview,
			string(timings), ms(b.CreatedAt), ms(b.ExpiresAt), ms(b.LastActiveAt)); err != nil {
			return err
		}
		for _, e := range c.Events {
			if err := s.insertEvent(ctx, tx, e); err != nil {
				return err
			}
		}
		u := c.Interval
		if _, err := tx.StmtContext(ctx, s.stmts.insertUsage).ExecContext(ctx, u.Sandbox, u.Project, u.Org, u.VCPU, u.MemoryMB, u.State, ms(u.Start)); err != nil {
			return err
		}
		if c.Key == "" {
			return nil
		}
		_, err := tx.StmtContext(ctx, s.stmts.insertKey).ExecContext(ctx, b.Project, c.Key, c.BodyHash[:], b.ID, ms(b.CreatedAt))
		return err
	})
}

// EndSandbox makes a sandbox terminal, closes its usage interval and says whether this call did it: a
// sandbox that had ended stays as it ended.
func (s *Store) EndSandbox(ctx context.Context, e store.End) (done bool, err error) {
	err = s.tx(ctx, func(tx *sql.Tx) error {
		res, err := tx.StmtContext(ctx, s.stmts.endSandbox).ExecContext(ctx, e.State, e.Reason, e.Detail, ms(e.At), e.ID)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return err
		}
		done = true
		if _, err := tx.StmtContext(ctx, s.stmts.endUsage).ExecContext(ctx, ms(e.Billed), e.ID); err != nil {
			return err
		}
		return s.addEvent(ctx, tx, e.Event)
	})
	return done && err == nil, err
}

// SetTimeout sets a living sandbox's times. Fails with CodeNotFound when it has ended.
func (s *Store) SetTimeout(ctx context.Context, t store.Timeout) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		if err := one(tx.ExecContext(ctx, `UPDATE sandboxes SET idle_timeout = ?, lifetime = ?, expires_at = ?, last_active_at = ?
			WHERE id = ? AND ended_at IS NULL`, t.IdleTimeout.Milliseconds(), t.Lifetime.Milliseconds(), ms(t.ExpiresAt), ms(t.At), t.ID)); err != nil {
			return err
		}
		return s.addEvent(ctx, tx, t.Event)
	})
}

// Sandbox returns one sandbox of a project.
func (s *Store) Sandbox(ctx context.Context, project, id sandlot.ID) (sandlot.Sandbox, error) {
	return scanSandbox(s.read.QueryRowContext(ctx, `SELECT `+sandboxColumns+` FROM sandboxes s WHERE s.id = ? AND s.project = ?`, id, project))
}

// Alive lists all sandboxes that have not ended, of every project.
func (s *Store) Alive(ctx context.Context) ([]store.Alive, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT `+sandboxColumns+`, p.org FROM sandboxes s JOIN projects p ON p.id = s.project WHERE s.ended_at IS NULL`)
	return collect(rows, err, func() (store.Alive, error) {
		var a store.Alive
		var err error
		a.Sandbox, err = scanSandbox(rows, &a.Org)
		return a, err
	})
}

// Sandboxes lists a project's sandboxes, newest first, and the cursor of the next page when there is one.
func (s *Store) Sandboxes(ctx context.Context, q store.Query) ([]sandlot.Sandbox, store.Cursor, error) {
	var where strings.Builder
	args := []any{q.Project}
	if q.EndedSince.IsZero() {
		where.WriteString(` AND s.ended_at IS NULL`)
	} else {
		where.WriteString(` AND (s.ended_at IS NULL OR s.ended_at >= ?)`)
		args = append(args, ms(q.EndedSince))
	}
	if q.State != "" {
		where.WriteString(` AND s.state = ?`)
		args = append(args, q.State)
	}
	for _, k := range slices.Sorted(maps.Keys(q.Metadata)) {
		where.WriteString(` AND EXISTS (SELECT 1 FROM json_each(s.metadata) m WHERE m.key = ? AND m.value = ?)`)
		args = append(args, k, q.Metadata[k])
	}
	if q.After.ID != "" {
		where.WriteString(` AND (s.created_at, s.id) < (?, ?)`)
		args = append(args, ms(q.After.CreatedAt), q.After.ID)
	}
	args = append(args, q.Limit+1)
	rows, err := s.read.QueryContext(ctx, `SELECT `+sandboxColumns+` FROM sandboxes s WHERE s.project = ?`+where.String()+
		` ORDER BY s.created_at DESC, s.id DESC LIMIT ?`, args...)
	all, err := collect(rows, err, func() (sandlot.Sandbox, error) { return scanSandbox(rows) })
	if err != nil || len(all) <= q.Limit {
		return all, store.Cursor{}, err
	}
	all = all[:q.Limit]
	last := all[len(all)-1]
	return all, store.Cursor{CreatedAt: last.CreatedAt, ID: last.ID}, nil
}

func scanSandbox(row scanner, more ...any) (sandlot.Sandbox, error) {
	var b sandlot.Sandbox
	var idle, life, created, expires, active int64
	var ended sql.NullInt64
	var names, metadata, egress, timings string
	err := row.Scan(append([]any{&b.ID, &b.Project, &b.CreatedBy, &b.Name, &b.Template, &b.TemplateDigest, &b.Isolation, &b.Engine,
		&b.Size.VCPU, &b.Size.MemoryMB, &b.Size.DiskGB, &b.State, &b.Reason, &b.Detail, &idle, &life, &names, &metadata,
		&egress, &b.Preview, &timings, &created, &expires, &active, &ended}, more...)...)
	if err != nil {
		return b, fault(err)
	}
	b.IdleTimeout, b.Lifetime = time.Duration(idle)*time.Millisecond, time.Duration(life)*time.Millisecond
	b.CreatedAt, b.ExpiresAt, b.LastActiveAt, b.EndedAt = at(created), at(expires), at(active), atOrZero(ended)
	var envNames []string
	for text, v := range map[string]any{names: &envNames, metadata: &b.Metadata, egress: &b.Egress, timings: &b.Timings} {
		if err := json.Unmarshal([]byte(text), v); err != nil {
			return b, sandlot.Wrap(err, sandlot.CodeInternal, "the server's database is damaged: restore it from a backup")
		}
	}
	if len(envNames) > 0 {
		b.Env = make(map[string]string, len(envNames))
		for _, n := range envNames {
			b.Env[n] = ""
		}
	}
	return b, nil
}

// Idempotency returns what is remembered of a key, unless it is older than since.
func (s *Store) Idempotency(ctx context.Context, project sandlot.ID, key string, since time.Time) (store.Idempotency, error) {
	var r store.Idempotency
	var hash []byte
	err := s.read.QueryRowContext(ctx, `SELECT body_hash, sandbox FROM idempotency WHERE project = ? AND key = ? AND created_at >= ?`,
		project, key, ms(since)).Scan(&hash, &r.Sandbox)
	copy(r.BodyHash[:], hash)
	return r, fault(err)
}

func nonNil(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}
