package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"

	"sandlot"
	"sandlot/internal/store"
)

func (s *Store) insertEvent(ctx context.Context, tx *sql.Tx, e sandlot.Event) error {
	var fields []byte
	if len(e.Fields) > 0 {
		var err error
		if fields, err = json.Marshal(e.Fields); err != nil {
			return err
		}
	}
	_, err := tx.StmtContext(ctx, s.stmts.insertEvent).ExecContext(ctx, e.Sandbox, ms(e.At), e.Kind, e.Name, e.Message, string(fields))
	return err
}

// addEvent inserts an event and forgets the sandbox's oldest beyond the bound.
func (s *Store) addEvent(ctx context.Context, tx *sql.Tx, e sandlot.Event) error {
	if err := s.insertEvent(ctx, tx, e); err != nil {
		return err
	}
	_, err := tx.StmtContext(ctx, s.stmts.trimEvents).ExecContext(ctx, e.Sandbox, store.MaxEvents)
	return err
}

// AddEvents appends to sandboxes' logs.
func (s *Store) AddEvents(ctx context.Context, events ...sandlot.Event) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		for _, e := range events {
			if err := s.addEvent(ctx, tx, e); err != nil {
				return err
			}
		}
		return nil
	})
}

// Events returns a sandbox's events after a sequence number, oldest first, and the last one's number.
func (s *Store) Events(ctx context.Context, id sandlot.ID, after int64, limit int) ([]sandlot.Event, int64, error) {
	last := after
	rows, err := s.read.QueryContext(ctx, `SELECT seq, at, kind, name, message, fields FROM events WHERE sandbox = ? AND seq > ? ORDER BY seq LIMIT ?`, id, after, limit)
	events, err := collect(rows, err, func() (sandlot.Event, error) {
		e := sandlot.Event{Sandbox: id}
		var when int64
		var fields string
		if err := rows.Scan(&last, &when, &e.Kind, &e.Name, &e.Message, &fields); err != nil {
			return e, fault(err)
		}
		e.At = at(when)
		if fields != "" {
			if err := json.Unmarshal([]byte(fields), &e.Fields); err != nil {
				return e, fault(err)
			}
		}
		return e, nil
	})
	return events, last, err
}
