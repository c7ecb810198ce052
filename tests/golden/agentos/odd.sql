BEGIN TRANSACTION;
CREATE TABLE checkpoints (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    thread_id       TEXT NOT NULL,
    checkpoint_id   TEXT NOT NULL UNIQUE,
    parent_id       TEXT,
    step            INTEGER NOT NULL,
    created_at      TEXT NOT NULL,
    tags            TEXT NOT NULL DEFAULT '[]',
    summary         TEXT NOT NULL DEFAULT '',
    messages_blob   TEXT NOT NULL DEFAULT '[]',
    state_blob      TEXT NOT NULL DEFAULT '{}',
    tools_blob      TEXT NOT NULL DEFAULT '{}',
    next_node       TEXT NOT NULL DEFAULT ''
);
INSERT INTO "checkpoints" VALUES(1,'odd','good',NULL,1,'2026-01-01T12:00:00+00:00','[]','','[]','{"n": 1}','{}','');
INSERT INTO "checkpoints" VALUES(2,'odd','naive',NULL,2,'2026-01-01T12:00:00','[]','','[]','{"n": 2}','{}','');
INSERT INTO "checkpoints" VALUES(3,'odd','words',NULL,3,'yesterday','[]','','[]','{"n": 3}','{}','');
INSERT INTO "checkpoints" VALUES(4,'odd','nan',NULL,4,'2026-01-01T12:00:00+00:00','[]','','[]','{"n": NaN, "m": -Infinity}','{}','');
INSERT INTO "checkpoints" VALUES(5,'odd','negative',NULL,-1,'2026-01-01T12:00:00+00:00','[]','','[]','{"n": 5}','{}','');
INSERT INTO "checkpoints" VALUES(6,'odd','',NULL,6,'2026-01-01T12:00:00+00:00','[]','','[]','{"n": 6}','{}','');
INSERT INTO "checkpoints" VALUES(7,'odd','list',NULL,7,'2026-01-01T12:00:00+00:00','[]','','[]','[1, 2]','{}','');
INSERT INTO "checkpoints" VALUES(8,'odd','pair',NULL,8,'2026-01-01T12:00:00+00:00','[]','','[["a", 1]]','{"t": [1, 2], "5": "five"}','{}','');
INSERT INTO "checkpoints" VALUES(10,'elsewhere','moved',NULL,9,'2026-01-01T12:00:00+00:00','[]','','[]','{"n": 10}','{}','');
INSERT INTO "checkpoints" VALUES(11,'tie','tie1',NULL,5,'2026-01-01T12:00:00+00:00','[]','','[]','{"n": 1}','{}','');
INSERT INTO "checkpoints" VALUES(12,'tie','tie2',NULL,5,'2026-01-01T12:00:01+00:00','[]','','[]','{"n": 2}','{}','');
CREATE INDEX idx_thread_step ON checkpoints(thread_id, step DESC);
CREATE INDEX idx_checkpoint_id ON checkpoints(checkpoint_id);
CREATE INDEX idx_parent ON checkpoints(parent_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('checkpoints',12);
COMMIT;
