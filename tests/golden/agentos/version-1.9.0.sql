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
INSERT INTO "checkpoints" VALUES(1,'old','o1',NULL,1,'2026-06-20T08:00:00.5+00:00','[]','','[{"role": "user", "content": "hallo Welt — ok"}]','{"k": [1, 2.5, null]}','{}','');
INSERT INTO "checkpoints" VALUES(2,'old','o2','o1',2,'2026-06-20T08:00:01+00:00','["x"]','zwei','[]','{}','{"tool": "ü"}','end');
CREATE INDEX idx_thread_step ON checkpoints(thread_id, step DESC);
CREATE INDEX idx_checkpoint_id ON checkpoints(checkpoint_id);
CREATE INDEX idx_parent ON checkpoints(parent_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('checkpoints',2);
COMMIT;
