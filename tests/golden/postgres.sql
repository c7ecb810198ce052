--
-- PostgreSQL database dump
--


-- Dumped from database version 18.4
-- Dumped by pg_dump version 18.4

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

--
-- Name: golden; Type: SCHEMA; Schema: -; Owner: -
--

CREATE SCHEMA golden;


--
-- Name: acquire_lease(integer, text, text, text, text, text, text, bigint, bigint); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.acquire_lease(p_version integer, p_namespace text, p_thread text, p_scope text, p_branch text, p_owner text, p_token text, p_ttl bigint, p_over bigint, OUT outcome integer, OUT branch bigint, OUT epoch bigint, OUT owner text, OUT left_us bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
  v_thread  bigint;
  v_token   text;
  v_expires timestamptz;
  v_alone   boolean;
BEGIN
  PERFORM "golden".check_version(p_version);
  outcome := 0; left_us := 0;
  LOOP
    SELECT br.id, br.epoch, br.owner, br.token, br.expires INTO branch, epoch, owner, v_token, v_expires
      FROM "golden".thread t JOIN "golden".branch br ON br.thread = t.id
      WHERE t.namespace = p_namespace AND t.name = p_thread AND br.scope = p_scope AND br.name = p_branch
      FOR NO KEY UPDATE OF br;
    EXIT WHEN FOUND;
    SELECT m.thread_id, m.next_seq = 1 AND m.alone IS NULL INTO v_thread, v_alone
      FROM "golden".make_thread(p_namespace, p_thread) m;
    INSERT INTO "golden".branch AS br (thread, scope, name, head, last_seq, alone)
      VALUES (v_thread, p_scope, p_branch, 0, 0, v_alone)
      ON CONFLICT DO NOTHING RETURNING br.id, br.epoch INTO branch, epoch;
    IF FOUND AND v_alone THEN
      UPDATE "golden".thread t SET alone = acquire_lease.branch WHERE t.id = v_thread;
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
  UPDATE "golden".branch br SET epoch = acquire_lease.epoch, owner = p_owner, token = p_token,
      expires = clock_timestamp() + p_ttl * interval '1 microsecond'
    WHERE br.id = acquire_lease.branch;
END $$;


--
-- Name: check_version(integer); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.check_version(p_version integer) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
  v_version int;
BEGIN
  SELECT m.version INTO v_version FROM "golden".meta m;
  IF v_version IS DISTINCT FROM p_version THEN
    RAISE EXCEPTION 'version % now, % when opened', v_version, p_version USING ERRCODE = 'ZB006';
  END IF;
  RETURN true;
END $$;


--
-- Name: commit_checkpoint(integer, text, text, text, text, bigint, bigint, bigint, bigint, text, bigint, bytea, bytea, bigint, bigint, bytea, bigint, bytea, bytea, bytea, bigint[], bytea[], bigint[], integer[], bytea[], bytea[], integer[], bytea[], bigint[], boolean[], bytea[], text[], bytea, bytea, bytea, boolean); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.commit_checkpoint(p_version integer, p_namespace text, p_thread text, p_scope text, p_branch text, p_number bigint, p_last_seq bigint, p_head_seq bigint, p_epoch bigint, p_token text, p_ttl bigint, p_id bytea, p_parent bytea, p_step bigint, p_created bigint, p_digest bytea, p_size bigint, p_notes bytea, p_base bytea, p_manifest bytea, p_small bigint[], p_small_bodies bytea[], p_addresses bigint[], p_sizes integer[], p_bodies bytea[], p_blobs bytea[], p_blob_sizes integer[], p_blob_bodies bytea[], p_streams bigint[], p_owned boolean[], p_digests bytea[], p_tags text[], p_requires bytea, p_origin bytea, p_parent_digest bytea, p_replaces boolean, OUT outcome integer, OUT branch bigint, OUT seq bigint, OUT epoch bigint, OUT owner text, OUT left_us bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
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
  PERFORM "golden".check_version(p_version);
  SELECT br.id, br.head, br.last_seq, br.epoch, br.owner, br.token, br.expires, br.alone
    INTO branch, v_head, v_last, epoch, owner, v_token, v_expires, v_alone
    FROM "golden".thread t JOIN "golden".branch br ON br.thread = t.id
    WHERE t.namespace = p_namespace AND t.name = p_thread AND br.scope = p_scope AND br.name = p_branch
    FOR NO KEY UPDATE OF br;
  IF NOT FOUND THEN
    branch := 0; epoch := 0; v_head := 0; v_last := 0; v_alone := false;
  END IF;
  left_us := 0; seq := 0;

  SELECT c.key, c.digest INTO v_key, v_digest FROM "golden".checkpoint c WHERE c.id = p_id;
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
    UPDATE "golden".branch br SET alone = false FROM "golden".thread t
      WHERE t.namespace = p_namespace AND t.name = p_thread AND br.id = t.alone AND br.alone
      RETURNING br.last_seq INTO v_other;
  END IF;
  SELECT m.thread_id, m.next_seq, m.alone INTO v_thread, seq, v_sole FROM "golden".make_thread(p_namespace, p_thread) m;
  seq := greatest(seq, v_last + 1, v_other + 1);
  IF NOT v_alone AND v_sole IS NOT NULL THEN
    PERFORM 1 FROM "golden".branch br WHERE br.id = v_sole AND br.alone;
    IF FOUND THEN
      RAISE EXCEPTION 'another writer made the first branch' USING ERRCODE = '40001';
    END IF;
    v_sole := NULL;
  END IF;
  IF p_requires IS NOT NULL THEN
    SELECT br.thread INTO v_source
      FROM "golden".checkpoint c JOIN "golden".branch br ON br.id = c.key >> 32 WHERE c.id = p_requires;
    IF v_source <> v_thread THEN  -- its thread's row keeps deletes away until this is committed
      PERFORM 1 FROM "golden".thread t WHERE t.id = v_source FOR KEY SHARE;
    END IF;
    PERFORM 1 FROM "golden".checkpoint c
      WHERE c.id = p_requires
        AND (p_requires IS DISTINCT FROM p_parent OR p_parent_digest IS NULL OR c.digest = p_parent_digest);
    IF NOT FOUND THEN
      RAISE EXCEPTION 'the checkpoint it builds on is gone' USING ERRCODE = 'ZB005';
    END IF;
  END IF;
  IF branch = 0 THEN
    INSERT INTO "golden".branch AS br (thread, scope, name, head, last_seq, origin, alone)
      VALUES (v_thread, p_scope, p_branch, 0, 0, p_origin, seq = 1) ON CONFLICT DO NOTHING RETURNING br.id INTO branch;
    IF branch IS NULL THEN
      RAISE EXCEPTION 'another writer made the branch' USING ERRCODE = '40001';
    END IF;
    IF seq = 1 THEN
      v_sole := branch;
    END IF;
  END IF;

  IF cardinality(p_blobs) > 0 THEN
    PERFORM "golden".put_blobs(p_blobs, p_blob_sizes, p_blob_bodies);
  END IF;
  INSERT INTO "golden".chunk SELECT * FROM unnest(p_addresses, p_sizes, p_bodies);
  FOR i IN 1 .. cardinality(p_small) LOOP
    IF NOT "golden".put_fresh(p_small[i], p_small_bodies[i]) THEN
      INSERT INTO "golden".chunk VALUES (p_small[i], length(p_small_bodies[i]) - 4, p_small_bodies[i]);
    END IF;
  END LOOP;
  INSERT INTO "golden".ref SELECT commit_checkpoint.branch, u.* FROM unnest(p_streams, p_owned, p_digests) u
    ON CONFLICT DO NOTHING;
  IF p_replaces THEN  -- free the id; the caller deletes the row in the same transaction
    UPDATE "golden".checkpoint c SET id = '\x02'::bytea || int8send(c.key) WHERE c.key = v_key;
  END IF;
  INSERT INTO "golden".checkpoint
    (key, side, id, parent, parent_digest, step, created, digest, size, notes, base, manifest)
    VALUES (branch << 32 | seq,
      p_parent IS DISTINCT FROM (SELECT c.id FROM "golden".checkpoint c WHERE c.key = branch << 32 | v_head),
      p_id, p_parent,
      CASE WHEN p_parent_digest IS NOT NULL AND NOT p_replaces AND NOT EXISTS (
        SELECT 1 FROM "golden".checkpoint c WHERE c.id = p_parent AND c.digest = p_parent_digest)
        THEN p_parent_digest ELSE '' END,  -- of a parent that is not there
      p_step, p_created, p_digest, p_size, p_notes, p_base, p_manifest);
  INSERT INTO "golden".tag SELECT commit_checkpoint.branch << 32 | commit_checkpoint.seq, n FROM unnest(p_tags) n;
  IF NOT v_alone THEN
    UPDATE "golden".thread t SET next_seq = commit_checkpoint.seq + 1, alone = v_sole WHERE t.id = v_thread;
  END IF;
  UPDATE "golden".branch br SET head = commit_checkpoint.seq, last_seq = commit_checkpoint.seq,
      origin = CASE WHEN v_last = 0 THEN p_origin ELSE br.origin END,
      expires = CASE WHEN p_token IS NULL THEN br.expires ELSE clock_timestamp() + p_ttl * interval '1 microsecond' END
    WHERE br.id = commit_checkpoint.branch;
  outcome := 0;
END $$;


--
-- Name: make_thread(text, text); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.make_thread(p_namespace text, p_name text, OUT thread_id bigint, OUT next_seq bigint, OUT alone bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
  LOOP
    SELECT t.id, t.next_seq, t.alone INTO thread_id, next_seq, alone
      FROM "golden".thread t WHERE t.namespace = p_namespace AND t.name = p_name FOR NO KEY UPDATE;
    EXIT WHEN FOUND;
    INSERT INTO "golden".thread AS t (namespace, name, next_seq) VALUES (p_namespace, p_name, 1)
      ON CONFLICT DO NOTHING RETURNING t.id, t.next_seq INTO thread_id, next_seq;
    EXIT WHEN FOUND;
  END LOOP;
END $$;


--
-- Name: put_blobs(bytea[], integer[], bytea[]); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.put_blobs(p_digests bytea[], p_sizes integer[], p_bodies bytea[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
  FOR i IN 1 .. cardinality(p_digests) LOOP
    LOOP
      INSERT INTO "golden".blob (digest, size, body) VALUES (p_digests[i], p_sizes[i], p_bodies[i])
        ON CONFLICT DO NOTHING;
      EXIT WHEN FOUND;
      -- It was there. Hold on to it, or make it anew if it is being deleted at this moment.
      PERFORM 1 FROM "golden".blob b WHERE b.digest = p_digests[i] FOR KEY SHARE;
      EXIT WHEN FOUND;
    END LOOP;
  END LOOP;
END $$;


--
-- Name: put_fresh(bigint, bytea); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.put_fresh(p_address bigint, p_body bytea) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
  INSERT INTO "golden".fresh AS f VALUES ((p_address >> 28 << 6) | ((p_address >> 10) & 63), p_address,
      substr(p_body, 1, length(p_body) - 4), int4send(length(p_body) - 4) || substr(p_body, length(p_body) - 3))
    ON CONFLICT (slot) DO UPDATE SET
      address = CASE WHEN f.address >> 16 = p_address >> 16 THEN f.address ELSE p_address END,
      body = CASE WHEN f.address >> 16 = p_address >> 16 THEN f.body || excluded.body ELSE excluded.body END,
      checks = CASE WHEN f.address >> 16 = p_address >> 16 THEN f.checks || excluded.checks ELSE excluded.checks END
    WHERE CASE WHEN f.address >> 16 = p_address >> 16 THEN f.address + length(f.body) = p_address
      ELSE f.address + length(f.body) <= (
        SELECT k.address + k.size FROM "golden".chunk k
        WHERE k.address < f.address + length(f.body) ORDER BY k.address DESC LIMIT 1)
      END;
  RETURN FOUND;
END $$;


--
-- Name: put_record(integer, text, text, text, text, boolean, bigint, text, text, bytea, text, bytea, bytea, boolean, bigint, bigint, text, text, text, bigint); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.put_record(p_version integer, p_namespace text, p_thread text, p_scope text, p_branch text, p_is_fenced boolean, p_epoch bigint, p_token text, p_kind text, p_id bytea, p_key text, p_checkpoint bytea, p_body bytea, p_open boolean, p_seen bigint, p_number bigint, p_status text, p_graph text, p_fingerprint text, p_due bigint, OUT outcome integer, OUT epoch bigint, OUT holder text, OUT held_us bigint, OUT thread text, OUT scope text, OUT branch text, OUT key text, OUT checkpoint bytea, OUT body bytea, OUT open boolean, OUT version bigint, OUT number bigint, OUT status text, OUT graph text, OUT fingerprint text, OUT due bigint) RETURNS record
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
  v_branch    bigint;
  v_thread  bigint;
  v_token   text;
  v_held    timestamptz;
  v_exists  boolean;
BEGIN
  PERFORM "golden".check_version(p_version);
  outcome := 0;
  IF p_is_fenced THEN
    SELECT br.id, br.epoch, br.owner, br.token, br.expires INTO v_branch, epoch, holder, v_token, v_held
      FROM "golden".thread t JOIN "golden".branch br ON br.thread = t.id
      WHERE t.namespace = p_namespace AND t.name = p_thread AND br.scope = p_scope AND br.name = p_branch
      FOR NO KEY UPDATE OF br;
    epoch := coalesce(epoch, 0);
  END IF;

  SELECT t.name, r.scope, r.branch, r.key, r.checkpoint, r.body, r.open, r.version, r.number, r.status, r.graph,
      r.fingerprint, r.due
    INTO thread, scope, branch, key, checkpoint, body, open, version, number, status, graph, fingerprint, due
    FROM "golden".record r JOIN "golden".thread t ON t.id = r.thread WHERE r.id = p_id;
  v_exists := FOUND;
  IF p_is_fenced AND NOT (v_exists AND version = p_seen + 1 AND body = p_body)
     AND (epoch <> p_epoch OR (p_token IS NULL AND v_held > clock_timestamp())
          OR (p_token IS NOT NULL AND p_token IS DISTINCT FROM v_token)) THEN
    outcome := 1;
    held_us := coalesce(extract(epoch FROM v_held - clock_timestamp()) * 1000000, 0);
    RETURN;
  END IF;
  IF v_exists AND (version <> p_seen OR number <> p_number) THEN
    PERFORM 1 FROM "golden".record r WHERE r.id = p_id FOR NO KEY UPDATE;
    RETURN;
  END IF;
  IF NOT v_exists AND p_seen <> 0 THEN
    outcome := 2;
    RETURN;
  END IF;

  IF v_exists THEN
    UPDATE "golden".record r SET version = p_seen + 1, body = p_body, open = p_open, status = p_status,
        graph = p_graph, fingerprint = p_fingerprint, due = p_due
      WHERE r.id = p_id AND r.version = p_seen AND r.number = p_number;
    IF NOT FOUND THEN
      RAISE EXCEPTION 'another writer changed the record' USING ERRCODE = '40001';
    END IF;
  ELSE
    SELECT m.thread_id INTO v_thread FROM "golden".make_thread(p_namespace, p_thread) m;
    IF p_is_fenced AND v_branch IS NULL THEN
      PERFORM 1 FROM "golden".branch br WHERE br.thread = v_thread AND br.scope = p_scope AND br.name = p_branch;
      IF FOUND THEN
        RAISE EXCEPTION 'another writer made the branch' USING ERRCODE = '40001';
      END IF;
    END IF;
    IF p_checkpoint IS NOT NULL THEN
      PERFORM 1 FROM "golden".checkpoint c JOIN "golden".branch br ON br.id = c.key >> 32
        WHERE c.id = p_checkpoint AND br.thread = v_thread AND br.scope = p_scope;
      IF NOT FOUND THEN
        RAISE EXCEPTION 'the checkpoint it belongs to is gone' USING ERRCODE = 'ZB005';
      END IF;
    END IF;
    -- Whoever finds the name taken now begins again, and finds the record.
    INSERT INTO "golden".record AS r (thread, version, open, kind, scope, branch, key, id, checkpoint, body,
        namespace, status, graph, fingerprint, due)
      VALUES (v_thread, 1, p_open, p_kind, p_scope, p_branch, p_key, p_id, p_checkpoint, p_body,
        CASE WHEN p_status IS NOT NULL THEN p_namespace END, p_status, p_graph, p_fingerprint, p_due)
      RETURNING r.number INTO number;
    thread := p_thread; scope := p_scope; branch := p_branch; key := p_key; checkpoint := p_checkpoint;
  END IF;
  version := p_seen + 1; body := p_body; open := p_open;
  status := p_status; graph := p_graph; fingerprint := p_fingerprint; due := p_due;
END $$;


--
-- Name: put_writes(integer, text, text, text, bytea, bytea[], integer[], bytea[], bytea[]); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.put_writes(p_version integer, p_namespace text, p_thread text, p_scope text, p_checkpoint bytea, p_tasks bytea[], p_sizes integer[], p_bodies bytea[], p_was bytea[] DEFAULT NULL::bytea[]) RETURNS TABLE(other_task bytea, other_size integer, other_body bytea)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
  v_thread bigint;
BEGIN
  PERFORM "golden".check_version(p_version);
  SELECT m.thread_id INTO v_thread FROM "golden".make_thread(p_namespace, p_thread) m;
  RETURN QUERY SELECT n.task, w.size, w.body
    FROM unnest(p_tasks, p_was) n (task, was) LEFT JOIN "golden".write w
      ON w.thread = v_thread AND w.scope = p_scope AND w.checkpoint = p_checkpoint AND w.task = n.task
    WHERE sha256(w.body) IS DISTINCT FROM n.was;
  IF NOT FOUND THEN
    INSERT INTO "golden".write (thread, scope, checkpoint, task, size, body)
      SELECT v_thread, p_scope, p_checkpoint, n.* FROM unnest(p_tasks, p_sizes, p_bodies) n
      ON CONFLICT (thread, scope, checkpoint, task) DO UPDATE SET size = excluded.size, body = excluded.body;
  END IF;
END $$;


--
-- Name: refuse_append(); Type: FUNCTION; Schema: golden; Owner: -
--

CREATE FUNCTION golden.refuse_append() RETURNS bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
  RAISE EXCEPTION 'not as the writer thinks' USING ERRCODE = 'ZB001';
END $$;


SET default_tablespace = '';

SET default_table_access_method = heap;

--
-- Name: blob; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.blob (
    digest bytea NOT NULL,
    size integer NOT NULL,
    body bytea NOT NULL
);
ALTER TABLE ONLY golden.blob ALTER COLUMN body SET STORAGE EXTERNAL;


--
-- Name: branch; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.branch (
    id bigint NOT NULL,
    thread bigint NOT NULL,
    head bigint NOT NULL,
    last_seq bigint NOT NULL,
    epoch bigint DEFAULT 0 NOT NULL,
    expires timestamp with time zone,
    alone boolean NOT NULL,
    scope text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    owner text,
    token text,
    origin bytea
)
WITH (fillfactor='50');


--
-- Name: branch_id_seq; Type: SEQUENCE; Schema: golden; Owner: -
--

ALTER TABLE golden.branch ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME golden.branch_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: checkpoint; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.checkpoint (
    key bigint NOT NULL,
    created bigint NOT NULL,
    size bigint NOT NULL,
    step bigint NOT NULL,
    side boolean NOT NULL,
    id bytea NOT NULL,
    parent bytea,
    parent_digest bytea NOT NULL,
    digest bytea NOT NULL,
    base bytea,
    notes bytea NOT NULL,
    manifest bytea NOT NULL
);
ALTER TABLE ONLY golden.checkpoint ALTER COLUMN notes SET STORAGE EXTERNAL;
ALTER TABLE ONLY golden.checkpoint ALTER COLUMN manifest SET STORAGE EXTERNAL;


--
-- Name: chunk; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.chunk (
    address bigint NOT NULL,
    size integer NOT NULL,
    body bytea NOT NULL
);
ALTER TABLE ONLY golden.chunk ALTER COLUMN body SET STORAGE EXTERNAL;


--
-- Name: counter; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.counter (
    value bigint NOT NULL
);


--
-- Name: fresh; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.fresh (
    slot bigint NOT NULL,
    address bigint NOT NULL,
    body bytea NOT NULL,
    checks bytea NOT NULL
)
WITH (toast_tuple_target='8160');
ALTER TABLE ONLY golden.fresh ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE ONLY golden.fresh ALTER COLUMN checks SET STORAGE EXTERNAL;


--
-- Name: meta; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.meta (
    version integer NOT NULL
);


--
-- Name: record; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.record (
    number bigint NOT NULL,
    thread bigint NOT NULL,
    version bigint NOT NULL,
    due bigint,
    open boolean NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    scope text NOT NULL COLLATE pg_catalog."C",
    branch text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    id bytea NOT NULL,
    checkpoint bytea,
    body bytea NOT NULL,
    namespace text COLLATE pg_catalog."C",
    status text COLLATE pg_catalog."C",
    graph text COLLATE pg_catalog."C",
    fingerprint text COLLATE pg_catalog."C"
);


--
-- Name: record_number_seq; Type: SEQUENCE; Schema: golden; Owner: -
--

ALTER TABLE golden.record ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME golden.record_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: ref; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.ref (
    branch bigint NOT NULL,
    stream bigint NOT NULL,
    owned boolean NOT NULL,
    digest bytea NOT NULL
);


--
-- Name: tag; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.tag (
    checkpoint bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C"
);


--
-- Name: thread; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.thread (
    id bigint NOT NULL,
    next_seq bigint NOT NULL,
    alone bigint,
    namespace text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C"
)
WITH (fillfactor='50');


--
-- Name: thread_id_seq; Type: SEQUENCE; Schema: golden; Owner: -
--

ALTER TABLE golden.thread ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME golden.thread_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: write; Type: TABLE; Schema: golden; Owner: -
--

CREATE TABLE golden.write (
    thread bigint NOT NULL,
    size integer NOT NULL,
    scope text NOT NULL COLLATE pg_catalog."C",
    checkpoint bytea NOT NULL,
    task bytea NOT NULL,
    body bytea NOT NULL
);
ALTER TABLE ONLY golden.write ALTER COLUMN body SET STORAGE EXTERNAL;


--
-- Data for Name: blob; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.blob VALUES ('\xc5d70b9cb63bc277c73a16bb25c9804eb26f87e062367cdeaae26460d414ca55', 1209, '\x28b52ffd64b9039d1400da4a0c0a17c0a570ffafa6ff07d76acfcc6420dca6a4a424579f09029d0099009800b821686e5e6b77a8c9be5f9212228291961543506885e4c8d11e39b87143887ccdf705cc2d0c4ce13e8942af1892a2dfce57ec59863f9a950c2378c069ef937028a7178cf7d232153ff6cffa03a66da04442b9305a661f68cfdb78a2336ee9d9ea0222fb91e8534e74d1d04a6056eb700cb3bcbc186cea3e3b9cdc29456e581b9b95d13f8de08590fc519d97fae1166d3f2aa91c02800281c1c003060219c13254702d16da59befc7c8ff53ff7cf2c32b5364535af4c410e68212ebc52baa28433833281f015115f875171d53efd79cfb602391553d926fe9a866c3356c14d7b4614e98ae1bcd7c96d57be2533ed1f4ed509fda6cb727c1c2aa1d8ae3f9eb94731bfa183b776057e186aa05b64737ca2358d09da69871c76bdd18e7ae75b18d8f5349ed7fe4a81c27d4039b6c3fae0bec717f6f01702c64bc586878a21e01c99df68f40b7eb550a69ea726396bc81ea167f6f85487a647ec9bca1963dbc3fc43e6a0f3fbefd4e1d6e77131681eb5e1eade51421f194b0cf1fc21363d4540f418bd10aebd53ccadcd7799a38427c88e87ea087fe9e2a2e5d099ca844128651218e4c57d5ab9aa6cc65d6a6cbc439ff34a35b914712b7dbe366c1b272e561d945bf28e63fb8486b7ff5c11b256bf19f844825ade01454a4e540fc3852c58b6c9d7bd87b1e5e941da6e0e71b8e643eed4595e22bb2825ec99eed91582b7d0074d273ccc15317a9ef36058b9a9b3dd0ffaa5723d55156a2d83f726bfdfd5b8f01df5d1d59655b5b9e8d8e7edec2e763f5365538fed7d938d56846a44f5ad9836270b92907f9548f92ea25c9696da5bea535c6d9dc32cf13e77a95c544a2292f24171e62a50840603040110923b1195afc9055269e13821');
INSERT INTO golden.blob VALUES ('\x643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfff', 2388, '\x28b52ffd6454088d2800da8dc81219b0a592030c03599284a0d39d993975079a293725456a24ee042801250123014edd97e99ffd8267e139dc395660778ad5f80fc81bfe642778b1be587c6075d4bcc8fc2020d777fb58593b496a9d15f73e1522e9ef1f8db96392db76befcfe33dc7471d576a13f6550b64c1058649189abdd52fca6ea660f28b54a812b8c991aa196593594907b4673b1c4c4d0b2cb0cf7dfb5616d10700f4d6dcf14d3ace4e5c71bda0ca3855d71a7c25ef1a9e385260d34dc46e3a1f8af49e3795dd46eee8380757c78521eaf0fc2f6cbadcfb2d9d661d92feb55256cf992a53f47c2a755d5adc5ab1ff90c77ff6904011d6adf7565fd1a9368f532d92ab79e4d37cb7b43a9c40a616f5d3578e44f101337f85048e3903cbd82807a4e9b2af130ce9155d4706ff864754992b531e5eceb1587f324fbdf156fdda2969ca30fcd6cafeb412002b40b00400770000161ac1804884d82cbf1dc915f40f2889ef01c226449bd9660f7a6f369cd9ae519933983c349d9e97d588e1404daf11e256b08fd1f7b29ad70aba2d4eafef383ac70184765ab872ab7f75270f4ff71af8677f1305b210870284be3444cf359a4e47dfbe06eab5ae1c25f30a3d2e04a9aa310a679fce135591ee124d472badaa1e95bb207857b0b5172b89878419fabe46bc6c7faa710d74590675d6f4cfb4ca41883c0690d6d90c028bf3278c2b2ba5be8e2f741b9c2ec3443d855bcf3a17693ab2a24fc1e3a8c98661d7d83c0e5bbde859440fb7c357c61f688d9b05a6e638c90d0273714df4740b55dbb9c9797d98e0cf18e1d04ca92e743635b7cb130bd7bf267d4a9f19539562f49286e520b079ac20e9a9a9ecf7feb4c76ec76ac1c04e467b97bcbbb029a1e8cf37458618e499a2d54cac6a3f20339b6833c08846dd990f31e9e424e04f10a856c0c18b4cb2ff94a947e2c2ae84ae8614c2a1f366bd86e1c19a5b131418088fd88f0735590da246f0303f710174ed1fe79857f0d29f7bd474c9a51f123c1306a218426df139e6ce2f2b1653c869e7242ff490dbdcd84592f91682a74b7628c69e8d776b7f3840c0213edf4b8453aefa39ff8cb81bddbf843e8675a114bf4daf8bd1c1fc9901d39c5cb59d5d7909f7ed4d1c998c3615fbf4fef53b9a67345a3befd84b1862a606f67a910f65f9899bba220609a9926d5de81c2b40f5ef0987a93884b15791743d6890d5516665dc182a0d37388c7eb266db60681e7b1a14d137cc7e8f3ff085929a72afdcce8c129984bb357137f41e71286c2873b94de4850b52555f9bdc1f0a284f999f39d389d640e89a9c2e58f73dd4216865cd908b359fbfb8572d0120ac69f1504cef426d8f5e36d69b031d7709a6cd263cc836bb7186b6a111e2394f73b08d2c47b5dc7ca048109abe867bee516df8d53938b1a7a463f441267b26d13e28216ee3e774f4fe8b9f7efb40e414050c5c2f2e854a69a4f54a9a8de9e3e38e4e8978cabc4fe762363f9a2bbd384f51be58e1a07fd87cf20a049d7e86528a236d9c9a1d6b67af2253117641beae97b3d2142e4c2077a6ce4eb9e0d028c255629eb144e53c32f2e9f272762e6b819431d849f84a7bb50634d2eeb5c656259e5ecbf8f3284c83bd9d0be7743aa4959130ca9af3604ba6747f7ed895d7e06d5863096951c85eb2108f85ad9af6c364eeb28b5df735f2475ec4bc8ec571c000a364b4965c61dc4970ba364436b36185e5eab7de4dd6f160b5f62213b261175bb4302a14cc4787273785f16bd12ad3c16aba6a95cb8443b01feada14b16483db628b1bf168913db9b946d4bbb8c897745fead37a4eb25085341dd0716');
INSERT INTO golden.blob VALUES ('\x11ddd1c97d01e85c8080132888a1af13643fd4295904b691dfeb654d6fb750a7', 270, '\x28b52ffd640e00c50500b20b2624a027e9766523df36b2f2433c61beb7bfbfe348126c2937719b909db695515555d568480e0847b534b38ca748c3acd47496134fe90d8ae343c75f0b8c9ed35d331da069b05a6a698a45cb556a1c96335976b80c0f78965d7046f83ece41f873188be5237acc484e68e09380462878da060b04bd297bdc0895d20302c71408f628b12909c59af5781bcb64fbebb00fbea5999a83b34bb6050b00b23a8531c1b686f01000a8f7d4056010c6aaab92ca34d380fa35a126a78750');


--
-- Data for Name: branch; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.branch OVERRIDING SYSTEM VALUE VALUES (7, 5, 2, 2, 1, NULL, true, '', 'main', NULL, NULL, NULL);
INSERT INTO golden.branch OVERRIDING SYSTEM VALUE VALUES (2, 1, 5, 5, 0, NULL, false, '', 'what-if', NULL, NULL, '\x01006332');
INSERT INTO golden.branch OVERRIDING SYSTEM VALUE VALUES (6, 4, 1, 1, 1, '2026-11-18 07:03:11.917056+00', true, '', 'main', '0123456789abcdef a-boot-that-is-over pid:[1]+time:[2] 7 5 golden worker-2', '6b65d1abcedd488bb72e0f371b2c8dbf', NULL);
INSERT INTO golden.branch OVERRIDING SYSTEM VALUE VALUES (1, 1, 8, 8, 0, NULL, false, '', 'main', NULL, NULL, NULL);
INSERT INTO golden.branch OVERRIDING SYSTEM VALUE VALUES (3, 1, 9, 9, 0, NULL, false, 'inner', 'main', NULL, NULL, NULL);
INSERT INTO golden.branch OVERRIDING SYSTEM VALUE VALUES (8, 8, 1, 1, 0, NULL, true, '', 'main', NULL, NULL, NULL);
INSERT INTO golden.branch OVERRIDING SYSTEM VALUE VALUES (4, 2, 5, 5, 0, NULL, true, '', 'main', NULL, NULL, NULL);
INSERT INTO golden.branch OVERRIDING SYSTEM VALUE VALUES (5, 3, 2, 2, 1, NULL, true, '', 'main', NULL, NULL, NULL);


--
-- Data for Name: checkpoint; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.checkpoint VALUES (4294967297, 1767268800000000, 173, 1, false, '\x01006331', NULL, '\x', '\x7179fcf565e7434b69f2e2ef18757ce3048963d988c27cb5ca50d9dd55eb1888', NULL, '\x82a56c6162656ca56669727374a86d6574616461746181a475736572a3616e6edf7be95c', '\x95c09094a86d65737361676573a16c01c406a568656c6c6f94a4706c616ea17400c40673656172636894a676616c756573a16d0bc4a1a46e6f6e65c0a577686f6c65c70b05ff00000000000000000000a5666c6f6174cb8000000000000000a56279746573c40200ffa66d6f6d656e74c70e1099cd07ea01010c1e0005009200c0a47370616ed61393ff0001a7646563696d616cd606312e3130a475756964d80800000000000000000000000000000007a57475706c65d7019201d60192a161c0a3736574c70302920102a474657874a6c3bce2988300');
INSERT INTO golden.checkpoint VALUES (4294967298, 1767268800000000, 1376, 2, false, '\x01006332', '\x01006331', '\x', '\x7ca1f88fe06c05561abcc9c5feb8a07dff75c6da3af789d1326b4316da0a1ce2', NULL, '\x82a16ea56d6f64656ca16b0cf8f3e892', '\x95c09095a86d65737361676573a16c02cd04b9c420c5d70b9cb63bc277c73a16bb25c9804eb26f87e062367cdeaae26460d414ca5594a4706c616ea17400c406616e7377657294a676616c756573a16d0bc4a1a46e6f6e65c0a577686f6c65c70b05ff00000000000000000000a5666c6f6174cb8000000000000000a56279746573c40200ffa66d6f6d656e74c70e1099cd07ea01010c1e0005009200c0a47370616ed61393ff0001a7646563696d616cd606312e3130a475756964d80800000000000000000000000000000007a57475706c65d7019201d60192a161c0a3736574c70302920102a474657874a6c3bce2988300');
INSERT INTO golden.checkpoint VALUES (4294967299, 1767268800000000, 1374, 3, false, '\x01006333', '\x01006332', '\x', '\x905ef51ce4db0e9d87fcb7211854ba1f8de5279229c4a56b37b65162c9799048', NULL, '\xbac6cc97', '\x94c09095a86d65737361676573a16c03c4200acbdbf8e374b513aef84e5752d69852c15d8581b3a63e00d8f9317ceb72f0d794cd04b9c420c5d70b9cb63bc277c73a16bb25c9804eb26f87e062367cdeaae26460d414ca5500c404a362796594a676616c756573a16d0bc4a1a46e6f6e65c0a577686f6c65c70b05ff00000000000000000000a5666c6f6174cb8000000000000000a56279746573c40200ffa66d6f6d656e74c70e1099cd07ea01010c1e0005009200c0a47370616ed61393ff0001a7646563696d616cd606312e3130a475756964d80800000000000000000000000000000007a57475706c65d7019201d60192a161c0a3736574c70302920102a474657874a6c3bce2988300');
INSERT INTO golden.checkpoint VALUES (8589934596, 1767268800000000, 1375, 2, true, '\x01006631', '\x01006332', '\x', '\xd50cafc1272f85096f9a2e647175a4de892e41597071a354b31ca47ebfd4d4bd', NULL, '\x83a16ea56d6f64656ca16b0ca174a4666f726b0a739c16', '\x95c09095a86d65737361676573a16c02cd04b9c420c5d70b9cb63bc277c73a16bb25c9804eb26f87e062367cdeaae26460d414ca5594a4706c616ea17400c4056f7468657294a676616c756573a16d0bc4a1a46e6f6e65c0a577686f6c65c70b05ff00000000000000000000a5666c6f6174cb8000000000000000a56279746573c40200ffa66d6f6d656e74c70e1099cd07ea01010c1e0005009200c0a47370616ed61393ff0001a7646563696d616cd606312e3130a475756964d80800000000000000000000000000000007a57475706c65d7019201d60192a161c0a3736574c70302920102a474657874a6c3bce2988300');
INSERT INTO golden.checkpoint VALUES (8589934597, 1767268800000000, 1380, 3, false, '\x01006632', '\x01006631', '\x', '\xff28d7f16f8f7066fdb5e64d78386254eca9be1f4b52e23b512ebf70e9b82540', NULL, '\xb07832bd', '\x95c09095a86d65737361676573a16c03c4201669c55ecfe3788206ad2a878efc2cb54662857bf7bfae724daa434a34c1856994cd04b9c420c5d70b9cb63bc277c73a16bb25c9804eb26f87e062367cdeaae26460d414ca5500c405a4666f726b94a4706c616ea17400c4056f7468657294a676616c756573a16d0bc4a1a46e6f6e65c0a577686f6c65c70b05ff00000000000000000000a5666c6f6174cb8000000000000000a56279746573c40200ffa66d6f6d656e74c70e1099cd07ea01010c1e0005009200c0a47370616ed61393ff0001a7646563696d616cd606312e3130a475756964d80800000000000000000000000000000007a57475706c65d7019201d60192a161c0a3736574c70302920102a474657874a6c3bce2988300');
INSERT INTO golden.checkpoint VALUES (4294967302, 1767268800000000, 173, 4, true, '\x01006334', '\x01006331', '\x', '\x8df38cc2ff39e744d63f646a1ed8cf2530390337600275740b50a080bb4f0c66', NULL, '\x83a174a6726577696e64a56c6162656ca56669727374a86d6574616461746181a475736572a3616e6ef97abce7', '\x95c09094a86d65737361676573a16c01c406a568656c6c6f94a4706c616ea17400c40673656172636894a676616c756573a16d0bc4a1a46e6f6e65c0a577686f6c65c70b05ff00000000000000000000a5666c6f6174cb8000000000000000a56279746573c40200ffa66d6f6d656e74c70e1099cd07ea01010c1e0005009200c0a47370616ed61393ff0001a7646563696d616cd606312e3130a475756964d80800000000000000000000000000000007a57475706c65d7019201d60192a161c0a3736574c70302920102a474657874a6c3bce2988300');
INSERT INTO golden.checkpoint VALUES (4294967304, 1767268800000000, 5, 6, false, '\x01006336', '\x01006335', '\xcd6ad25533bb68c0cfaf48a4e816682fe2c2369a64118ff34f6b3a067cff6eee', '\x7e8c129fbbb9405ac0efaa454230ae5308b303d27f8730bf19e13c178a9f022b', NULL, '\x9ed0f164', '\x93c09094a86d65737361676573a16c01c405a46c617374');
INSERT INTO golden.checkpoint VALUES (12884901897, 1767268800000000, 1, 1, false, '\x01007331', NULL, '\x', '\xfa304b88ad0ffb923052c410b773c507bebb7ca4b25cec330877e79f8c27adad', NULL, '\xdfe3a05a', '\x93c09094a6696e73696465a17600c401c3');
INSERT INTO golden.checkpoint VALUES (17179869185, 1767268800000000, 2388, 1, false, '\x01006530', NULL, '\x', '\xf9f4ac88906a7e975662dbd14cfb4b6fc7e4d9d8b99c39ae0d99ddb80e5fdf4e', NULL, '\x80511b86', '\x93c09095a56974656d73a16c1ecd0954c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfff');
INSERT INTO golden.checkpoint VALUES (17179869186, 1767268800000000, 2316, 2, false, '\x01006531', '\x01006530', '\x', '\x226ae78955d0b32b0fa13ec911e8b7ad8c42474ed193d6a9091a27f12ed97e55', NULL, '\x89e053c6', '\x93c09095a56974656d73a16c1ec420629a4903ebb2381d514d72912f45c0bd07f3aff4ddd7f2c7a027e42610760f6b96ccb80100cd0854c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd0100');
INSERT INTO golden.checkpoint VALUES (17179869187, 1767268800000000, 2244, 3, false, '\x01006532', '\x01006531', '\x', '\xec1b04342550ad5fc067a1642bbb4320080af993f3d67e3aef525e9a1d43a62e', NULL, '\xdd37e8e9', '\x93c09095a56974656d73a16c1ec420358cc72178aff54f52ef1428bbebe4084f443357844fbdc57fd916cdd36988f09accb80100cca4c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd0100c40aa96368616e6765642032cd075ec420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd01f6');
INSERT INTO golden.checkpoint VALUES (17179869188, 1767268800000000, 2172, 4, false, '\x01006533', '\x01006532', '\x', '\xaba2aa4b5618e2eec2a8a161cde4ba5592b1477535a2571326b9a846852c2379', NULL, '\x5dd9e021', '\x93c09095a56974656d73a16c1ec420be1aaa0740f07826af02dc7c890321ba0edcb2d90f67af942a21a9e055b708309eccb80100cca4c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd0100c40aa96368616e6765642032cca4c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd01f6c40aa96368616e6765642033cd0668c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd02ec');
INSERT INTO golden.checkpoint VALUES (17179869189, 1767268800000000, 2100, 5, false, '\x01006534', '\x01006533', '\x', '\x8062d336e587e6e489b917bf713d1e6eb0150a5ced2064efeb31c5763d2292d0', NULL, '\x60b575c0', '\x93c09095a56974656d73a16c1ec420b4c07937a4c8bf30b5d79ba382a9e70f64b343844f79522304efa360cdbcfd3cdc0012ccb80100cca4c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd0100c40aa96368616e6765642032cca4c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd01f6c40aa96368616e6765642033cca4c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd02ecc40aa96368616e6765642034cd0572c420643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfffcd03e2');
INSERT INTO golden.checkpoint VALUES (21474836481, 1767268800000000, 284, 0, false, '\x01a1ed77753970008135b273c38b2ce5', NULL, '\x', '\xd96db7f33732c4b5006dbcfb9ae978894512869a8f6553bd85afb7af1b88075b', NULL, '\x85a172c41001a1ed7774db7000bc3ee88f38c0c82fa167a473686f70a168cf660a6391bbb8e68ca16ea47069636ba174a5696e70757436fd7eeb', '\x95c0909502a16d08cd010ec42011ddd1c97d01e85c8080132888a1af13643fd4295904b691dfeb654d6fb750a794a66261736b6574a16c00c4009400a16c01c40e95a473686f70a47069636bc00080');
INSERT INTO golden.checkpoint VALUES (21474836482, 1767268800000000, 396, 1, false, '\x01a1ed77754a700093b3980c86693166', '\x01a1ed77753970008135b273c38b2ce5', '\x', '\xff7c18b1a59e4792fce1228b7726bc674aa02dff263193b18639a00e1cdd71f7', NULL, '\x88a172c41001a1ed7774db7000bc3ee88f38c0c82fa167a473686f70a168cf660a6391bbb8e68ca16ca47069636ba16ea3706179a9696e7465727275707485a26964d9526261636b737461793a7175657374696f6e3a66326438653039386461313538373038633664393731633464336132613566353732636264306532663934336134373231633934616666633337633961383235a46b696e64aa6265666f72656e6f6465a46e6f6465a3706179a77061796c6f616483a56772617068a473686f70a46e6f6465a3706179a5766973697401a670726f6d7074a852756e207061793fab726573756d655f68696e74a852756e207061793fa174a9696e74657272757074be5a3d1d', '\x96c0909502a16d08cd010ec42011ddd1c97d01e85c8080132888a1af13643fd4295904b691dfeb654d6fb750a794a66261736b6574a16c01c406a56170706c659400a16c01c47396a473686f70a3706179a47069636b0181a47069636b0181a5776169747391d9526261636b737461793a7175657374696f6e3a663264386530393864613135383730386336643937316334643361326135663537326362643065326639343361343732316339346166666333376339613832359401a16c01c405a47069636b');
INSERT INTO golden.checkpoint VALUES (25769803777, 1767268800000000, 1, 1, false, '\x01006c31', NULL, '\x', '\x5b74dacaf197c87a152ec1fdc9718adfb707c5d8df6888c9a01f2bb4a41ccb98', NULL, '\xb1e80570', '\x93c09094a16ea17600c40101');
INSERT INTO golden.checkpoint VALUES (30064771073, 1767268800000000, 1, 0, false, '\x01a1ed77765b700094a08b46ed832bc6', NULL, '\x', '\xe28cc58c5aa32288875ae591f430ec37fcd41c2363941b5c5ac3b2a5fecd6ed6', NULL, '\x83a172c41001a1ed77762f70009c58360d9461f0cca174a5696e707574a86d6574616461746181ad6261636b737461792e6c6f6f7082a5726f756e6400a66772616e747390f41d9ada', '\x93c09094a16ea17600c40100');
INSERT INTO golden.checkpoint VALUES (30064771074, 1767268800000000, 1, 1, false, '\x01a1ed77766e70008847770b612ccd1a', '\x01a1ed77765b700094a08b46ed832bc6', '\x', '\x896535ca200730d7d3390ddc3a169f7d8fcee8832e219982543904a93e49aad7', NULL, '\x85a172c41001a1ed77762f70009c58360d9461f0ccac636f6e74696e756174696f6e81a46b696e64a3656e64a9697465726174696f6e01a174a9697465726174696f6ea86d6574616461746181ad6261636b737461792e6c6f6f7082a5726f756e6400a66772616e747390f348281b', '\x93c09094a16ea17600c40101');
INSERT INTO golden.checkpoint VALUES (34359738369, 1767268800000000, 1, 1, false, '\x016f74686572006331', NULL, '\x', '\x5e7c07ae928a69e85f88eb2df920e30d90cceeeb3a457fb961f7efd86b757f43', NULL, '\x98f10500', '\x93c09094a56f74686572a17600c401c3');


--
-- Data for Name: chunk; Type: TABLE DATA; Schema: golden; Owner: -
--



--
-- Data for Name: counter; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.counter VALUES (17);


--
-- Data for Name: fresh; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.fresh VALUES (64, 268435456, '\xa96368616e6765642030d9506562616635636364366633373239316433346261646531626266663533396537366334376166623239336335643533393134643439326530626463323430343533373238633263336161356432396561d9503465396533383730613331383763306238393838313766313263306161656237623636343839343138356637393535653962326435653434623135346561643031353234666163616562626564333261a96368616e6765642031', '\x000000b843e3d4c0');


--
-- Data for Name: meta; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.meta VALUES (1);


--
-- Data for Name: record; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (1, 1, 1, NULL, true, 'interrupt', '', 'main', 'ask-open', '\x21d6c22cdf2cded3a0ca51cd7d6c74ddab451bdff89f70bce3eb2e4b31086a11', '\x01006333', '\xb6c0deebb216f78f67a3145d5b65acdebe7d6ff5691fa5246e637d8daa6a386f9ac44385a26964a861736b2d6f70656ea46b696e64ab7573657272657175657374a46e6f6465c0a77061796c6f616481a6616d6f756e7405a670726f6d7074a64d617920493fcf00064752550bf000c0c0c0c000c0c0c0', NULL, NULL, NULL, NULL);
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (2, 1, 2, NULL, true, 'interrupt', '', 'main', 'ask-answered', '\x394a0b56867f32974dc568e2791b7777522abdd72fcb200bee54bddcd34825d5', '\x01006333', '\x936b3af22c5722e3d1b34944f38d09b717105ac13ce1c8baff8512eb48300a099ac43985a26964ac61736b2d616e737765726564a46b696e64ab7573657272657175657374a46e6f6465c0a77061796c6f6164c0a670726f6d7074a0cf00064752550bf000c43385a46b696e64a66d6f64696679a573636f7065c0a576616c756581a6616d6f756e7404a6726561736f6ea0a6746172676574c0a3626f62cf00064752550bf000c000c0c0c0', NULL, NULL, NULL, NULL);
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (3, 1, 3, NULL, false, 'interrupt', '', 'main', 'ask-used', '\x9f298e6e04e50d2f296d9e7a7a483aa51284a730c157ef1df9d693df1a94a631', '\x01006333', '\xbca2b54c8fb71cb855a16ddf9552214c29f7f983d10f244aa1f3f426a4cd1ee49ac43585a26964a861736b2d75736564a46b696e64ab7573657272657175657374a46e6f6465c0a77061796c6f6164c0a670726f6d7074a0cf00064752550bf000c42c85a46b696e64a7617070726f7665a573636f7065c0a576616c7565c0a6726561736f6ea0a6746172676574c0a3616e6ecf00064752550bf000a8776f726b65722d3100cf00064752550bf000c0c0', NULL, NULL, NULL, NULL);
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (4, 1, 2, NULL, false, 'effect', '', 'main', 'mail', '\x759c3becc4e38772b3fed7f380a9ea86d4756fca57ef8317ec39aa2433bd5422', NULL, '\x3e904782510d53cda347e3d465cd86b826daa4e173651147f699a072e27207939901d92d676f6c64656e3a372030316131656437372d373365662d373030302d623964332d643131393864343830396231c4205e6bcd50cb227b1272b2a3633e8a53a9a9618437225e43136571cc876d166860cf00064752550bf000a4646f6e65c40b7281a473656e74a3616e6ecf00064752550bf000c0c2', NULL, NULL, NULL, NULL);
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (5, 1, 2, NULL, false, 'effect', '', 'main', 'fax', '\x998bc3d9fe8769c0f1fe7620e0ebc786a152570351ece1cb0872d13721e50cac', NULL, '\xc4720c27bb2e321bef034efe959bd99db0d79937ad40d70354242b81530da36e9901d92d676f6c64656e3a372030316131656437372d373366632d373030302d623438352d663631336230616362653337c420945418f981c5e76fa45b5fbce9e1c899102a8a0f86604bb5adaddadbf036964fcf00064752550bf000a66661696c6564c40b6556616c75654572726f72cf00064752550bf000c0c2', NULL, NULL, NULL, NULL);
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (6, 1, 1, NULL, true, 'effect', '', 'main', 'charge', '\x8656946bc091f88b4f74744ffc01a8b2b8f66d42cf11852ecead4b02e99c849e', NULL, '\xf5ad6de53c6d43a538126651c54d05d5d7c279fdef2e05c81c0bd2f0fef40faf9901d92d676f6c64656e3a372030316131656437372d373430382d373030302d626361322d363666386462326465343162c420945418f981c5e76fa45b5fbce9e1c899102a8a0f86604bb5adaddadbf036964fcf00064752550bf000a8696e74656e646564c400c0c0c2', NULL, NULL, NULL, NULL);
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (8, 3, 1, NULL, true, 'interrupt', '', 'main', 'backstay:question:f2d8e098da158708c6d971c4d3a2a5f572cbd0e2f943a4721c94affc37c9a825', '\xdc4b9202a4af7f196ebb13b396fe7b8f47c0c0401fbc60c687d5a1bf132f57b0', '\x01a1ed77754a700093b3980c86693166', '\x8e48664fa3165e4c34531f18204be43d8343d55de748e9bdac8efb65b6cf4ff89ac4a585a26964d9526261636b737461793a7175657374696f6e3a66326438653039386461313538373038633664393731633464336132613566353732636264306532663934336134373231633934616666633337633961383235a46b696e64aa6265666f72656e6f6465a46e6f6465a3706179a77061796c6f616483a56772617068a473686f70a46e6f6465a3706179a5766973697401a670726f6d7074a852756e207061793fcf00064752550bf000c0c0c0c000c0c0c0', NULL, NULL, NULL, NULL);
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (7, 3, 2, NULL, true, 'run', '', 'main', '01a1ed77-74db-7000-bc3e-e88f38c0c82f', '\x03198097bb8dade45609449da3a15b76faf7d35830cebc11d814acf2db5f958e', NULL, '\x62dba58f50d513e3b499d2548586275f0358bdc3f373007f1f9c34866a3b9369dc0018a56772617068a473686f70b036363061363339316262623865363863ab696e746572727570746564c0a0d9413031323334353637383961626364656620612d626f6f742d746861742d69732d6f766572207069643a5b315d2b74696d653a5b325d2037203520676f6c64656e200100ffc091d9526261636b737461793a7175657374696f6e3a66326438653039386461313538373038633664393731633464336132613566353732636264306532663934336134373231633934616666633337633961383235c0c0c42046d5a702ecd29ade9feca8d4580244f071d428ee59f29bb9335e62e5cd8bc986c000c0a0a0cf00064752550bf000cf00064752550bf000cf00064752550bf000c0', '', 'interrupted', 'shop', '660a6391bbb8e68c');
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (9, 4, 1, NULL, true, 'run', '', 'main', '01a1ed77-75e1-7000-b827-0670148b55b7', '\xff6e10f1bc52f93bb51463bd1da5480c76edbf406245d69e020815e78ea549ae', NULL, '\x302c9596373daf84a59d5852b256664d39b419e90d93f5da358e6c1fd45b2d85dc0018a46c6f6f70a46c656674a0a772756e6e696e67c0d9203662363564316162636564643438386262373265306633373162326338646266d9493031323334353637383961626364656620612d626f6f742d746861742d69732d6f766572207069643a5b315d2b74696d653a5b325d2037203520676f6c64656e20776f726b65722d320100ffc090c0c0c400c000c0a0a0cf00064752550bf000cf00064752550bf000cf00064752550bf000c0', '', 'running', 'left', '');
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (10, 5, 2, NULL, false, 'run', '', 'main', '01a1ed77-762f-7000-9c58-360d9461f0cc', '\x0a37c76a26f629a415b7d143195694b52aa44fdff2366a7687d4373e1c10d613', NULL, '\x49542dcab9dd28717abf6aec9215bf7651369f9dd80c4f5655239fe34eae2768dc0018a46c6f6f70a5636f756e74a0a9636f6d706c65746564c0a0d9493031323334353637383961626364656620612d626f6f742d746861742d69732d6f766572207069643a5b315d2b74696d653a5b325d2037203520676f6c64656e20776f726b65722d310100ffc090c0c0c400c000c0a0a0cf00064752550bf000cf00064752550bf000cf00064752550bf000cf00064752550bf000', '', 'completed', 'count', '');
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (11, 6, 1, 1767268800000000, true, 'run', '', 'main', '96e101a5-3496-8b33-b185-f6379fe08366', '\xc746358bb56d1b668310d5f369cd65aaa5bdf5040b5c1b5bd0997c33e8944927', NULL, '\x459b26a42e88cc2ae7d2cb47406494d470cf398e490c72c97127cce602f8614bdc0018a56772617068a473686f70b036363061363339316262623865363863a6717565756564cf00064752550bf000a0a00000ffc090c0a76f726465722d37c420c99089193f7c515f4e820cd10843e61cd5cae15808b9938a184886d6196224c5c43585a56c696d6974c0a66265666f726590a5616674657290a86d6574616461746180a5696e70757481a66261736b657491a47065617200c0a0a0cf00064752550bf000c0cf00064752550bf000c0', '', 'queued', 'shop', '660a6391bbb8e68c');
INSERT INTO golden.record OVERRIDING SYSTEM VALUE VALUES (12, 7, 2, NULL, false, 'run', '', 'main', '01a1ed77-76fb-7000-a4d8-7d08ec552486', '\x77c06714229b51a1549e680b6c3f97f61ed7d30f5312aa5387c07021e2779a07', NULL, '\x9ae291da42f7051ab7749c6cb05176caa9ae9a13c48f347462c2625a411a66b9dc0018a773657373696f6ea773657373696f6ea0a9636f6d706c65746564c0a0d9493031323334353637383961626364656620612d626f6f742d746861742d69732d6f766572207069643a5b315d2b74696d653a5b325d2037203520676f6c64656e20776f726b65722d330100ffc090c0c0c400c000c0ad6f7574206f6620627564676574b1696d706f727420746865206f7264657273cf000660879aa8c134cf000660879aa8c134cf000660879aa905b5cf000660879aa905b5', '', 'completed', 'session', '');


--
-- Data for Name: ref; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.ref VALUES (1, 0, false, '\xc5d70b9cb63bc277c73a16bb25c9804eb26f87e062367cdeaae26460d414ca55');
INSERT INTO golden.ref VALUES (2, 0, false, '\xc5d70b9cb63bc277c73a16bb25c9804eb26f87e062367cdeaae26460d414ca55');
INSERT INTO golden.ref VALUES (4, 0, false, '\x643d3c5e37a9e26aab1f284c262cba8e8213baa6501aa414868a63492382bfff');
INSERT INTO golden.ref VALUES (4, 1, true, '\x');
INSERT INTO golden.ref VALUES (5, 0, false, '\x11ddd1c97d01e85c8080132888a1af13643fd4295904b691dfeb654d6fb750a7');


--
-- Data for Name: tag; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.tag VALUES (4294967297, 'start');
INSERT INTO golden.tag VALUES (4294967298, 'good');


--
-- Data for Name: thread; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.thread OVERRIDING SYSTEM VALUE VALUES (1, 10, NULL, '', 'chat');
INSERT INTO golden.thread OVERRIDING SYSTEM VALUE VALUES (2, 2, 4, '', 'edits');
INSERT INTO golden.thread OVERRIDING SYSTEM VALUE VALUES (3, 1, 5, '', 'shop');
INSERT INTO golden.thread OVERRIDING SYSTEM VALUE VALUES (4, 2, 6, '', 'left');
INSERT INTO golden.thread OVERRIDING SYSTEM VALUE VALUES (5, 1, 7, '', 'count');
INSERT INTO golden.thread OVERRIDING SYSTEM VALUE VALUES (6, 1, NULL, '', 'queued');
INSERT INTO golden.thread OVERRIDING SYSTEM VALUE VALUES (7, 1, NULL, '', 'nightly');
INSERT INTO golden.thread OVERRIDING SYSTEM VALUE VALUES (8, 2, 8, 'other', 'chat');


--
-- Data for Name: write; Type: TABLE DATA; Schema: golden; Owner: -
--

INSERT INTO golden.write VALUES (1, 40, '', '\x01006333', '\x017461736b', '\x93a09500a76368616e6e656ca16d01c408a6616e737765722a9501a56f74686572a16c02c40201022eb5ce7f');


--
-- Name: branch_id_seq; Type: SEQUENCE SET; Schema: golden; Owner: -
--

SELECT pg_catalog.setval('golden.branch_id_seq', 8, true);


--
-- Name: record_number_seq; Type: SEQUENCE SET; Schema: golden; Owner: -
--

SELECT pg_catalog.setval('golden.record_number_seq', 12, true);


--
-- Name: thread_id_seq; Type: SEQUENCE SET; Schema: golden; Owner: -
--

SELECT pg_catalog.setval('golden.thread_id_seq', 8, true);


--
-- Name: blob blob_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.blob
    ADD CONSTRAINT blob_pkey PRIMARY KEY (digest);


--
-- Name: branch branch_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.branch
    ADD CONSTRAINT branch_pkey PRIMARY KEY (id);


--
-- Name: branch branch_thread_scope_name_key; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.branch
    ADD CONSTRAINT branch_thread_scope_name_key UNIQUE (thread, scope, name);


--
-- Name: checkpoint checkpoint_id_key; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.checkpoint
    ADD CONSTRAINT checkpoint_id_key UNIQUE (id);


--
-- Name: checkpoint checkpoint_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.checkpoint
    ADD CONSTRAINT checkpoint_pkey PRIMARY KEY (key);


--
-- Name: chunk chunk_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.chunk
    ADD CONSTRAINT chunk_pkey PRIMARY KEY (address);


--
-- Name: fresh fresh_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.fresh
    ADD CONSTRAINT fresh_pkey PRIMARY KEY (slot);


--
-- Name: record record_id_key; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.record
    ADD CONSTRAINT record_id_key UNIQUE (id);


--
-- Name: record record_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.record
    ADD CONSTRAINT record_pkey PRIMARY KEY (kind, number);


--
-- Name: ref ref_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.ref
    ADD CONSTRAINT ref_pkey PRIMARY KEY (branch, stream, digest);


--
-- Name: tag tag_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.tag
    ADD CONSTRAINT tag_pkey PRIMARY KEY (checkpoint, name);


--
-- Name: thread thread_namespace_name_key; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.thread
    ADD CONSTRAINT thread_namespace_name_key UNIQUE (namespace, name);


--
-- Name: thread thread_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.thread
    ADD CONSTRAINT thread_pkey PRIMARY KEY (id);


--
-- Name: write write_pkey; Type: CONSTRAINT; Schema: golden; Owner: -
--

ALTER TABLE ONLY golden.write
    ADD CONSTRAINT write_pkey PRIMARY KEY (thread, scope, checkpoint, task);


--
-- Name: branch_leased; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX branch_leased ON golden.branch USING btree (expires, id) WHERE (token IS NOT NULL);


--
-- Name: branch_origin; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX branch_origin ON golden.branch USING btree (origin) WHERE (origin IS NOT NULL);


--
-- Name: checkpoint_side; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX checkpoint_side ON golden.checkpoint USING btree (parent) WHERE side;


--
-- Name: record_branch; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX record_branch ON golden.record USING btree (thread, scope, branch, number) WHERE (status IS NOT NULL);


--
-- Name: record_checkpoint; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX record_checkpoint ON golden.record USING btree (checkpoint) WHERE (checkpoint IS NOT NULL);


--
-- Name: record_due; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX record_due ON golden.record USING btree (namespace, graph, fingerprint, due, number) WHERE (due IS NOT NULL);


--
-- Name: record_graph; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX record_graph ON golden.record USING btree (namespace, graph, status, number) WHERE (status IS NOT NULL);


--
-- Name: record_open; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX record_open ON golden.record USING btree (kind, number) WHERE open;


--
-- Name: record_status; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX record_status ON golden.record USING btree (namespace, status, number) WHERE (status IS NOT NULL);


--
-- Name: record_thread; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX record_thread ON golden.record USING btree (thread, kind, number);


--
-- Name: ref_source; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX ref_source ON golden.ref USING btree (stream, digest);


--
-- Name: tag_name; Type: INDEX; Schema: golden; Owner: -
--

CREATE INDEX tag_name ON golden.tag USING btree (name, checkpoint);


--
-- PostgreSQL database dump complete
--


