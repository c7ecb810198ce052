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
INSERT INTO "checkpoints" VALUES(1,'job','ckpt-job-1-a10101',NULL,1,'2026-07-02T09:59:00+00:00','["manual"]','[user] turn 1','[{"role": "user", "content": "turn 1"}]','{"n": 1}','{"t": 1}','node1');
INSERT INTO "checkpoints" VALUES(2,'job','ckpt-job-2-a20202',NULL,2,'2026-07-02T09:59:01.120003+00:00','["tool_call"]','[user] turn 2','[{"role": "user", "content": "turn 1"}, {"role": "user", "content": "turn 2"}]','{"n": 2}','{"t": 2}','node2');
INSERT INTO "checkpoints" VALUES(3,'job','ckpt-job-3-a30303',NULL,3,'2026-07-02T09:59:02+00:00','["llm_call"]','[user] turn 3','[{"role": "user", "content": "turn 1"}, {"role": "user", "content": "turn 2"}, {"role": "user", "content": "turn 3"}]','{"n": 3}','{"t": 3}','node3');
INSERT INTO "checkpoints" VALUES(4,'job-branch-fix-a404','ckpt-job-branch-fix-a404-0','ckpt-job-3-a30303',0,'2026-07-02T09:59:03.120003+00:00','["branch", "fix"]','Branch ''fix'' from ckpt-job-3-a30303','[{"role": "user", "content": "turn 1"}, {"role": "user", "content": "turn 2"}, {"role": "user", "content": "turn 3"}]','{"n": 3}','{"t": 3}','');
INSERT INTO "checkpoints" VALUES(5,'job-branch-fix-a404','ckpt-job-branch-fix-a404-1-a50505','ckpt-job-branch-fix-a404-0',1,'2026-07-02T09:59:04+00:00','["state_change"]','State: 2 keys','[]','{"n": 3, "fixed": true}','{}','');
INSERT INTO "checkpoints" VALUES(6,'job','ckpt-job-4-a60606','ckpt-job-branch-fix-a404-1-a50505',4,'2026-07-02T09:59:05.120003+00:00','["manual"]','State: 2 keys','[]','{"n": 3, "fixed": true}','{}','');
INSERT INTO "checkpoints" VALUES(7,'decorated','ckpt-decorated-1-a70707',NULL,1,'2026-07-02T09:59:06+00:00','["tool_call"]','[tool_call] search({''query'': ''x''})','[{"role": "tool_call", "content": "search({''query'': ''x''})"}]','{"s": 1}','{}','');
INSERT INTO "checkpoints" VALUES(8,'decorated','ckpt-decorated-2-a80808',NULL,2,'2026-07-02T09:59:07.120003+00:00','["tool_call"]','[tool_result] {''hits'': [''x'']}','[{"role": "tool_result", "content": "{''hits'': [''x'']}"}]','{"s": 1}','{"result": "{''hits'': [''x'']}"}','');
INSERT INTO "checkpoints" VALUES(9,'scoped','ckpt-scoped-1-a90909',NULL,1,'2026-07-02T09:59:08+00:00','["state_change"]','[system] Enter scope (state_change)','[{"role": "system", "content": "Enter scope (state_change)"}]','{"k": 1}','{}','');
INSERT INTO "checkpoints" VALUES(10,'scoped','ckpt-scoped-2-aa0a0a',NULL,2,'2026-07-02T09:59:09.120003+00:00','["state_change"]','[system] Exit scope (state_change)','[{"role": "system", "content": "Exit scope (state_change)"}]','{"k": 1}','{}','');
INSERT INTO "checkpoints" VALUES(11,'restarted','ckpt-restarted-1-ab0b0b',NULL,1,'2026-07-02T09:59:10+00:00','["manual"]','[user] a','[{"role": "user", "content": "a"}]','{"run": 1}','{}','');
INSERT INTO "checkpoints" VALUES(12,'restarted','ckpt-restarted-2-ac0c0c',NULL,2,'2026-07-02T09:59:11.120003+00:00','["manual"]','[user] b','[{"role": "user", "content": "b"}]','{"run": 1}','{}','');
INSERT INTO "checkpoints" VALUES(13,'restarted','ckpt-restarted-1-ad0d0d',NULL,1,'2026-07-02T09:59:12+00:00','["manual"]','[user] c','[{"role": "user", "content": "c"}]','{"run": 2}','{}','');
INSERT INTO "checkpoints" VALUES(17,'rewound','ckpt-rewound-3-b11111','ckpt-rewound-2-af0f0f',3,'2026-07-02T09:59:16+00:00','["manual"]','State: 1 keys','[]','{"after": true}','{}','');
INSERT INTO "checkpoints" VALUES(18,'session-1','ckpt-session-1-000005',NULL,5,'2026-07-02T09:59:17.120003+00:00','["auto", "iter_5"]','','[{"role": "user", "content": "hi"}]','{"iteration": 5, "task": "täsk", "session_id": "session-1", "cost_usd": 0.0125, "reflections": 1, "human_interrupts": 2, "loop_state": "running"}','{}','loop');
INSERT INTO "checkpoints" VALUES(19,'session-1','ckpt-session-1-000010','ckpt-session-1-000005',10,'2026-07-02T09:59:18+00:00','["auto", "iter_10"]','','[{"role": "user", "content": "hi"}]','{"iteration": 10, "task": "täsk", "session_id": "session-1", "cost_usd": 0.0125, "reflections": 1, "human_interrupts": 2, "loop_state": "running"}','{}','loop');
CREATE INDEX idx_thread_step ON checkpoints(thread_id, step DESC);
CREATE INDEX idx_checkpoint_id ON checkpoints(checkpoint_id);
CREATE INDEX idx_parent ON checkpoints(parent_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('checkpoints',19);
COMMIT;
