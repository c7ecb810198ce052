-- The newest schema. A new store is created from this file, which is also the first migration: later changes edit it and
-- add migrations/0002_what_it_does.sql and so on for stores that exist. {schema} is replaced by the schema's quoted name.
--
-- Locks: a writer locks the row of its branch in `branch`, then the row of its thread in `thread`, always in this order. A
-- fork from another thread locks that thread's row too. A delete locks all branches and then the rows of all threads that
-- share a stream with it, so that nothing changes while it runs. Only a plain save to a branch that is `alone` leaves the
-- thread's row out: see `branch`.
--
-- A function that answers "stored" has written or locked a row in the same transaction. Only then does the answer wait for
-- a synchronous standby, even if an earlier attempt stored the data.
--
-- Every function has a search path of its own, so it calls only what belongs to PostgreSQL and what is named with its
-- schema, even if another user of the database has planted functions elsewhere.

-- Every write first calls check_version, which reads this table and so holds its weakest lock until the end. A migration
-- first takes the table's strongest lock: it waits for writes in progress, and later writes see the new version.
CREATE TABLE {schema}.meta (
  version int NOT NULL
);

-- next_seq is the next sequence number, unless a branch is alone: then it is at most that branch's last_seq + 1.
CREATE TABLE {schema}.thread (
  id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  next_seq  bigint NOT NULL,
  alone     bigint,
  namespace text COLLATE "C" NOT NULL,
  name      text COLLATE "C" NOT NULL,
  UNIQUE (namespace, name)
) WITH (fillfactor = 50);

-- One row per branch. last_seq never falls, even when the head is deleted. The lease: epoch, owner, token, expires.
-- alone: no other branch of the thread has had a sequence number, so the next one is last_seq + 1 and a save need not change
-- the thread's row, which names the branch. Before another branch gets a number, its writer locks this row and sets alone to
-- false for good.
CREATE TABLE {schema}.branch (
  id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  thread   bigint NOT NULL,
  head     bigint NOT NULL,
  last_seq bigint NOT NULL,
  epoch    bigint NOT NULL DEFAULT 0,
  expires  timestamptz,
  alone    boolean NOT NULL,
  scope    text COLLATE "C" NOT NULL,
  name     text COLLATE "C" NOT NULL,
  owner    text,
  token    text,
  origin   bytea,
  UNIQUE (thread, scope, name)
) WITH (fillfactor = 50);
CREATE INDEX branch_origin ON {schema}.branch (origin) WHERE origin IS NOT NULL;
CREATE INDEX branch_leased ON {schema}.branch (expires, id) WHERE token IS NOT NULL;

-- key = branch << 32 | seq. Ids: a UUID's 16 bytes, or 0x01 and "namespace NUL id" as text; 0x0202 instead of 0x01 if that
-- would be 16 bytes long too. base: a blob's digest. parent_digest is empty as long as the parent is stored: most rows have no
-- NULL, which saves 8 bytes in each. If side is false, the parent was the branch's head when the row was added, so a
-- parent's children are the row after it and what the index finds.
CREATE TABLE {schema}.checkpoint (
  key           bigint PRIMARY KEY,
  created       bigint NOT NULL,
  size          bigint NOT NULL,
  step          bigint NOT NULL,
  side          boolean NOT NULL,
  id            bytea NOT NULL UNIQUE,
  parent        bytea,
  parent_digest bytea NOT NULL,
  digest        bytea NOT NULL,
  base          bytea,
  notes         bytea NOT NULL,
  manifest      bytea NOT NULL
);
CREATE INDEX checkpoint_side ON {schema}.checkpoint (parent) WHERE side;
ALTER TABLE {schema}.checkpoint ALTER notes SET STORAGE EXTERNAL, ALTER manifest SET STORAGE EXTERNAL;

-- The bytes of streams; address = stream << 28 | offset. size is the length of the original bytes; a body that is four
-- bytes longer is these bytes and their CRC-32, any other is a zstd frame with a checksum.
CREATE TABLE {schema}.chunk (
  address bigint PRIMARY KEY,
  size    int NOT NULL,
  body    bytea NOT NULL
);
ALTER TABLE {schema}.chunk ALTER body SET STORAGE EXTERNAL;

-- Small new bytes. When a stream has filled a window of 64 KiB, one compressed row in `chunk` holds it too, and the next
-- window writes over these rows: a stream has 64 of them, one for each KiB of a window. So what is superseded is
-- reused at once, inside its page, and nothing waits for a vacuum. slot = stream << 6 | (offset >> 10 & 63). The bytes of
-- several saves may be in one row: checks has for each of them its length (4 bytes) and its CRC-32.
CREATE TABLE {schema}.fresh (
  slot    bigint PRIMARY KEY,
  address bigint NOT NULL,
  body    bytea NOT NULL,
  checks  bytea NOT NULL
) WITH (toast_tuple_target = 8160);
ALTER TABLE {schema}.fresh ALTER body SET STORAGE EXTERNAL, ALTER checks SET STORAGE EXTERNAL;

CREATE TABLE {schema}.blob (
  digest bytea PRIMARY KEY,
  size   int NOT NULL,
  body   bytea NOT NULL
);
ALTER TABLE {schema}.blob ALTER body SET STORAGE EXTERNAL;

-- The streams and blobs that the checkpoints of a branch need: a stream has an empty digest, a blob the stream number 0.
CREATE TABLE {schema}.ref (
  branch bigint NOT NULL,
  stream bigint NOT NULL,
  owned  boolean NOT NULL,
  digest bytea NOT NULL,
  PRIMARY KEY (branch, stream, digest)
);
CREATE INDEX ref_source ON {schema}.ref (stream, digest);

CREATE TABLE {schema}.tag (
  checkpoint bigint NOT NULL,
  name       text COLLATE "C" NOT NULL,
  PRIMARY KEY (checkpoint, name)
);
CREATE INDEX tag_name ON {schema}.tag (name, checkpoint);

-- One row for all writes of a task, packed as store/writes.py says. task: a UUID's 16 bytes, or 0x01 and its
-- text, as in ids. size is the length before compression; a body of exactly that length is not compressed.
CREATE TABLE {schema}.write (
  thread     bigint NOT NULL,
  size       int NOT NULL,
  scope      text COLLATE "C" NOT NULL,
  checkpoint bytea NOT NULL,
  task       bytea NOT NULL,
  body       bytea NOT NULL,
  PRIMARY KEY (thread, scope, checkpoint, task)
);
ALTER TABLE {schema}.write ALTER body SET STORAGE EXTERNAL;

-- Runs, interrupts and effects. id is the SHA-256 of the record's name (see store/records.py), so that names of any
-- length fit into an index. A record belongs to its branch by name, and the branch need not exist. A write adds one to
-- the version. The columns from namespace to due are those of a run, NULL in other records: due is when it may be
-- claimed, in microseconds since 1970, NULL if it may not.
CREATE TABLE {schema}.record (
  number     bigint GENERATED ALWAYS AS IDENTITY,
  thread     bigint NOT NULL,
  version    bigint NOT NULL,
  due        bigint,
  open       boolean NOT NULL,
  kind       text COLLATE "C" NOT NULL,
  scope      text COLLATE "C" NOT NULL,
  branch     text COLLATE "C" NOT NULL,
  key        text COLLATE "C" NOT NULL,
  id         bytea NOT NULL UNIQUE,
  checkpoint bytea,
  body       bytea NOT NULL,
  namespace  text COLLATE "C",
  status     text COLLATE "C",
  graph      text COLLATE "C",
  fingerprint text COLLATE "C",
  PRIMARY KEY (kind, number)
);
CREATE INDEX record_thread ON {schema}.record (thread, kind, number);
CREATE INDEX record_open ON {schema}.record (kind, number) WHERE open;
CREATE INDEX record_checkpoint ON {schema}.record (checkpoint) WHERE checkpoint IS NOT NULL;
CREATE INDEX record_branch ON {schema}.record (thread, scope, branch, number) WHERE status IS NOT NULL;
CREATE INDEX record_status ON {schema}.record (namespace, status, number) WHERE status IS NOT NULL;
CREATE INDEX record_graph ON {schema}.record (namespace, graph, status, number) WHERE status IS NOT NULL;
CREATE INDEX record_due ON {schema}.record (namespace, graph, fingerprint, due, number) WHERE due IS NOT NULL;

-- One row: the next stream number.
CREATE TABLE {schema}.counter (
  value bigint NOT NULL
);
INSERT INTO {schema}.counter VALUES (1);

-- Raises ZB006 unless the schema has the version that the writer was made for.
CREATE FUNCTION {schema}.check_version(p_version int) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_version int;
BEGIN
  SELECT m.version INTO v_version FROM {schema}.meta m;
  IF v_version IS DISTINCT FROM p_version THEN
    RAISE EXCEPTION 'version % now, % when opened', v_version, p_version USING ERRCODE = 'ZB006';
  END IF;
  RETURN true;
END $$;

-- Stores blobs, or locks the ones that exist, until the transaction ends.
CREATE FUNCTION {schema}.put_blobs(p_digests bytea[], p_sizes int[], p_bodies bytea[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  FOR i IN 1 .. cardinality(p_digests) LOOP
    LOOP
      INSERT INTO {schema}.blob (digest, size, body) VALUES (p_digests[i], p_sizes[i], p_bodies[i])
        ON CONFLICT DO NOTHING;
      EXIT WHEN FOUND;
      -- It was there. Hold on to it, or make it anew if it is being deleted at this moment.
      PERFORM 1 FROM {schema}.blob b WHERE b.digest = p_digests[i] FOR KEY SHARE;
      EXIT WHEN FOUND;
    END LOOP;
  END LOOP;
END $$;

-- Puts small new bytes, given with their CRC-32, into their slot. Bytes of the same window are extended. Bytes of an older window are replaced, but
-- only if `chunk` has them too. Otherwise nothing changes, and the function returns false.
CREATE FUNCTION {schema}.put_fresh(p_address bigint, p_body bytea) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO {schema}.fresh AS f VALUES ((p_address >> 28 << 6) | ((p_address >> 10) & 63), p_address,
      substr(p_body, 1, length(p_body) - 4), int4send(length(p_body) - 4) || substr(p_body, length(p_body) - 3))
    ON CONFLICT (slot) DO UPDATE SET
      address = CASE WHEN f.address >> 16 = p_address >> 16 THEN f.address ELSE p_address END,
      body = CASE WHEN f.address >> 16 = p_address >> 16 THEN f.body || excluded.body ELSE excluded.body END,
      checks = CASE WHEN f.address >> 16 = p_address >> 16 THEN f.checks || excluded.checks ELSE excluded.checks END
    WHERE CASE WHEN f.address >> 16 = p_address >> 16 THEN f.address + length(f.body) = p_address
      ELSE f.address + length(f.body) <= (
        SELECT k.address + k.size FROM {schema}.chunk k
        WHERE k.address < f.address + length(f.body) ORDER BY k.address DESC LIMIT 1)
      END;
  RETURN FOUND;
END $$;

-- Undoes the statement that calls it, a plain save (see queries.py): something is not as its writer expects.
CREATE FUNCTION {schema}.refuse_append() RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION 'not as the writer thinks' USING ERRCODE = 'ZB001';
END $$;

-- Any save. Every query inside sees what was committed before it began, so the checks after a lock see the truth.
-- outcome: 0 stored, 1 was stored before, 2 the id is taken, 3 the branch moved, 4 fenced. Raises ZB005 if what it
-- requires is gone.
CREATE FUNCTION {schema}.commit_checkpoint(
  p_version int, p_namespace text, p_thread text, p_scope text, p_branch text,
  p_number bigint, p_last_seq bigint, p_head_seq bigint, p_epoch bigint, p_token text, p_ttl bigint,
  p_id bytea, p_parent bytea, p_step bigint, p_created bigint, p_digest bytea, p_size bigint,
  p_notes bytea, p_base bytea, p_manifest bytea,
  p_small bigint[], p_small_bodies bytea[], p_addresses bigint[], p_sizes int[], p_bodies bytea[],
  p_blobs bytea[], p_blob_sizes int[], p_blob_bodies bytea[],
  p_streams bigint[], p_owned boolean[], p_digests bytea[],
  p_tags text[], p_requires bytea, p_origin bytea, p_parent_digest bytea, p_replaces boolean,
  OUT outcome int, OUT branch bigint, OUT seq bigint, OUT epoch bigint, OUT owner text, OUT left_us bigint
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_thread   bigint;
  v_head     bigint;
  v_last     bigint;
  v_token    text;
  v_expires  timestamptz;
  v_key      bigint;
  v_digest   bytea;
  v_source   bigint;
  v_alone    boolean;
  v_sole     bigint;
  v_other    bigint;
BEGIN
  PERFORM {schema}.check_version(p_version);
  SELECT br.id, br.head, br.last_seq, br.epoch, br.owner, br.token, br.expires, br.alone
    INTO branch, v_head, v_last, epoch, owner, v_token, v_expires, v_alone
    FROM {schema}.thread t JOIN {schema}.branch br ON br.thread = t.id
    WHERE t.namespace = p_namespace AND t.name = p_thread AND br.scope = p_scope AND br.name = p_branch
    FOR NO KEY UPDATE OF br;
  IF NOT FOUND THEN
    branch := 0; epoch := 0; v_head := 0; v_last := 0; v_alone := false;
  END IF;
  left_us := 0; seq := 0;

  SELECT c.key, c.digest INTO v_key, v_digest FROM {schema}.checkpoint c WHERE c.id = p_id;
  IF FOUND AND NOT (p_replaces AND v_key = (branch << 32 | v_head)) THEN
    outcome := CASE WHEN v_digest = p_digest AND v_key >> 32 = branch THEN 1 ELSE 2 END;
    seq := v_key & 4294967295;
    RETURN;
  END IF;
  IF epoch <> p_epoch OR (p_token IS NULL AND v_expires > clock_timestamp())
     OR (p_token IS NOT NULL AND p_token IS DISTINCT FROM v_token) THEN
    outcome := 4;
    left_us := coalesce(extract(epoch FROM v_expires - clock_timestamp()) * 1000000, 0);
    RETURN;
  END IF;
  IF branch <> p_number OR v_last <> p_last_seq OR v_head <> p_head_seq THEN
    outcome := 3;
    RETURN;
  END IF;

  IF NOT v_alone THEN
    UPDATE {schema}.branch br SET alone = false FROM {schema}.thread t
      WHERE t.namespace = p_namespace AND t.name = p_thread AND br.id = t.alone AND br.alone
      RETURNING br.last_seq INTO v_other;
  END IF;
  SELECT m.thread_id, m.next_seq, m.alone INTO v_thread, seq, v_sole FROM {schema}.make_thread(p_namespace, p_thread) m;
  seq := greatest(seq, v_last + 1, v_other + 1);
  IF NOT v_alone AND v_sole IS NOT NULL THEN
    PERFORM 1 FROM {schema}.branch br WHERE br.id = v_sole AND br.alone;
    IF FOUND THEN
      RAISE EXCEPTION 'another writer made the first branch' USING ERRCODE = '40001';
    END IF;
    v_sole := NULL;
  END IF;
  IF p_requires IS NOT NULL THEN
    SELECT br.thread INTO v_source
      FROM {schema}.checkpoint c JOIN {schema}.branch br ON br.id = c.key >> 32 WHERE c.id = p_requires;
    IF v_source <> v_thread THEN  -- its thread's row keeps deletes away until this is committed
      PERFORM 1 FROM {schema}.thread t WHERE t.id = v_source FOR KEY SHARE;
    END IF;
    PERFORM 1 FROM {schema}.checkpoint c
      WHERE c.id = p_requires
        AND (p_requires IS DISTINCT FROM p_parent OR p_parent_digest IS NULL OR c.digest = p_parent_digest);
    IF NOT FOUND THEN
      RAISE EXCEPTION 'the checkpoint it builds on is gone' USING ERRCODE = 'ZB005';
    END IF;
  END IF;
  IF branch = 0 THEN
    INSERT INTO {schema}.branch AS br (thread, scope, name, head, last_seq, origin, alone)
      VALUES (v_thread, p_scope, p_branch, 0, 0, p_origin, seq = 1) ON CONFLICT DO NOTHING RETURNING br.id INTO branch;
    IF branch IS NULL THEN
      RAISE EXCEPTION 'another writer made the branch' USING ERRCODE = '40001';
    END IF;
    IF seq = 1 THEN
      v_sole := branch;
    END IF;
  END IF;

  IF cardinality(p_blobs) > 0 THEN
    PERFORM {schema}.put_blobs(p_blobs, p_blob_sizes, p_blob_bodies);
  END IF;
  INSERT INTO {schema}.chunk SELECT * FROM unnest(p_addresses, p_sizes, p_bodies);
  FOR i IN 1 .. cardinality(p_small) LOOP
    IF NOT {schema}.put_fresh(p_small[i], p_small_bodies[i]) THEN
      INSERT INTO {schema}.chunk VALUES (p_small[i], length(p_small_bodies[i]) - 4, p_small_bodies[i]);
    END IF;
  END LOOP;
  INSERT INTO {schema}.ref SELECT commit_checkpoint.branch, u.* FROM unnest(p_streams, p_owned, p_digests) u
    ON CONFLICT DO NOTHING;
  IF p_replaces THEN  -- free the id; the caller deletes the row in the same transaction
    UPDATE {schema}.checkpoint c SET id = '\x02'::bytea || int8send(c.key) WHERE c.key = v_key;
  END IF;
  INSERT INTO {schema}.checkpoint
    (key, side, id, parent, parent_digest, step, created, digest, size, notes, base, manifest)
    VALUES (branch << 32 | seq,
      p_parent IS DISTINCT FROM (SELECT c.id FROM {schema}.checkpoint c WHERE c.key = branch << 32 | v_head),
      p_id, p_parent,
      CASE WHEN p_parent_digest IS NOT NULL AND NOT p_replaces AND NOT EXISTS (
        SELECT 1 FROM {schema}.checkpoint c WHERE c.id = p_parent AND c.digest = p_parent_digest)
        THEN p_parent_digest ELSE '' END,  -- of a parent that is not there
      p_step, p_created, p_digest, p_size, p_notes, p_base, p_manifest);
  INSERT INTO {schema}.tag SELECT commit_checkpoint.branch << 32 | commit_checkpoint.seq, n FROM unnest(p_tags) n;
  IF NOT v_alone THEN
    UPDATE {schema}.thread t SET next_seq = commit_checkpoint.seq + 1, alone = v_sole WHERE t.id = v_thread;
  END IF;
  UPDATE {schema}.branch br SET head = commit_checkpoint.seq, last_seq = commit_checkpoint.seq,
      origin = CASE WHEN v_last = 0 THEN p_origin ELSE br.origin END,
      expires = CASE WHEN p_token IS NULL THEN br.expires ELSE clock_timestamp() + p_ttl * interval '1 microsecond' END
    WHERE br.id = commit_checkpoint.branch;
  outcome := 0;
END $$;

-- The thread's row, locked; made if it was not there.
CREATE FUNCTION {schema}.make_thread(
  p_namespace text, p_name text, OUT thread_id bigint, OUT next_seq bigint, OUT alone bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  LOOP
    SELECT t.id, t.next_seq, t.alone INTO thread_id, next_seq, alone
      FROM {schema}.thread t WHERE t.namespace = p_namespace AND t.name = p_name FOR NO KEY UPDATE;
    EXIT WHEN FOUND;
    INSERT INTO {schema}.thread AS t (namespace, name, next_seq) VALUES (p_namespace, p_name, 1)
      ON CONFLICT DO NOTHING RETURNING t.id, t.next_seq INTO thread_id, next_seq;
    EXIT WHEN FOUND;
  END LOOP;
END $$;

-- Puts the writes of tasks if each row is still what the writer thinks: p_was has the SHA-256 of its body, NULL where there
-- is none. Otherwise nothing is stored, and the answer is the rows that differ, as they are. The thread's row, locked,
-- keeps all others away meanwhile.
CREATE FUNCTION {schema}.put_writes(
  p_version int, p_namespace text, p_thread text, p_scope text, p_checkpoint bytea,
  p_tasks bytea[], p_sizes int[], p_bodies bytea[], p_was bytea[] DEFAULT NULL
) RETURNS TABLE (other_task bytea, other_size int, other_body bytea)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_thread bigint;
BEGIN
  PERFORM {schema}.check_version(p_version);
  SELECT m.thread_id INTO v_thread FROM {schema}.make_thread(p_namespace, p_thread) m;
  RETURN QUERY SELECT n.task, w.size, w.body
    FROM unnest(p_tasks, p_was) n (task, was) LEFT JOIN {schema}.write w
      ON w.thread = v_thread AND w.scope = p_scope AND w.checkpoint = p_checkpoint AND w.task = n.task
    WHERE sha256(w.body) IS DISTINCT FROM n.was;
  IF NOT FOUND THEN
    INSERT INTO {schema}.write (thread, scope, checkpoint, task, size, body)
      SELECT v_thread, p_scope, p_checkpoint, n.* FROM unnest(p_tasks, p_sizes, p_bodies) n
      ON CONFLICT (thread, scope, checkpoint, task) DO UPDATE SET size = excluded.size, body = excluded.body;
  END IF;
END $$;

-- Takes a branch's lease; see the contract's acquire. outcome: 0 taken, 1 held by another.
CREATE FUNCTION {schema}.acquire_lease(
  p_version int, p_namespace text, p_thread text, p_scope text, p_branch text, p_owner text, p_token text, p_ttl bigint,
  p_over bigint, OUT outcome int, OUT branch bigint, OUT epoch bigint, OUT owner text, OUT left_us bigint
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_thread  bigint;
  v_token   text;
  v_expires timestamptz;
  v_alone   boolean;
BEGIN
  PERFORM {schema}.check_version(p_version);
  outcome := 0; left_us := 0;
  LOOP
    SELECT br.id, br.epoch, br.owner, br.token, br.expires INTO branch, epoch, owner, v_token, v_expires
      FROM {schema}.thread t JOIN {schema}.branch br ON br.thread = t.id
      WHERE t.namespace = p_namespace AND t.name = p_thread AND br.scope = p_scope AND br.name = p_branch
      FOR NO KEY UPDATE OF br;
    EXIT WHEN FOUND;
    SELECT m.thread_id, m.next_seq = 1 AND m.alone IS NULL INTO v_thread, v_alone
      FROM {schema}.make_thread(p_namespace, p_thread) m;
    INSERT INTO {schema}.branch AS br (thread, scope, name, head, last_seq, alone)
      VALUES (v_thread, p_scope, p_branch, 0, 0, v_alone)
      ON CONFLICT DO NOTHING RETURNING br.id, br.epoch INTO branch, epoch;
    IF FOUND AND v_alone THEN
      UPDATE {schema}.thread t SET alone = acquire_lease.branch WHERE t.id = v_thread;
    END IF;
    EXIT WHEN epoch IS NOT NULL;
  END LOOP;
  IF v_token IS NOT NULL AND v_token <> p_token AND v_expires > clock_timestamp() AND epoch <> p_over THEN
    outcome := 1;
    left_us := extract(epoch FROM v_expires - clock_timestamp()) * 1000000;
    RETURN;
  END IF;
  IF v_token IS DISTINCT FROM p_token THEN
    epoch := epoch + 1;
  END IF;
  UPDATE {schema}.branch br SET epoch = acquire_lease.epoch, owner = p_owner, token = p_token,
      expires = clock_timestamp() + p_ttl * interval '1 microsecond'
    WHERE br.id = acquire_lease.branch;
END $$;

-- Stores a record if its version and number are those that are stored; see the contract's put_record. The answer is the
-- record as it is then. outcome: 0 this is it, 1 fenced, 2 it is gone. Raises ZB005 if its checkpoint is gone. A new record
-- holds the branch's row, if there is a fence and a branch, and then the thread's: so no lease is taken and nothing deleted in
-- between, and the numbers of a thread appear in order.
CREATE FUNCTION {schema}.put_record(
  p_version int, p_namespace text, p_thread text, p_scope text, p_branch text,
  p_is_fenced boolean, p_epoch bigint, p_token text,
  p_kind text, p_id bytea, p_key text, p_checkpoint bytea, p_body bytea, p_open boolean,
  p_seen bigint, p_number bigint, p_status text, p_graph text, p_fingerprint text, p_due bigint,
  OUT outcome int, OUT epoch bigint, OUT holder text, OUT held_us bigint,
  OUT thread text, OUT scope text, OUT branch text, OUT key text, OUT checkpoint bytea, OUT body bytea, OUT open boolean,
  OUT version bigint, OUT number bigint, OUT status text, OUT graph text, OUT fingerprint text, OUT due bigint
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_branch    bigint;
  v_thread  bigint;
  v_token   text;
  v_held    timestamptz;
  v_exists  boolean;
BEGIN
  PERFORM {schema}.check_version(p_version);
  outcome := 0;
  IF p_is_fenced THEN
    SELECT br.id, br.epoch, br.owner, br.token, br.expires INTO v_branch, epoch, holder, v_token, v_held
      FROM {schema}.thread t JOIN {schema}.branch br ON br.thread = t.id
      WHERE t.namespace = p_namespace AND t.name = p_thread AND br.scope = p_scope AND br.name = p_branch
      FOR NO KEY UPDATE OF br;
    epoch := coalesce(epoch, 0);
  END IF;

  SELECT t.name, r.scope, r.branch, r.key, r.checkpoint, r.body, r.open, r.version, r.number, r.status, r.graph,
      r.fingerprint, r.due
    INTO thread, scope, branch, key, checkpoint, body, open, version, number, status, graph, fingerprint, due
    FROM {schema}.record r JOIN {schema}.thread t ON t.id = r.thread WHERE r.id = p_id;
  v_exists := FOUND;
  IF p_is_fenced AND NOT (v_exists AND version = p_seen + 1 AND body = p_body)
     AND (epoch <> p_epoch OR (p_token IS NULL AND v_held > clock_timestamp())
          OR (p_token IS NOT NULL AND p_token IS DISTINCT FROM v_token)) THEN
    outcome := 1;
    held_us := coalesce(extract(epoch FROM v_held - clock_timestamp()) * 1000000, 0);
    RETURN;
  END IF;
  IF v_exists AND (version <> p_seen OR number <> p_number) THEN
    PERFORM 1 FROM {schema}.record r WHERE r.id = p_id FOR NO KEY UPDATE;
    RETURN;
  END IF;
  IF NOT v_exists AND p_seen <> 0 THEN
    outcome := 2;
    RETURN;
  END IF;

  IF v_exists THEN
    UPDATE {schema}.record r SET version = p_seen + 1, body = p_body, open = p_open, status = p_status,
        graph = p_graph, fingerprint = p_fingerprint, due = p_due
      WHERE r.id = p_id AND r.version = p_seen AND r.number = p_number;
    IF NOT FOUND THEN
      RAISE EXCEPTION 'another writer changed the record' USING ERRCODE = '40001';
    END IF;
  ELSE
    SELECT m.thread_id INTO v_thread FROM {schema}.make_thread(p_namespace, p_thread) m;
    IF p_is_fenced AND v_branch IS NULL THEN
      PERFORM 1 FROM {schema}.branch br WHERE br.thread = v_thread AND br.scope = p_scope AND br.name = p_branch;
      IF FOUND THEN
        RAISE EXCEPTION 'another writer made the branch' USING ERRCODE = '40001';
      END IF;
    END IF;
    IF p_checkpoint IS NOT NULL THEN
      PERFORM 1 FROM {schema}.checkpoint c JOIN {schema}.branch br ON br.id = c.key >> 32
        WHERE c.id = p_checkpoint AND br.thread = v_thread AND br.scope = p_scope;
      IF NOT FOUND THEN
        RAISE EXCEPTION 'the checkpoint it belongs to is gone' USING ERRCODE = 'ZB005';
      END IF;
    END IF;
    -- Whoever finds the name taken now begins again, and finds the record.
    INSERT INTO {schema}.record AS r (thread, version, open, kind, scope, branch, key, id, checkpoint, body,
        namespace, status, graph, fingerprint, due)
      VALUES (v_thread, 1, p_open, p_kind, p_scope, p_branch, p_key, p_id, p_checkpoint, p_body,
        CASE WHEN p_status IS NOT NULL THEN p_namespace END, p_status, p_graph, p_fingerprint, p_due)
      RETURNING r.number INTO number;
    thread := p_thread; scope := p_scope; branch := p_branch; key := p_key; checkpoint := p_checkpoint;
  END IF;
  version := p_seen + 1; body := p_body; open := p_open;
  status := p_status; graph := p_graph; fingerprint := p_fingerprint; due := p_due;
END $$;
