"""Every SQL statement of the PostgreSQL store, named. Values are always bound; {schema} is a checked, quoted name.

Another user of the database may plant functions and operators in a schema of the search path, and a pooler does not
keep a search path of ours. So every function is called by its schema; ``unnest`` of several arrays, which PostgreSQL
itself takes from pg_catalog, must be written without. Operators get operands of exactly the types of one of
PostgreSQL's own, which then no other is preferred to: the casts in the arithmetic here are not for show.

Every write makes sure that the schema still has the version that its process opened: a function is told {version}, any
other statement has {current} among its conditions, and a transaction of several statements begins with it.
"""

from backstay.store.postgres.rows import BASE_NAME, LANE_COLUMNS, PAYLOAD_COLUMNS, ROW_COLUMNS, WRITE_COLUMNS

_LANE = "{schema}.thread t JOIN {schema}.lane l ON l.thread = t.id"
_PAYLOAD = "LEFT JOIN {schema}.blob b ON b.id = c.base LEFT JOIN {schema}.checkpoint p ON p.id = c.parent"

BEGIN = "BEGIN; SELECT {current}"
BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"

# Reading ----------------------------------------------------------------------------------------------------------

HEAD = f"""
SELECT {LANE_COLUMNS}, l.last_seq, l.epoch,
  ARRAY(SELECT r.stream FROM {{schema}}.stream_ref r WHERE r.lane = l.id AND r.owned ORDER BY r.stream),
  ARRAY(SELECT greatest(
          (SELECT k.address + k.size FROM {{schema}}.chunk k
           WHERE k.address >= r.stream << 28 AND k.address < (r.stream + 1) << 28 ORDER BY k.address DESC LIMIT 1),
          (SELECT pg_catalog.max(f.address + pg_catalog.length(f.body)) FROM {{schema}}.fresh f
           WHERE f.slot >= r.stream << 7 AND f.slot < (r.stream + 1) << 7))
        FROM {{schema}}.stream_ref r WHERE r.lane = l.id AND r.owned ORDER BY r.stream),
  {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, {WRITE_COLUMNS}
FROM {_LANE} LEFT JOIN {{schema}}.checkpoint c ON c.key = l.id << 32 | l.head {_PAYLOAD}
WHERE t.namespace = %s AND t.name = %s AND l.scope = %s AND l.branch = %s"""

LANES = f"""
SELECT {LANE_COLUMNS}, (SELECT c.id FROM {{schema}}.checkpoint c WHERE c.key = l.id << 32 | l.head),
  l.head, l.last_seq, l.epoch, l.origin
FROM {_LANE}
WHERE t.namespace = %(namespace)s AND (%(thread)s::text IS NULL OR t.name = %(thread)s)
  AND (%(scope)s::text IS NULL OR l.scope = %(scope)s) AND (l.last_seq <> 0 OR l.head <> 0)
ORDER BY l.id"""

_BY_ID = """
FROM pg_catalog.unnest(%(ids)s::bytea[]) wanted JOIN {schema}.checkpoint c ON c.id = wanted
JOIN {schema}.lane l ON l.id = c.key >> 32 JOIN {schema}.thread t ON t.id = l.thread"""
ROWS_BY_ID = f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS} {_BY_ID} WHERE true"
ROWS_BY_ID_WITH_WRITES = f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS}, {WRITE_COLUMNS} {_BY_ID} WHERE true"
ROWS_BY_ID_WITH_PAYLOAD = f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_BY_ID} {_PAYLOAD} WHERE true"
ROWS_BY_ID_WITH_BOTH = (
    f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, {WRITE_COLUMNS} {_BY_ID} {_PAYLOAD} WHERE true"
)

_OF_LANES = f"""
FROM {_LANE} CROSS JOIN LATERAL (
  SELECT c.* FROM {{schema}}.checkpoint c
  WHERE c.key > l.id << 32 AND c.key < (l.id << 32) + %(before)s {{conditions}}
  ORDER BY c.key DESC LIMIT %(limit)s) c"""
_OF_LANES_WHERE = """
WHERE t.namespace = %(namespace)s AND t.name = %(thread)s
  AND (%(scope)s::text IS NULL OR l.scope = %(scope)s) AND (%(branch)s::text IS NULL OR l.branch = %(branch)s)
ORDER BY c.key & 4294967295 DESC LIMIT %(limit)s"""
ROWS_OF_LANES = f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS} {_OF_LANES} {_OF_LANES_WHERE}"
ROWS_OF_LANES_WITH_WRITES = f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS}, {WRITE_COLUMNS} {_OF_LANES} {_OF_LANES_WHERE}"
ROWS_OF_LANES_WITH_PAYLOAD = (
    f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_OF_LANES} {_PAYLOAD} {_OF_LANES_WHERE}"
)
ROWS_OF_LANES_WITH_BOTH = (
    f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, {WRITE_COLUMNS} {_OF_LANES} {_PAYLOAD} {_OF_LANES_WHERE}"
)

_HEADS = """
FROM {schema}.thread t
JOIN LATERAL (
  SELECT * FROM {schema}.lane n
  WHERE n.thread = t.id AND (n.last_seq <> 0 OR n.head <> 0) AND (%(scope)s::text IS NULL OR n.scope = %(scope)s)
  ORDER BY n.head DESC LIMIT 1) l ON true
LEFT JOIN {schema}.checkpoint c ON c.key = l.id << 32 | l.head
WHERE t.namespace = %(namespace)s AND (%(before)s::bigint IS NULL OR t.id < %(before)s)
  AND (c.key IS NULL OR (true {conditions}))
ORDER BY t.id DESC LIMIT %(limit)s"""
HEADS_OF_THREADS = f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS} {_HEADS}"
HEADS_OF_THREADS_WITH_WRITES = f"SELECT {LANE_COLUMNS}, {ROW_COLUMNS}, {WRITE_COLUMNS} {_HEADS}"

AND_STEP_MAX = " AND c.step <= %(step_max)s"
AND_TAG = " AND EXISTS (SELECT 1 FROM {schema}.tag g WHERE g.checkpoint = c.key AND g.name = %(tag)s)"

BYTES = """
SELECT r.n, k.address, NULL::bytea, k.size, k.body
FROM unnest(%(first)s::bigint[], %(start)s::bigint[], %(end)s::bigint[]) WITH ORDINALITY r (first, start, stop, n)
CROSS JOIN LATERAL (
  SELECT c.address, c.size, c.body FROM {schema}.chunk c
  WHERE c.address >= coalesce(
      (SELECT pg_catalog.max(e.address) FROM {schema}.chunk e
       WHERE e.address <= r.start AND e.address >= r.first), r.start)
    AND c.address < r.stop
  UNION ALL
  SELECT f.address, pg_catalog.length(f.body), f.body FROM {schema}.fresh f
  WHERE f.slot >= r.first >> 21 AND f.slot < (r.first >> 21) + 128
    AND f.address < r.stop AND f.address + pg_catalog.length(f.body) > r.start) k
UNION ALL
SELECT 0, NULL, b.digest, b.size, b.body FROM {schema}.blob b WHERE b.digest = ANY(%(blobs)s::bytea[])"""

# Writing ----------------------------------------------------------------------------------------------------------

APPEND = """
SELECT {schema}.append_checkpoint({version}, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"""
COMMIT = """
SELECT * FROM {schema}.commit_checkpoint(
  {version}, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,
  %s::bigint[], %s::bytea[], %s::bigint[], %s::int[], %s::bytea[],
  %s::bytea[], %s::int[], %s::bytea[], %s::bigint[], %s::boolean[], %s::bytea[], %s::text[], %s, %s, %s, %s)"""

IDENTITIES = "SELECT id, key, digest FROM {schema}.checkpoint WHERE id = ANY(%s::bytea[])"
LANE_NUMBER = f"""
SELECT l.id FROM {_LANE} WHERE t.namespace = %s AND t.name = %s AND l.scope = %s AND l.branch = %s
FOR NO KEY UPDATE OF l"""
PUT_BLOBS = "SELECT {schema}.put_blobs(%s::bytea[], %s::int[], %s::bytea[])"
BLOB_IDS = "SELECT digest, id FROM {schema}.blob WHERE digest = ANY(%s::bytea[])"
COPY_CHECKPOINTS = """
COPY {schema}.checkpoint (key, id, parent, parent_digest, step, created, digest, size, notes, base, manifest)
FROM STDIN (FORMAT BINARY)"""
COPY_CHUNKS = "COPY {schema}.chunk (address, size, body) FROM STDIN (FORMAT BINARY)"
COPY_TAGS = "COPY {schema}.tag (checkpoint, name) FROM STDIN (FORMAT BINARY)"
ADD_STREAM_REFS = """
INSERT INTO {schema}.stream_ref SELECT %s, s, o FROM unnest(%s::bigint[], %s::boolean[]) u (s, o)
ON CONFLICT DO NOTHING"""
ADD_BLOB_REFS = """
INSERT INTO {schema}.blob_ref SELECT %s, d FROM pg_catalog.unnest(%s::bytea[]) d ON CONFLICT DO NOTHING"""
MOVE_LANE = """
WITH moved AS (UPDATE {schema}.lane SET head = %(seq)s, last_seq = %(seq)s WHERE id = %(lane)s RETURNING thread)
UPDATE {schema}.thread t SET next_seq = %(seq)s + 1 FROM moved m WHERE t.id = m.thread"""

RESERVE = "UPDATE {schema}.counter SET value = value + %s WHERE name = 'stream' AND {current} RETURNING value"

_WRITES = "SELECT * FROM {schema}.put_writes({version}, %s, %s, %s, %s, %s::bytea[], %s::int[], %s::bytea[]"
ADD_WRITES = f"{_WRITES})"
SWAP_WRITES = f"{_WRITES}, p_was => %s::bytea[])"

TAG = """
WITH found AS (SELECT key FROM {schema}.checkpoint WHERE id = %(id)s AND {current} FOR KEY SHARE),
added AS (INSERT INTO {schema}.tag SELECT f.key, n FROM found f, pg_catalog.unnest(%(add)s::text[]) n
          WHERE n <> ALL(%(remove)s::text[]) ON CONFLICT DO NOTHING),
removed AS (DELETE FROM {schema}.tag g USING found f WHERE g.checkpoint = f.key AND g.name = ANY(%(remove)s::text[]))
SELECT ARRAY(SELECT g.name FROM {schema}.tag g WHERE g.checkpoint = f.key
             UNION SELECT pg_catalog.unnest(%(add)s::text[])
             EXCEPT SELECT pg_catalog.unnest(%(remove)s::text[]))
FROM found f"""

# Deleting ---------------------------------------------------------------------------------------------------------

ONE_DELETER = "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('backstay delete {schema}', 0))"
IDLE_LIMIT = "SET LOCAL idle_in_transaction_session_timeout = '60s'"
DOOMED = """
SELECT c.key, c.key = (l.id << 32 | l.head), l.epoch, l.owner, l.token,
  coalesce(extract(epoch FROM l.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint,
  t.namespace, t.name, l.scope, l.branch,
  EXISTS (SELECT 1 FROM {schema}.record r WHERE r.checkpoint = c.id AND r.open),
  EXISTS (SELECT 1 FROM {schema}.tag g WHERE g.checkpoint = c.key),
  EXISTS (SELECT 1 FROM {schema}.lane o WHERE o.origin = c.id)
FROM {schema}.checkpoint c JOIN {schema}.lane l ON l.id = c.key >> 32 JOIN {schema}.thread t ON t.id = l.thread
WHERE c.id = ANY(%s::bytea[])"""
LANES_OF_THREAD = """
SELECT l.id, l.epoch, l.owner, l.token,
  coalesce(extract(epoch FROM l.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint,
  t.namespace, t.name, l.scope, l.branch
FROM {schema}.lane l JOIN {schema}.thread t ON t.id = l.thread WHERE t.namespace = %s AND t.name = %s ORDER BY l.id"""
THREADS_OF = """
SELECT DISTINCT l.thread FROM {schema}.checkpoint c JOIN {schema}.lane l ON l.id = c.key >> 32
WHERE c.id = ANY(%s::bytea[])"""
THREAD = "SELECT id FROM {schema}.thread WHERE namespace = %s AND name = %s"
LOCK_LANES = "SELECT id FROM {schema}.lane WHERE thread = ANY(%s::bigint[]) ORDER BY id FOR UPDATE"
LOCK_THREADS = "SELECT id FROM {schema}.thread WHERE id = ANY(%s::bigint[]) ORDER BY id FOR UPDATE"
THREADS_SHARING = """
SELECT DISTINCT l.thread FROM {schema}.stream_ref r
JOIN {schema}.stream_ref s ON s.stream = r.stream JOIN {schema}.lane l ON l.id = s.lane
WHERE r.lane = ANY(%s::bigint[])"""
LOCK_CHECKPOINTS = "SELECT 1 FROM {schema}.checkpoint WHERE id = ANY(%s::bytea[]) ORDER BY key FOR UPDATE"
DROP_CHECKPOINTS = "DELETE FROM {schema}.checkpoint WHERE key = ANY(%s::bigint[]) RETURNING id, digest"
KEEP_PARENT_DIGESTS = """
UPDATE {schema}.checkpoint c SET parent_digest = d.digest
FROM unnest(%(ids)s::bytea[], %(digests)s::bytea[]) d (id, digest), {schema}.lane l
WHERE c.parent = d.id AND c.parent_digest IS NULL AND c.key <> %(but_not)s
  AND c.key > l.id << 32 AND c.key < (l.id + 1) << 32
  AND (l.id = ANY(%(lanes)s::bigint[]) OR l.origin = ANY(%(ids)s::bytea[])
       OR (l.thread, l.scope) IN (
         SELECT s.thread, s.scope FROM {schema}.lane s WHERE s.id = ANY(%(lanes)s::bigint[])))"""
KEEP_PARENT_DIGEST = "UPDATE {schema}.checkpoint SET parent_digest = %s WHERE key = %s"
DROP_TAGS = "DELETE FROM {schema}.tag WHERE checkpoint = ANY(%s::bigint[])"
DROP_WRITES = """
DELETE FROM {schema}.write w USING {schema}.lane l
WHERE l.id = ANY(%s::bigint[]) AND w.thread = l.thread AND w.scope = l.scope AND w.checkpoint = ANY(%s::bytea[])"""
DROP_RECORDS = "DELETE FROM {schema}.record WHERE checkpoint = ANY(%s::bytea[])"
KEYS_OF_LANES = """
SELECT c.key FROM pg_catalog.unnest(%s::bigint[]) l
JOIN {schema}.checkpoint c ON c.key > l << 32 AND c.key < (l + 1) << 32"""
SETTLE_HEADS = """
UPDATE {schema}.lane l SET head = n.head FROM (
  SELECT i, (SELECT c.key & 4294967295 FROM {schema}.checkpoint c WHERE c.key > i << 32 AND c.key < (i + 1) << 32
             ORDER BY c.key DESC LIMIT 1) AS head
  FROM pg_catalog.unnest(%s::bigint[]) i) n
WHERE l.id = n.i AND n.head IS NOT NULL AND l.head <> n.head"""
DROP_EMPTY_LANES = """
WITH emptied AS (
  DELETE FROM {schema}.lane l WHERE l.id = ANY(%s::bigint[]) AND NOT EXISTS (
    SELECT 1 FROM {schema}.checkpoint c WHERE c.key > l.id << 32 AND c.key < (l.id + 1) << 32)
  RETURNING l.id, l.thread, l.scope, l.branch),
dropped AS (
  DELETE FROM {schema}.record r USING emptied l
  WHERE r.kind = 'effect' AND r.thread = l.thread AND r.scope = l.scope AND r.branch = l.branch)
SELECT id FROM emptied"""
DROP_STREAM_REFS_OF_LANES = "DELETE FROM {schema}.stream_ref WHERE lane = ANY(%s::bigint[])"
DROP_BLOB_REFS_OF_LANES = "DELETE FROM {schema}.blob_ref WHERE lane = ANY(%s::bigint[])"
REFS_OF_LANES = """
SELECT lane, stream, NULL::bytea FROM {schema}.stream_ref WHERE lane = ANY(%(lanes)s::bigint[])
UNION ALL SELECT lane, NULL, digest FROM {schema}.blob_ref WHERE lane = ANY(%(lanes)s::bigint[])"""
LANES_REFERRING = "SELECT stream, lane FROM {schema}.stream_ref WHERE stream = ANY(%s::bigint[])"
MANIFESTS_OF_LANES = f"""
SELECT c.key >> 32, {BASE_NAME}, c.manifest FROM pg_catalog.unnest(%s::bigint[]) l
JOIN {{schema}}.checkpoint c ON c.key > l << 32 AND c.key < (l + 1) << 32
LEFT JOIN {{schema}}.blob b ON b.id = c.base"""
DROP_STREAM_REFS = """
DELETE FROM {schema}.stream_ref r USING unnest(%s::bigint[], %s::bigint[]) d (lane, stream)
WHERE r.lane = d.lane AND r.stream = d.stream"""
DROP_BLOB_REFS = """
DELETE FROM {schema}.blob_ref r USING unnest(%s::bigint[], %s::bytea[]) d (lane, digest)
WHERE r.lane = d.lane AND r.digest = d.digest"""
LOCK_BLOBS = "SELECT 1 FROM {schema}.blob WHERE digest = ANY(%s::bytea[]) ORDER BY id FOR UPDATE"
DROP_BLOBS = """
DELETE FROM {schema}.blob b WHERE b.digest = ANY(%s::bytea[])
  AND NOT EXISTS (SELECT 1 FROM {schema}.blob_ref r WHERE r.digest = b.digest) RETURNING pg_catalog.length(b.body)"""
# The same bytes may be in `chunk` and in `fresh`, also at the same address, in rows of different lengths. So every row
# is judged by its own address and length, and is deleted from its own table only.
ROW_SIZES = """
SELECT false AS is_fresh, k.address, k.size FROM pg_catalog.unnest(%(streams)s::bigint[]) s
JOIN {schema}.chunk k ON k.address >= s << 28 AND k.address < (s + 1) << 28
UNION ALL
SELECT true, f.address, pg_catalog.length(f.body) FROM pg_catalog.unnest(%(streams)s::bigint[]) s
JOIN {schema}.fresh f ON f.slot >= s << 7 AND f.slot < (s + 1) << 7"""
BLOB_SIZE = "SELECT size FROM {schema}.blob WHERE digest = %s"
IDENTITY = "SELECT key, digest FROM {schema}.checkpoint WHERE id = %s"
DROP_CHUNKS = "DELETE FROM {schema}.chunk WHERE address = ANY(%s::bigint[]) RETURNING pg_catalog.length(body)"
DROP_FRESH = """
DELETE FROM {schema}.fresh f USING pg_catalog.unnest(%s::bigint[]) a
WHERE f.slot = (a >> 28 << 7) | ((a >> 9) & 127::bigint) AND f.address = a RETURNING pg_catalog.length(body)"""
DROP_WRITES_OF_THREAD = "DELETE FROM {schema}.write WHERE thread = %s"
DROP_RECORDS_OF_THREAD = "DELETE FROM {schema}.record WHERE thread = %s"
DROP_LANES_OF_THREAD = "DELETE FROM {schema}.lane WHERE thread = %s"
DROP_THREAD = "DELETE FROM {schema}.thread WHERE id = %s"

# Upkeep -----------------------------------------------------------------------------------------------------------

TABLE_BYTES = """
SELECT coalesce(pg_catalog.sum(pg_catalog.pg_total_relation_size(c.oid)), 0)::bigint FROM pg_catalog.pg_class c
WHERE c.relnamespace = %s::regnamespace::oid AND c.relkind = 'r'"""
BLOB_SIZES = "SELECT digest, pg_catalog.length(body) FROM {schema}.blob"
STREAM_SIZES = """
SELECT s.address >> 28, pg_catalog.sum(s.bytes)::bigint FROM (
  SELECT address, pg_catalog.length(body) AS bytes FROM {schema}.chunk
  UNION ALL SELECT address, pg_catalog.length(body) FROM {schema}.fresh) s
GROUP BY 1"""
ROW_BYTES = """
SELECT coalesce(pg_catalog.sum(pg_catalog.length(manifest) + pg_catalog.length(notes)), 0)::bigint
FROM {schema}.checkpoint"""
LANE_FACTS = """
SELECT t.id, t.next_seq, t.namespace, t.name, l.scope, l.branch, l.id, l.head, l.last_seq,
  coalesce((SELECT c.key & 4294967295 FROM {schema}.checkpoint c WHERE c.key > l.id << 32 AND c.key < (l.id + 1) << 32
            ORDER BY c.key DESC LIMIT 1), 0), l.token IS NOT NULL
FROM {schema}.lane l JOIN {schema}.thread t ON t.id = l.thread ORDER BY l.id"""
LANES_LOST = """
SELECT lane FROM {schema}.stream_ref r WHERE NOT EXISTS (SELECT 1 FROM {schema}.lane l WHERE l.id = r.lane)
UNION SELECT lane FROM {schema}.blob_ref r WHERE NOT EXISTS (SELECT 1 FROM {schema}.lane l WHERE l.id = r.lane)"""
TAGS_WITHOUT_CHECKPOINT = """
SELECT checkpoint, name FROM {schema}.tag g
WHERE NOT EXISTS (SELECT 1 FROM {schema}.checkpoint c WHERE c.key = g.checkpoint)"""
RECORDS_WITHOUT_CHECKPOINT = """
SELECT r.id, r.kind, r.key, t.name, r.checkpoint
FROM {schema}.record r LEFT JOIN {schema}.thread t ON t.id = r.thread
WHERE r.checkpoint IS NOT NULL AND NOT EXISTS (SELECT 1 FROM {schema}.checkpoint c WHERE c.id = r.checkpoint)"""
_LOST = "NOT EXISTS (SELECT 1 FROM {schema}.thread t WHERE t.id = n.thread)"
UNREACHABLE = f"""
SELECT 'checkpoint', pg_catalog.count(*) FROM {{schema}}.checkpoint n
WHERE NOT EXISTS (SELECT 1 FROM {{schema}}.lane l WHERE l.id = n.key >> 32)
UNION ALL SELECT 'branch', pg_catalog.count(*) FROM {{schema}}.lane n WHERE {_LOST}
UNION ALL SELECT 'write', pg_catalog.count(*) FROM {{schema}}.write n WHERE {_LOST}
UNION ALL SELECT n.kind, pg_catalog.count(*) FROM {{schema}}.record n WHERE {_LOST} GROUP BY n.kind"""
BLOB_NAMES = "SELECT digest FROM {schema}.blob"
ALL_ROW_SIZES = """
SELECT false AS is_fresh, address, size FROM {schema}.chunk
UNION ALL SELECT true, address, pg_catalog.length(body) FROM {schema}.fresh"""
STREAMS = "SELECT DISTINCT address >> 28 FROM {schema}.chunk ORDER BY 1"
OWNER_THREAD = """
SELECT l.thread FROM {schema}.stream_ref r JOIN {schema}.lane l ON l.id = r.lane WHERE r.stream = %s
ORDER BY r.owned DESC LIMIT 1"""  # or, if the owner is gone, of any other branch that needs it
CHUNKS_OF_STREAM = """
SELECT address, size, body FROM {schema}.chunk WHERE address >= %s AND address < %s ORDER BY address"""
FRESH_ROWS = """
SELECT greatest(f.address, h.stop), pg_catalog.substr(f.body, greatest(h.stop - f.address, 0)::int + 1)
FROM {schema}.fresh f
LEFT JOIN LATERAL (
  SELECT k.address + k.size AS stop FROM {schema}.chunk k
  WHERE k.address < f.address + pg_catalog.length(f.body) ORDER BY k.address DESC LIMIT 1) h ON true
WHERE f.slot >= %(start)s >> 28 << 7 AND f.slot < (%(start)s >> 28 << 7) + 128
  AND f.address >= %(start)s AND f.address < %(end)s AND f.address + pg_catalog.length(f.body) > coalesce(h.stop, 0)
ORDER BY f.address"""
ADD_CHUNK = "INSERT INTO {schema}.chunk VALUES (%s, %s, %s)"

# Leases -----------------------------------------------------------------------------------------------------------

_IN_A_WHILE = "pg_catalog.clock_timestamp() + %(ttl_us)s::double precision * interval '1 microsecond'"
_LEFT = "coalesce(extract(epoch FROM l.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint"
ACQUIRE = "SELECT * FROM {schema}.acquire_lease({version}, %s, %s, %s, %s, %s, %s, %s)"
_NAMED = """t.id = l.thread AND t.namespace = %(namespace)s AND t.name = %(thread)s
  AND l.scope = %(scope)s AND l.branch = %(branch)s"""
RENEW = f"""
UPDATE {{schema}}.lane l SET expires = {_IN_A_WHILE}
FROM {{schema}}.thread t WHERE {_NAMED} AND l.epoch = %(epoch)s AND l.token = %(token)s AND {{current}}
RETURNING l.id"""
RELEASE = f"""
UPDATE {{schema}}.lane l SET owner = NULL, token = NULL, expires = NULL
FROM {{schema}}.thread t WHERE {_NAMED} AND l.epoch = %(epoch)s AND (l.token = %(token)s OR l.token IS NULL)
RETURNING l.id, l.thread, l.last_seq"""
DROP_UNUSED_LANE = "DELETE FROM {schema}.lane WHERE id = %s AND last_seq = 0 AND token IS NULL RETURNING thread"
DROP_UNUSED_THREAD = """
DELETE FROM {schema}.thread t WHERE t.id = %s AND t.next_seq = 1
  AND NOT EXISTS (SELECT 1 FROM {schema}.lane l WHERE l.thread = t.id)
  AND NOT EXISTS (SELECT 1 FROM {schema}.write w WHERE w.thread = t.id)
  AND NOT EXISTS (SELECT 1 FROM {schema}.record r WHERE r.thread = t.id)"""
LEASE = f"SELECT l.epoch, l.owner, {_LEFT} FROM {{schema}}.thread t, {{schema}}.lane l WHERE {_NAMED}"
LEASES = f"""
SELECT t.namespace, t.name, l.scope, l.branch, l.id, l.owner, l.epoch, {_LEFT}
FROM {_LANE}
WHERE t.namespace = %(namespace)s AND (%(thread)s::text IS NULL OR t.name = %(thread)s) AND l.token IS NOT NULL
  AND (NOT %(expired)s OR l.expires <= pg_catalog.clock_timestamp())
ORDER BY l.expires, l.id"""
CLAIM = f"""
WITH mine AS (
  SELECT l.id, l.token = %(token)s AS held, l.expires FROM {{schema}}.lane l JOIN {{schema}}.thread t ON t.id = l.thread
  WHERE t.namespace = %(namespace)s AND l.token IS NOT NULL AND {{current}}
    AND (l.expires <= pg_catalog.clock_timestamp() OR l.token = %(token)s)
  ORDER BY l.token = %(token)s DESC, l.expires, l.id LIMIT %(count)s FOR NO KEY UPDATE OF l SKIP LOCKED),
taken AS (
  UPDATE {{schema}}.lane l SET epoch = CASE WHEN m.held THEN l.epoch ELSE l.epoch + 1 END,
    owner = %(owner)s, token = %(token)s, expires = {_IN_A_WHILE}
  FROM mine m, {{schema}}.thread t WHERE l.id = m.id AND t.id = l.thread
  RETURNING t.namespace, t.name, l.scope, l.branch, l.id, l.epoch, m.held, m.expires)
SELECT namespace, name, scope, branch, id, epoch FROM taken ORDER BY held DESC, expires, id"""

# Records ----------------------------------------------------------------------------------------------------------

_RECORD = """
SELECT r.kind, t.namespace, t.name, r.scope, r.branch, r.key, r.checkpoint, r.body, r.open, r.version, r.number,
  coalesce(extract(epoch FROM r.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint
FROM {schema}.record r JOIN {schema}.thread t ON t.id = r.thread"""
RECORD = f"{_RECORD} WHERE r.id = %s"
RECORDS = f"""{_RECORD}
WHERE t.namespace = %(namespace)s AND r.kind = %(kind)s AND r.number > %(after)s {{conditions}}
ORDER BY r.number LIMIT %(limit)s"""
AND_THREAD = " AND t.name = %(thread)s"
AND_OPEN = " AND r.open"
PUT_RECORD = """
SELECT * FROM {schema}.put_record(
  {version}, %s, %s, %s, %s, %s, %s::bigint, %s::text,
  %s, %s, %s, %s::bytea, %s, %s, %s::bigint, %s::bigint, %s::bigint)"""

# Mending ----------------------------------------------------------------------------------------------------------

# Every saver begins with a lane or a thread, so none is under way once these are held. Readers go on.
NO_SAVERS = "LOCK TABLE {schema}.lane, {schema}.thread IN EXCLUSIVE MODE"
SET_LANE = "UPDATE {schema}.lane SET head = %s, last_seq = %s WHERE id = %s"
SET_NEXT_SEQ = "UPDATE {schema}.thread SET next_seq = %s WHERE id = %s"
DROP_LANES = "DELETE FROM {schema}.lane WHERE id = ANY(%s::bigint[])"
DROP_EMPTY_LANE = """
DELETE FROM {schema}.lane l WHERE l.id = %s AND NOT EXISTS (
  SELECT 1 FROM {schema}.checkpoint c WHERE c.key > l.id << 32 AND c.key < (l.id + 1) << 32) RETURNING l.id"""
DROP_TAG = "DELETE FROM {schema}.tag WHERE checkpoint = %s AND name = %s"
DROP_RECORD = "DELETE FROM {schema}.record WHERE id = %s"
PUT_BLOB = """
INSERT INTO {schema}.blob AS b (digest, size, body) VALUES (%s, %s, %s)
ON CONFLICT (digest) DO UPDATE SET size = excluded.size, body = excluded.body"""
CHUNKS_TOUCHING = """
SELECT address, size, body FROM {schema}.chunk
WHERE address >= coalesce((
    SELECT pg_catalog.max(e.address) FROM {schema}.chunk e
    WHERE e.address <= %(start)s AND e.address >= %(stream)s), %(start)s)
  AND address < %(end)s FOR UPDATE"""
FRESH_TOUCHING = """
SELECT f.address, pg_catalog.length(f.body), f.body, f.slot FROM {schema}.fresh f
WHERE f.slot >= %(stream)s >> 21 AND f.slot < (%(stream)s >> 21) + 128
  AND f.address < %(end)s AND f.address + pg_catalog.length(f.body) > %(start)s FOR UPDATE"""
PUT_CHUNK = """
INSERT INTO {schema}.chunk VALUES (%s, %s, %s)
ON CONFLICT (address) DO UPDATE SET size = excluded.size, body = excluded.body"""
DROP_CHUNK = "DELETE FROM {schema}.chunk WHERE address = %s"
PUT_FRESH = "UPDATE {schema}.fresh SET body = %s WHERE slot = %s"
PLACE = f"""
SELECT c.key, c.digest, l.id, l.thread, l.epoch, l.owner, l.token,
  coalesce(extract(epoch FROM l.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint,
  t.namespace, t.name, l.scope, l.branch
FROM {{schema}}.checkpoint c LEFT JOIN ({_LANE}) ON l.id = c.key >> 32 WHERE c.id = %s"""
PUT_CHECKPOINT = """
UPDATE {schema}.checkpoint SET parent = %s, parent_digest = %s, step = %s, created = %s, digest = %s, size = %s,
  notes = %s, base = (SELECT b.id FROM {schema}.blob b WHERE b.digest = %s), manifest = %s
WHERE key = %s"""
OUTDATE_WRITERS = """
WITH moved AS (
  UPDATE {schema}.lane l SET last_seq = t.next_seq FROM {schema}.thread t
  WHERE l.id = %s AND l.head = %s AND t.id = l.thread RETURNING l.thread, t.next_seq AS seq)
UPDATE {schema}.thread t SET next_seq = m.seq + 1 FROM moved m WHERE t.id = m.thread"""
