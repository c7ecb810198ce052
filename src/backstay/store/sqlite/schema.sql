-- The newest schema. A new database is created from this file, which is also the first migration: later changes edit it
-- and add migrations/0002_what_it_does.sql and so on for databases that exist.
--
-- Columns without a type take text and bytes as they are. `seal` columns are checksums (see rows.py): a page has none,
-- so every row that can change has its own. A damaged page can also hide a row, and what is hidden looks as if it did not
-- exist. So everything that is looked up by name is in two trees: a table's own and an index, or two indexes.

-- One row per thread. `floor` is the highest sequence number of its deleted branches, so that no number is used again.
CREATE TABLE thread (
  id        INTEGER PRIMARY KEY AUTOINCREMENT,
  namespace TEXT NOT NULL,
  name      TEXT NOT NULL,
  floor     INTEGER NOT NULL,
  seal      INTEGER NOT NULL
);
CREATE UNIQUE INDEX thread_name ON thread (namespace, name);
CREATE INDEX thread_again ON thread (name, namespace);
CREATE INDEX thread_listed ON thread (namespace);

-- One row per branch. `last_seq` never falls, even when the head is deleted. A writer must have seen it and `id`, which
-- is never reused. Both `head` and `last_seq` are 0 in a branch that was leased but has no checkpoint yet. `epoch`
-- fences off old owners and never falls. The next four columns are the lease, NULL if it is free: `token` identifies
-- one acquisition, and `expires` is in microseconds of the boot clock, in the boot with that id. `origin` is the
-- checkpoint that the branch was forked from.
CREATE TABLE branch (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  thread     INTEGER NOT NULL REFERENCES thread (id),
  scope      TEXT NOT NULL,
  name       TEXT NOT NULL,
  head       INTEGER NOT NULL,
  last_seq   INTEGER NOT NULL,
  epoch      INTEGER NOT NULL,
  owner      TEXT,
  token      TEXT,
  expires    INTEGER,
  boot       TEXT,
  origin,
  seal       INTEGER NOT NULL,
  lease_seal INTEGER
);
CREATE UNIQUE INDEX branch_name ON branch (thread, scope, name);
CREATE INDEX branch_again ON branch (thread, name, scope);
CREATE INDEX branch_leased ON branch (thread) WHERE token IS NOT NULL;
CREATE INDEX branch_origin ON branch (origin) WHERE origin IS NOT NULL;

-- One row per checkpoint; key = branch << 32 | seq, so a branch's history is one range of the table. Ids that are UUIDs
-- are stored as 16 bytes. `parent_digest` is set when the parent is deleted. `back` is how far back in the branch the row
-- before it is: the difference of their keys, 0 if there is none. `base` is the row of the blob with the base manifest.
-- `tags` is NULL or the packed tags. The manifest comes last, so that lists need not read it.
CREATE TABLE checkpoint (
  key           INTEGER PRIMARY KEY,
  id            NOT NULL,
  parent,
  parent_digest BLOB,
  back          INTEGER NOT NULL,
  step          INTEGER NOT NULL,
  created       INTEGER NOT NULL,
  digest        BLOB NOT NULL,
  size          INTEGER NOT NULL,
  notes         BLOB NOT NULL,
  tags          BLOB,
  base          INTEGER REFERENCES blob (id),
  manifest      BLOB NOT NULL
);
CREATE UNIQUE INDEX checkpoint_id ON checkpoint (id);
CREATE INDEX checkpoint_tagged ON checkpoint (key) WHERE tags IS NOT NULL;
CREATE INDEX checkpoint_tagged_again ON checkpoint (key, tags) WHERE tags IS NOT NULL;

-- The bytes of streams: address = stream << 28 | offset. `size` is the length of the original bytes; a body that is
-- four bytes longer is these bytes and their CRC-32, any other is a zstd frame with a checksum.
CREATE TABLE chunk (
  address INTEGER PRIMARY KEY,
  size    INTEGER NOT NULL,
  body    BLOB NOT NULL
);

-- Whole values, bases and tables, by the SHA-256 of their bytes; shared by all threads.
CREATE TABLE blob (
  id     INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,
  size   INTEGER NOT NULL,
  body   BLOB NOT NULL
);

-- Which branch needs which source (a stream's number or a blob's digest); a branch may extend only the streams it owns.
-- The checkpoints of the branch that need a byte of the source follow each other, unless it is `scattered`: a later one
-- needed it again, or a repair changed one.
CREATE TABLE ref (
  branch    INTEGER NOT NULL REFERENCES branch (id),
  source    NOT NULL,
  owned     INTEGER NOT NULL,
  scattered INTEGER NOT NULL,
  PRIMARY KEY (branch, source)
) WITHOUT ROWID;
CREATE INDEX ref_source ON ref (source, scattered);

-- Results of finished tasks. Their checkpoint may be stored later. One row holds all writes of a task, packed as in
-- store/writes.py. A task that is a UUID is stored as 16 bytes. `size` is the length before compression. The bytes are
-- in `body` or, if `pieces` is not 0, in that many rows of write_piece, starting with number `body`.
CREATE TABLE write (
  thread     INTEGER NOT NULL REFERENCES thread (id),
  scope      TEXT NOT NULL,
  checkpoint NOT NULL,
  task       NOT NULL,
  size       INTEGER NOT NULL,
  pieces     INTEGER NOT NULL,
  body       NOT NULL,
  PRIMARY KEY (thread, scope, checkpoint, task)
) WITHOUT ROWID;
CREATE INDEX write_again ON write (checkpoint);
CREATE TABLE write_piece (
  number INTEGER PRIMARY KEY,
  body   BLOB NOT NULL
);

-- Runs, interrupts and effects. place = kind << 48 | number, so each kind is one range of the table; kinds are numbered
-- from 1 in the order of store/records.py. `id` is the SHA-256 of the record's name. `body` is sealed and covers all
-- columns except `id`. The columns from `namespace` to `due` are those of a run, NULL in other records: `due` is when it
-- may be claimed, in microseconds since 1970, NULL if it may not. `seal` covers the names and these columns.
CREATE TABLE record (
  place      INTEGER PRIMARY KEY,
  id         BLOB NOT NULL,
  thread     INTEGER NOT NULL REFERENCES thread (id),
  scope      TEXT NOT NULL,
  branch     TEXT NOT NULL,
  key        TEXT NOT NULL,
  version    INTEGER NOT NULL,
  checkpoint,
  open       INTEGER NOT NULL,
  namespace  TEXT,
  status     TEXT,
  graph      TEXT,
  fingerprint TEXT,
  due        INTEGER,
  seal       INTEGER NOT NULL,
  body       BLOB NOT NULL
);
CREATE UNIQUE INDEX record_id ON record (id);
CREATE INDEX record_thread ON record (thread, key);
CREATE INDEX record_again ON record (thread);
CREATE INDEX record_open ON record (place) WHERE open;
CREATE INDEX record_open_again ON record (thread) WHERE open;
CREATE INDEX record_branch ON record (thread, scope, branch) WHERE status IS NOT NULL;
CREATE INDEX record_status ON record (namespace, status) WHERE status IS NOT NULL;
CREATE INDEX record_graph ON record (namespace, graph, status) WHERE status IS NOT NULL;
CREATE INDEX record_due ON record (namespace, graph, fingerprint, due) WHERE due IS NOT NULL;

CREATE TABLE counter (
  name  TEXT PRIMARY KEY,
  value INTEGER NOT NULL,
  seal  INTEGER NOT NULL
) WITHOUT ROWID;
