package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"sandlot"
	"sandlot/internal/store"
)

// Flush stores what has changed in running sandboxes, in one transaction. It does nothing to those that
// have ended meanwhile.
func (s *Store) Flush(ctx context.Context, changes []store.Activity) error {
	if len(changes) == 0 {
		return nil
	}
	return s.tx(ctx, func(tx *sql.Tx) error {
		active, err := tx.PrepareContext(ctx, `UPDATE sandboxes SET last_active_at = ?, timings = ? WHERE id = ? AND ended_at IS NULL`)
		if err != nil {
			return err
		}
		defer func() { _ = active.Close() }()
		sample, err := tx.PrepareContext(ctx, `INSERT OR IGNORE INTO samples (sandbox, at, coarse, cpu, cpu_ms, memory, net_rx, net_tx, processes, disk_used, disk_total)
			SELECT id, ?, 0, ?, ?, ?, ?, ?, ?, ?, ? FROM sandboxes WHERE id = ? AND ended_at IS NULL`)
		if err != nil {
			return err
		}
		defer func() { _ = sample.Close() }()
		for _, c := range changes {
			timings, err := json.Marshal(c.Timings)
			if err != nil {
				return err
			}
			if _, err := active.ExecContext(ctx, ms(c.LastActiveAt), string(timings), c.ID); err != nil {
				return err
			}
			if v := c.Sample; v != nil {
				if _, err := sample.ExecContext(ctx, ms(v.At), v.CPUPercent, v.CPUMS, v.MemoryBytes, v.NetRxBytes, v.NetTxBytes,
					v.Processes, v.DiskUsed, v.DiskTotal, c.ID); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// Samples returns a sandbox's samples since a time, oldest first.
func (s *Store) Samples(ctx context.Context, id sandlot.ID, since time.Time, limit int) ([]sandlot.Sample, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT at, cpu, cpu_ms, memory, net_rx, net_tx, processes, disk_used, disk_total FROM
		(SELECT * FROM samples WHERE sandbox = ? AND at >= ? ORDER BY at DESC LIMIT ?) ORDER BY at`, id, ms(since), limit)
	return collect(rows, err, func() (sandlot.Sample, error) {
		var v sandlot.Sample
		var when int64
		err := rows.Scan(&when, &v.CPUPercent, &v.CPUMS, &v.MemoryBytes, &v.NetRxBytes, &v.NetTxBytes, &v.Processes, &v.DiskUsed, &v.DiskTotal)
		v.At = at(when)
		return v, fault(err)
	})
}

// LastAlive is the time of a sandbox's last sample, or of its start when it has none.
func (s *Store) LastAlive(ctx context.Context, id sandlot.ID) (time.Time, error) {
	var v int64
	err := s.read.QueryRowContext(ctx, `SELECT max(created_at, coalesce((SELECT max(at) FROM samples WHERE sandbox = ?1), 0))
		FROM sandboxes WHERE id = ?1`, id).Scan(&v)
	return at(v), fault(err)
}

// Maintain thins old samples out to one a minute and forgets what is past its time. It works in short
// transactions, each bounded by what happened in one minute, so that no create waits long behind it.
func (s *Store) Maintain(ctx context.Context, now time.Time) error {
	ended := func(kept time.Duration) []any { // since the last time: those before are done
		return []any{s.maintained.Load() - kept.Milliseconds(), ms(now.Add(-kept))}
	}
	for _, st := range []struct {
		query string
		args  []any
	}{
		{`DELETE FROM idempotency WHERE created_at < ?`, []any{ms(now.Add(-store.IdempotencyKept))}},
		{`DELETE FROM samples WHERE at < ?1 AND sandbox IN (SELECT id FROM sandboxes WHERE ended_at IS NULL AND created_at < ?1)`, []any{ms(now.Add(-store.MaxSampleAge))}},
		{`DELETE FROM samples WHERE sandbox IN (SELECT id FROM sandboxes WHERE ended_at >= ? AND ended_at < ?)`, ended(store.SamplesAfterEnd)},
		{`DELETE FROM events WHERE sandbox IN (SELECT id FROM sandboxes WHERE ended_at >= ? AND ended_at < ?)`, ended(store.EventsAfterEnd)},
	} {
		if err := s.tx(ctx, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, st.query, st.args...)
			return err
		}); err != nil {
			return err
		}
	}
	s.maintained.Store(ms(now))
	const minute = int64(time.Minute / time.Millisecond)
	cut := ms(now.Add(-store.FineSamples)) / minute * minute
	for {
		var first sql.NullInt64
		if err := s.read.QueryRowContext(ctx, `SELECT min(at) FROM samples WHERE coarse = 0 AND at < ?`, cut).Scan(&first); err != nil || !first.Valid {
			return fault(err)
		}
		from := first.Int64 / minute * minute
		if err := s.thin(ctx, from, from+minute); err != nil {
			return err
		}
	}
}

// thin merges each sandbox's fine samples of one minute: the last stays, with the mean of the CPU and the
// greatest memory and process count.
func (s *Store) thin(ctx context.Context, from, to int64) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO samples
			SELECT f.sandbox, f.at, 1, g.cpu, f.cpu_ms, g.memory, f.net_rx, f.net_tx, g.processes, f.disk_used, f.disk_total
			FROM (SELECT sandbox, max(at) AS last, avg(cpu) AS cpu, max(memory) AS memory, max(processes) AS processes
				FROM samples WHERE coarse = 0 AND at >= ?1 AND at < ?2 GROUP BY sandbox) g
			JOIN samples f ON f.sandbox = g.sandbox AND f.at = g.last`, from, to); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM samples WHERE coarse = 0 AND at >= ? AND at < ?`, from, to)
		return err
	})
}

// Usage sums an organization's reserved time between two instants, project by project. Open intervals
// count up to the second instant.
func (s *Store) Usage(ctx context.Context, org sandlot.ID, from, to time.Time) ([]store.ProjectUsage, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT u.project, p.ref, sum(u.vcpu * d), sum(u.memory_mb * d), count(DISTINCT u.sandbox) FROM
		(SELECT *, max(0, min(coalesce(end_at, ?3), ?3) - max(start_at, ?2)) AS d FROM usage
			WHERE org = ?1 AND (end_at IS NULL OR end_at > ?2) AND start_at < ?3) u
		JOIN projects p ON p.id = u.project GROUP BY u.project ORDER BY p.ref`, org, ms(from), ms(to))
	return collect(rows, err, func() (store.ProjectUsage, error) {
		var u store.ProjectUsage
		err := rows.Scan(&u.Project, &u.Ref, &u.Total.VCPUMS, &u.Total.MBMS, &u.Total.Started)
		return u, fault(err)
	})
}

// SandboxUsage sums one sandbox's reserved time up to an instant.
func (s *Store) SandboxUsage(ctx context.Context, id sandlot.ID, to time.Time) (sandlot.UsageTotal, error) {
	u := sandlot.UsageTotal{Started: 1}
	err := s.read.QueryRowContext(ctx, `SELECT coalesce(sum(vcpu * d), 0), coalesce(sum(memory_mb * d), 0) FROM
		(SELECT *, max(0, coalesce(end_at, ?2) - start_at) AS d FROM usage WHERE sandbox = ?1)`, id, ms(to)).Scan(&u.VCPUMS, &u.MBMS)
	return u, fault(err)
}
