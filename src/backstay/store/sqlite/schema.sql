-- The newest schema. A new database is created from this file, which is also the first migration: later changes edit it
-- and add migrations/0002_what_it_does.sql and so on for databases that exist.

-- One row per thread. `next_seq` numbers its checkpoints in all scopes and branches.
CREATE TABLE thread (
  id        INTEGER PRIMARY KEY AUTOINCREMENT,
  namespace TEXT NOT NULL,
  name      TEXT NOT NULL,
  next_seq  INTEGER NOT NULL,
  UNIQUE (namespace, name)
) STRICT;

-- One row per branch. `last_seq` never falls, even when the head is deleted. A writer must have seen it and `id`, which
-- is never reused. Both `head` and `last_seq` are 0 in a branch that was leased but has no checkpoint yet. `epoch`
-- fences off old owners and never falls. The next four columns are the lease, NULL if it is free: `token` identifies
-- one acquisition, and `expires` is in microseconds of the boot clock, in the boot with that id.
CREATE TABLE branch (
  id       INTEGER PRIMARY KEY AUTOINCREMENT,
  thread   INTEGER NOT NULL REFERENCES thread (id),
  scope    TEXT NOT NULL,
  name     TEXT NOT NULL,
  head     INTEGER NOT NULL,
  last_seq INTEGER NOT NULL,
  epoch    INTEGER NOT NULL DEFAULT 0,
  owner    TEXT,
  token    TEXT,
  expires  INTEGER,
  boot     TEXT,
  origin   ANY,
  UNIQUE (thread, scope, name)
) STRICT;
CREATE INDEX branch_leased ON branch (thread) WHERE token IS NOT NULL;

-- One row per checkpoint; key = branch << 32 | seq, so a branch's history is one range of the table. Ids that are UUIDs
-- are stored as 16 bytes. `parent_digest` is set when the parent is deleted. `base` is the row of the blob with the
-- base manifest. The manifest comes last, so that lists need not read it.
CREATE TABLE checkpoint (
  key           INTEGER PRIMARY KEY,
  id            ANY NOT NULL,
  parent        ANY,
  parent_digest BLOB,
  step          INTEGER NOT NULL,
  created       INTEGER NOT NULL,
  digest        BLOB NOT NULL,
  size          INTEGER NOT NULL,
  notes         BLOB NOT NULL,
  base          INTEGER REFERENCES blob (id),
  manifest      BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX checkpoint_id ON checkpoint (id);

-- The bytes of streams: address = stream << 28 | offset. `size` is the length before compression; a body of exactly
-- that length is not compressed.
CREATE TABLE chunk (
  address INTEGER PRIMARY KEY,
  size    INTEGER NOT NULL,
  body    BLOB NOT NULL
) STRICT;

-- Whole values, bases and tables, by the SHA-256 of their bytes; shared by all threads.
CREATE TABLE blob (
  id     INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,
  size   INTEGER NOT NULL,
  body   BLOB NOT NULL
) STRICT;

-- Which branch needs which source (a stream's number or a blob's digest); a branch may extend only the streams it owns.
CREATE TABLE ref (
  branch   INTEGER NOT NULL REFERENCES branch (id),
  source ANY NOT NULL,
  owned  INTEGER NOT NULL,
  PRIMARY KEY (branch, source)
) STRICT, WITHOUT ROWID;
CREATE INDEX ref_source ON ref (source);

CREATE TABLE tag (
  checkpoint INTEGER NOT NULL REFERENCES checkpoint (key),
  name       TEXT NOT NULL,
  PRIMARY KEY (checkpoint, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX tag_name ON tag (name, checkpoint);

-- Results of finished tasks. Their checkpoint may be stored later. One row holds all writes of a task, packed as in
-- store/writes.py. A task that is a UUID is stored as 16 bytes. `size` is the length before compression; bytes of
-- exactly that length are not compressed. The bytes are in `body` or, if `pieces` is not 0, in that many rows of
-- write_piece, starting with number `body`.
CREATE TABLE write (
  thread     INTEGER NOT NULL REFERENCES thread (id),
  scope      TEXT NOT NULL,
  checkpoint ANY NOT NULL,
  task       ANY NOT NULL,
  size       INTEGER NOT NULL,
  pieces     INTEGER NOT NULL,
  body       ANY NOT NULL,
  PRIMARY KEY (thread, scope, checkpoint, task)
) STRICT, WITHOUT ROWID;
CREATE TABLE write_piece (
  number INTEGER PRIMARY KEY,
  body   BLOB NOT NULL
) STRICT;

-- Sessions, interrupts and effects. place = kind << 48 | number, so each kind is one range of the table; kinds are
-- numbered from 1 in the order of store/records.py. `id` is the SHA-256 of the record's name. `body` is sealed and
-- covers all columns except `id` and the time to live, which ends when the boot clock, in the boot with that id,
-- reaches `expires`. Every index takes a page of 4 KiB even in the smallest file, so there are only two for all lists.
CREATE TABLE record (
  place      INTEGER PRIMARY KEY,
  id         BLOB NOT NULL UNIQUE,
  thread     INTEGER NOT NULL REFERENCES thread (id),
  scope      TEXT NOT NULL,
  branch     TEXT NOT NULL,
  key        TEXT NOT NULL,
  version    INTEGER NOT NULL,
  checkpoint ANY,
  open       INTEGER NOT NULL,
  expires    INTEGER,
  boot       TEXT,
  body       BLOB NOT NULL
) STRICT;
CREATE INDEX record_thread ON record (thread);
CREATE INDEX record_open ON record (thread) WHERE open;

CREATE TABLE counter (
  name  TEXT PRIMARY KEY,
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO counter VALUES ('stream', 1), ('record', 0);
