// Package sqlite remembers in one SQLite file: WAL, one writer connection, a few readers.
//
// synchronous is FULL: what a caller was told survives a power cut, not only a crash of this process.
package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/pressly/goose/v3"
	"modernc.org/sqlite" // registers the driver "sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"sandlot"
)

//go:embed migrations/*.sql
var migrations embed.FS

// FileName is the database's name inside its directory.
const FileName = "sandlot.db"

const readers = 4

// Store implements the stores that service and authz declare.
type Store struct {
	write *sql.DB // one connection: SQLite has one writer, and waiting in Go is fair where its lock is not
	read  *sql.DB
	stmts statements

	maintained atomic.Int64 // Unix milliseconds of the last Maintain of this process
}

// Open opens or makes the database in dir, which becomes 0700, and brings it to this program's version.
// A database of a newer program is refused and left as it is.
func Open(ctx context.Context, dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the database's directory: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil { //nolint:gosec // a directory
		return nil, fmt.Errorf("close the database's directory: %w", err)
	}
	path := filepath.Join(dir, FileName)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600) //nolint:gosec // the operator's own directory
	if err != nil {
		return nil, fmt.Errorf("make the database: %w", err)
	}
	err = errors.Join(f.Chmod(0o600), f.Close())
	if err != nil {
		return nil, fmt.Errorf("close the database's file: %w", err)
	}
	s := &Store{}
	if s.write, err = open(path, "immediate", "synchronous(FULL)"); err != nil {
		return nil, err
	}
	s.write.SetMaxOpenConns(1)
	if s.read, err = open(path, "deferred", "query_only(1)"); err != nil {
		_ = s.write.Close()
		return nil, err
	}
	s.read.SetMaxOpenConns(readers)
	s.read.SetMaxIdleConns(readers)
	if err := s.migrate(ctx); err != nil {
		_ = s.Close()
		return nil, err
	}
	if err := s.prepare(ctx); err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

func open(path, lock string, pragmas ...string) (*sql.DB, error) {
	q := url.Values{"_txlock": {lock}, "_pragma": append([]string{
		"busy_timeout(5000)", "journal_mode(WAL)", "foreign_keys(1)", "temp_store(MEMORY)", "cache_size(-8000)",
	}, pragmas...)}
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String())
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	db.SetConnMaxLifetime(0)
	return db, nil
}

func (s *Store) migrate(ctx context.Context) error {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, s.write, sub)
	if err != nil {
		return fmt.Errorf("read the migrations: %w", err)
	}
	have, err := p.GetDBVersion(ctx)
	if err != nil {
		return fault(err)
	}
	if newest := p.ListSources()[len(p.ListSources())-1].Version; have > newest {
		return fmt.Errorf("the database is of a newer sandlot (schema %d, this one knows %d): run that version, or restore a backup", have, newest)
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("bring the database up to date: %w", fault(err))
	}
	return nil
}

// Close lets go of the file.
func (s *Store) Close() error { return errors.Join(s.read.Close(), s.write.Close()) }

// Ping says whether the storage can be written.
func (s *Store) Ping(ctx context.Context) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO meta (key, value) VALUES ('ping', x'00') ON CONFLICT (key) DO UPDATE SET value = excluded.value`)
		return err
	})
}

// tx runs f in a write transaction.
func (s *Store) tx(ctx context.Context, f func(*sql.Tx) error) error {
	tx, err := s.write.BeginTx(ctx, nil)
	if err != nil {
		return fault(err)
	}
	if err := f(tx); err != nil {
		_ = tx.Rollback()
		return fault(err)
	}
	return fault(tx.Commit())
}

// fault gives the driver's error a code and words.
func fault(err error) error {
	var typed *sandlot.Error
	if err == nil || errors.As(err, &typed) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if errors.Is(err, sql.ErrNoRows) {
		return sandlot.Wrap(err, sandlot.CodeNotFound, "no such row")
	}
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return sandlot.Wrap(err, sandlot.CodeInternal, "the database failed")
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_FULL:
		return unavailable(err, "the server's disk is full")
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM:
		return unavailable(err, "the server's database cannot be written")
	case sqlite3.SQLITE_IOERR:
		return unavailable(err, "the server's disk fails")
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return unavailable(err, "the server's database is busy")
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return sandlot.Wrap(err, sandlot.CodeInternal, "the server's database is damaged: restore it from a backup")
	case sqlite3.SQLITE_CONSTRAINT:
		switch e.Code() {
		case sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY:
			return sandlot.Wrap(err, sandlot.CodeConflict, "this name is taken")
		}
	case sqlite3.SQLITE_INTERRUPT:
		return sandlot.Wrap(err, sandlot.CodeTimeout, "the database was interrupted")
	}
	return sandlot.Wrap(err, sandlot.CodeInternal, "the database failed")
}

func unavailable(err error, message string) error {
	return sandlot.Wrap(err, sandlot.CodeUnavailable, "%s", message).With("retry_after_s", 5)
}

func ms(t time.Time) int64 { return t.UnixMilli() }

// orNull stores the zero time as NULL.
func orNull(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UnixMilli()
}

func at(v int64) time.Time { return time.UnixMilli(v).UTC() }

func atOrZero(v sql.NullInt64) time.Time {
	if !v.Valid {
		return time.Time{}
	}
	return at(v.Int64)
}

func idOrNull(id sandlot.ID) any {
	if id == "" {
		return nil
	}
	return string(id)
}

// LimitPages makes the database full at n pages, or at its present size when that is more; 0 lifts the
// limit. It is how a full disk is tried out.
func (s *Store) LimitPages(ctx context.Context, n int) error {
	if n == 0 {
		n = 1 << 30
	}
	_, err := s.write.ExecContext(ctx, fmt.Sprintf("PRAGMA max_page_count = %d", n))
	return fault(err)
}
