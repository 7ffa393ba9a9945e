-- +goose Up
-- Times are Unix milliseconds. The ledger (usage) has no references, so that it outlives what it counts.

CREATE TABLE meta (
	key   TEXT PRIMARY KEY,
	value BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE orgs (
	id         TEXT PRIMARY KEY,
	name       TEXT NOT NULL UNIQUE,
	plan       TEXT NOT NULL,
	created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE projects (
	id         TEXT PRIMARY KEY,
	org        TEXT NOT NULL REFERENCES orgs (id),
	ref        TEXT NOT NULL UNIQUE,
	created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE users (
	id         TEXT PRIMARY KEY,
	name       TEXT NOT NULL UNIQUE,
	created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE members (
	project TEXT NOT NULL REFERENCES projects (id),
	user    TEXT NOT NULL REFERENCES users (id),
	role    TEXT NOT NULL CHECK (role IN ('owner', 'admin', 'developer', 'readonly')),
	PRIMARY KEY (project, user)
) STRICT, WITHOUT ROWID;

CREATE TABLE tokens (
	id         TEXT PRIMARY KEY,
	org        TEXT NOT NULL REFERENCES orgs (id),
	project    TEXT REFERENCES projects (id), -- NULL: every project of org
	user       TEXT REFERENCES users (id),
	name       TEXT NOT NULL,
	role       TEXT NOT NULL CHECK (role IN ('owner', 'admin', 'developer', 'readonly')),
	scopes     TEXT NOT NULL, -- space separated
	hash       BLOB NOT NULL UNIQUE CHECK (length(hash) = 32), -- SHA-256; the secret is never stored
	created_at INTEGER NOT NULL,
	expires_at INTEGER,
	revoked_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE sandboxes (
	id              TEXT PRIMARY KEY,
	project         TEXT NOT NULL REFERENCES projects (id),
	created_by      TEXT NOT NULL,
	name            TEXT NOT NULL,
	template        TEXT NOT NULL,
	template_digest TEXT NOT NULL,
	isolation       TEXT NOT NULL,
	engine          TEXT NOT NULL,
	vcpu            INTEGER NOT NULL,
	memory_mb       INTEGER NOT NULL,
	disk_gb         INTEGER NOT NULL,
	state           TEXT NOT NULL,
	reason          TEXT NOT NULL DEFAULT '',
	detail          TEXT NOT NULL DEFAULT '',
	idle_timeout    INTEGER NOT NULL, -- milliseconds
	lifetime        INTEGER NOT NULL,
	env_names       TEXT NOT NULL,    -- JSON array; values may be secrets and stay in the machine
	metadata        TEXT NOT NULL,    -- JSON object
	egress          TEXT NOT NULL,    -- JSON object
	preview         TEXT NOT NULL,
	timings         TEXT NOT NULL,    -- JSON object
	created_at      INTEGER NOT NULL,
	expires_at      INTEGER NOT NULL,
	last_active_at  INTEGER NOT NULL,
	ended_at        INTEGER
) STRICT;

CREATE INDEX sandboxes_by_project ON sandboxes (project, created_at DESC, id DESC);
CREATE INDEX sandboxes_alive ON sandboxes (id) WHERE ended_at IS NULL;
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE events (
	seq     INTEGER PRIMARY KEY AUTOINCREMENT,
	sandbox TEXT NOT NULL REFERENCES sandboxes (id),
	at      INTEGER NOT NULL,
	kind    TEXT NOT NULL,
	name    TEXT NOT NULL,
	message TEXT NOT NULL,
	fields  TEXT NOT NULL -- JSON object or empty
) STRICT;

CREATE INDEX events_by_sandbox ON events (sandbox, seq);

CREATE TABLE samples (
	sandbox    TEXT NOT NULL REFERENCES sandboxes (id),
	at         INTEGER NOT NULL,
	coarse     INTEGER NOT NULL, -- 1: one per minute, made from fine ones
	cpu        REAL NOT NULL,
	cpu_ms     INTEGER NOT NULL,
	memory     INTEGER NOT NULL,
	net_rx     INTEGER NOT NULL,
	net_tx     INTEGER NOT NULL,
	processes  INTEGER NOT NULL,
	disk_used  INTEGER NOT NULL,
	disk_total INTEGER NOT NULL,
	PRIMARY KEY (sandbox, at)
) STRICT, WITHOUT ROWID;

CREATE INDEX samples_fine ON samples (at) WHERE coarse = 0;

CREATE TABLE idempotency (
	project    TEXT NOT NULL,
	key        TEXT NOT NULL,
	body_hash  BLOB NOT NULL,
	sandbox    TEXT NOT NULL REFERENCES sandboxes (id),
	created_at INTEGER NOT NULL,
	PRIMARY KEY (project, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE usage (
	seq       INTEGER PRIMARY KEY,
	sandbox   TEXT NOT NULL,
	project   TEXT NOT NULL,
	org       TEXT NOT NULL,
	vcpu      INTEGER NOT NULL,
	memory_mb INTEGER NOT NULL,
	state     TEXT NOT NULL,
	start_at  INTEGER NOT NULL,
	end_at    INTEGER CHECK (end_at >= start_at)
) STRICT;

CREATE INDEX usage_by_org ON usage (org, end_at);
CREATE INDEX usage_by_sandbox ON usage (sandbox);
CREATE UNIQUE INDEX usage_open ON usage (sandbox) WHERE end_at IS NULL;

-- +goose Down
DROP TABLE usage;
DROP TABLE idempotency;
DROP TABLE samples;
DROP TABLE events;
DROP TABLE sandboxes;
DROP TABLE tokens;
DROP TABLE members;
DROP TABLE users;
DROP TABLE projects;
DROP TABLE orgs;
DROP TABLE meta;
