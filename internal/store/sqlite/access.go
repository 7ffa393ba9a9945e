package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/store"
)

const metaSecret = "secret"

// Bootstrap writes what a new server starts with, unless there is an organization already. last runs when
// all is written and before it is committed; its failure undoes everything.
func (s *Store) Bootstrap(ctx context.Context, b store.Bootstrap, last func() error) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		var n int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM orgs`).Scan(&n); err != nil {
			return err
		}
		if n > 0 {
			return nil
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO meta (key, value) VALUES (?, ?)`, metaSecret, b.Secret); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO orgs (id, name, plan, created_at) VALUES (?, ?, ?, ?)`,
			b.Org.ID, b.Org.Name, b.Org.Plan, ms(b.Org.CreatedAt)); err != nil {
			return err
		}
		if err := insertProject(ctx, tx, b.Project); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO users (id, name, created_at) VALUES (?, ?, ?)`,
			b.User.ID, b.User.Name, ms(b.User.CreatedAt)); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO members (project, user, role) VALUES (?, ?, ?)`,
			b.Project.ID, b.User.ID, b.Role); err != nil {
			return err
		}
		if err := insertToken(ctx, tx, b.Token); err != nil {
			return err
		}
		return last()
	})
}

// Secret returns the server's key for derived secrets.
func (s *Store) Secret(ctx context.Context) ([]byte, error) {
	var v []byte
	err := s.read.QueryRowContext(ctx, `SELECT value FROM meta WHERE key = ?`, metaSecret).Scan(&v)
	return v, fault(err)
}

// Org returns one organization.
func (s *Store) Org(ctx context.Context, id sandlot.ID) (sandlot.Org, error) {
	var o sandlot.Org
	var created int64
	err := s.read.QueryRowContext(ctx, `SELECT id, name, plan, created_at FROM orgs WHERE id = ?`, id).
		Scan(&o.ID, &o.Name, &o.Plan, &created)
	o.CreatedAt = at(created)
	return o, fault(err)
}

// InsertOrg adds an organization.
func (s *Store) InsertOrg(ctx context.Context, o sandlot.Org) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO orgs (id, name, plan, created_at) VALUES (?, ?, ?, ?)`, o.ID, o.Name, o.Plan, ms(o.CreatedAt))
		return err
	})
}

func insertProject(ctx context.Context, tx *sql.Tx, p sandlot.Project) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO projects (id, org, ref, created_at) VALUES (?, ?, ?, ?)`, p.ID, p.Org, p.Ref, ms(p.CreatedAt))
	return err
}

// InsertProject adds a project. Fails with CodeConflict when its ref is taken.
func (s *Store) InsertProject(ctx context.Context, p sandlot.Project) error {
	return s.tx(ctx, func(tx *sql.Tx) error { return insertProject(ctx, tx, p) })
}

// ProjectByRef returns the project that URLs call ref.
func (s *Store) ProjectByRef(ctx context.Context, ref string) (sandlot.Project, error) {
	return scanProject(s.read.QueryRowContext(ctx, `SELECT id, org, ref, created_at FROM projects WHERE ref = ?`, ref))
}

// Projects lists an organization's projects by ref.
func (s *Store) Projects(ctx context.Context, org sandlot.ID) ([]sandlot.Project, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT id, org, ref, created_at FROM projects WHERE org = ? ORDER BY ref`, org)
	return collect(rows, err, func() (sandlot.Project, error) { return scanProject(rows) })
}

func scanProject(row scanner) (sandlot.Project, error) {
	var p sandlot.Project
	var created int64
	err := row.Scan(&p.ID, &p.Org, &p.Ref, &created)
	p.CreatedAt = at(created)
	return p, fault(err)
}

func insertToken(ctx context.Context, tx *sql.Tx, t sandlot.Token) error {
	scopes := make([]string, len(t.Scopes))
	for i, sc := range t.Scopes {
		scopes[i] = string(sc)
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO tokens (id, org, project, user, name, role, scopes, hash, created_at, expires_at, revoked_at)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`, t.ID, t.Org, idOrNull(t.Project), idOrNull(t.User), t.Name, t.Role,
		strings.Join(scopes, " "), t.Hash[:], ms(t.CreatedAt), orNull(t.ExpiresAt), orNull(t.RevokedAt))
	return err
}

// InsertToken adds a token.
func (s *Store) InsertToken(ctx context.Context, t sandlot.Token) error {
	return s.tx(ctx, func(tx *sql.Tx) error { return insertToken(ctx, tx, t) })
}

// RevokeToken ends a token now; a token that was revoked before keeps its time.
func (s *Store) RevokeToken(ctx context.Context, id sandlot.ID, now time.Time) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		return one(tx.ExecContext(ctx, `UPDATE tokens SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?`, ms(now), id))
	})
}

const tokenColumns = `t.id, t.org, coalesce(t.project, ''), coalesce(t.user, ''), t.name, t.role, t.scopes, t.hash, t.created_at, t.expires_at, t.revoked_at`

func scanToken(row scanner, more ...any) (sandlot.Token, error) {
	var t sandlot.Token
	var scopes string
	var hash []byte
	var created int64
	var expires, revoked sql.NullInt64
	err := row.Scan(append([]any{&t.ID, &t.Org, &t.Project, &t.User, &t.Name, &t.Role, &scopes, &hash, &created, &expires, &revoked}, more...)...)
	if err != nil {
		return t, fault(err)
	}
	copy(t.Hash[:], hash)
	for sc := range strings.FieldsSeq(scopes) {
		t.Scopes = append(t.Scopes, sandlot.Scope(sc))
	}
	t.CreatedAt, t.ExpiresAt, t.RevokedAt = at(created), atOrZero(expires), atOrZero(revoked)
	return t, nil
}

// Credential finds a token by its secret's hash.
func (s *Store) Credential(ctx context.Context, hash [32]byte) (store.Credential, error) {
	var c store.Credential
	var created int64
	var err error
	c.Token, err = scanToken(s.read.QueryRowContext(ctx, `SELECT `+tokenColumns+`, o.id, o.name, o.plan, o.created_at
		FROM tokens t JOIN orgs o ON o.id = t.org WHERE t.hash = ?`, hash[:]), &c.Org.ID, &c.Org.Name, &c.Org.Plan, &created)
	c.Org.CreatedAt = at(created)
	return c, err
}

// Token returns one token.
func (s *Store) Token(ctx context.Context, id sandlot.ID) (sandlot.Token, error) {
	return scanToken(s.read.QueryRowContext(ctx, `SELECT `+tokenColumns+` FROM tokens t WHERE t.id = ?`, id))
}

// Tokens lists an organization's tokens, newest first.
func (s *Store) Tokens(ctx context.Context, org sandlot.ID) ([]sandlot.Token, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT `+tokenColumns+` FROM tokens t WHERE t.org = ? ORDER BY t.created_at DESC, t.id`, org)
	return collect(rows, err, func() (sandlot.Token, error) { return scanToken(rows) })
}

type scanner interface{ Scan(dest ...any) error }

// collect reads all rows.
func collect[T any](rows *sql.Rows, err error, scan func() (T, error)) ([]T, error) {
	if err != nil {
		return nil, fault(err)
	}
	defer func() { _ = rows.Close() }()
	var all []T
	for rows.Next() {
		v, err := scan()
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, fault(rows.Err())
}

// one wants exactly one row to have changed.
func one(res sql.Result, err error) error {
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err != nil {
		return err
	}
	if n != 1 {
		return sandlot.Wrap(errors.New("no row changed"), sandlot.CodeNotFound, "no such row")
	}
	return nil
}
