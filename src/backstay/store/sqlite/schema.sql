-- The newest schema. A new database is made from this file; an older one reaches it through migrations/, and a test
-- proves that both ways give the same tables.

-- One row a thread. `next_seq` numbers all its checkpoints, in whichever scope or branch.
CREATE TABLE thread (
  id        INTEGER PRIMARY KEY AUTOINCREMENT,
  namespace TEXT NOT NULL,
  name      TEXT NOT NULL,
  next_seq  INTEGER NOT NULL,
  UNIQUE (namespace, name)
) STRICT;

-- One row a branch. `last_seq` never falls, also when the head is deleted: together with `id`, which is never given out
-- twice, it is what a writer must have seen. Both are 0 in a branch that was leased and has no checkpoint yet. `epoch`
-- fences an old owner out and never falls; the next four are the lease, NULL if nobody has it: `token` tells this time of
-- holding it from every other, `expires` is in microseconds of the boot clock of the boot with that id.
CREATE TABLE lane (
  id       INTEGER PRIMARY KEY AUTOINCREMENT,
  thread   INTEGER NOT NULL REFERENCES thread (id),
  scope    TEXT NOT NULL,
  branch   TEXT NOT NULL,
  head     INTEGER NOT NULL,
  last_seq INTEGER NOT NULL,
  epoch    INTEGER NOT NULL DEFAULT 0,
  owner    TEXT,
  token    TEXT,
  expires  INTEGER,
  boot     TEXT,
  origin   ANY,
  UNIQUE (thread, scope, branch)
) STRICT;
CREATE INDEX lane_leased ON lane (thread) WHERE token IS NOT NULL;

-- One row a checkpoint; key = lane << 32 | seq, so a branch's history is one stretch of the table. Ids that are UUIDs
-- are kept as their 16 bytes. `parent_digest` is filled in when the parent is deleted. `base` is the row of the blob with
-- the base manifest. The manifest comes last, so that lists need not read it.
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

-- The bytes of streams: address = stream << 28 | offset. `size` is the length before compression; a body of that very
-- length is not compressed.
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

-- Which lane needs which source (a stream's number or a blob's digest); a lane may extend only the streams it owns.
CREATE TABLE ref (
  lane   INTEGER NOT NULL REFERENCES lane (id),
  source ANY NOT NULL,
  owned  INTEGER NOT NULL,
  PRIMARY KEY (lane, source)
) STRICT, WITHOUT ROWID;
CREATE INDEX ref_source ON ref (source);

CREATE TABLE tag (
  checkpoint INTEGER NOT NULL REFERENCES checkpoint (key),
  name       TEXT NOT NULL,
  PRIMARY KEY (checkpoint, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX tag_name ON tag (name, checkpoint);

-- Results of finished tasks beside a checkpoint, which may come later than they do: one row for all of a task, packed as
-- store/writes.py says. A task that is a UUID is kept as its 16 bytes. `size` is the length before compression; bytes of
-- that very length are not compressed. The bytes are `body`, or if there are `pieces`, so many rows from that number on.
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

-- Sessions, interrupts and effects. place = kind << 48 | number, so each kind is one stretch of the table; kinds are
-- numbered from 1 as in store/records.py. `id` is the SHA-256 of what names the record, `body` is sealed and covers all
-- columns but `id` and the time to live, which ends when the boot clock of the boot with that id says `expires`. Every
-- index is a page of 4 KiB in the smallest file, so there are two for all lists.
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
