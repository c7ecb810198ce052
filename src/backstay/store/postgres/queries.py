"""All SQL statements of the PostgreSQL store, by name. Values are always bound; {schema} is a checked, quoted name.

Another user of the database may plant functions and operators in a schema of the search path, and a pooler does not
keep a search path of ours. So every function is called with its schema, except ``unnest`` of several arrays, which
PostgreSQL itself takes from pg_catalog. Operators get operands with exactly the types of one of PostgreSQL's own, so
that no planted operator is preferred: the casts in the arithmetic are necessary.

Every write checks that the schema still has the version that its process opened: a function gets {version}, any other
statement has {current} among its conditions, and a transaction of several statements starts with it.
"""

from backstay.store.postgres.rows import BASE_NAME, BRANCH_COLUMNS, PAYLOAD_COLUMNS, ROW_COLUMNS, WRITE_COLUMNS

_BRANCH = "{schema}.thread t JOIN {schema}.branch br ON br.thread = t.id"
_PAYLOAD = "LEFT JOIN {schema}.blob b ON b.id = c.base LEFT JOIN {schema}.checkpoint p ON p.id = c.parent"

BEGIN = "BEGIN; SELECT {current}"
BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"

# Reading ----------------------------------------------------------------------------------------------------------

HEAD = f"""
SELECT {BRANCH_COLUMNS}, br.last_seq, br.epoch,
  ARRAY(SELECT r.stream FROM {{schema}}.stream_ref r WHERE r.branch = br.id AND r.owned ORDER BY r.stream),
  ARRAY(SELECT greatest(
          (SELECT k.address + k.size FROM {{schema}}.chunk k
           WHERE k.address >= r.stream << 28 AND k.address < (r.stream + 1) << 28 ORDER BY k.address DESC LIMIT 1),
          (SELECT pg_catalog.max(f.address + pg_catalog.length(f.body)) FROM {{schema}}.fresh f
           WHERE f.slot >= r.stream << 7 AND f.slot < (r.stream + 1) << 7))
        FROM {{schema}}.stream_ref r WHERE r.branch = br.id AND r.owned ORDER BY r.stream),
  {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, {WRITE_COLUMNS}
FROM {_BRANCH} LEFT JOIN {{schema}}.checkpoint c ON c.key = br.id << 32 | br.head {_PAYLOAD}
WHERE t.namespace = %s AND t.name = %s AND br.scope = %s AND br.name = %s"""

BRANCHES = f"""
SELECT {BRANCH_COLUMNS}, (SELECT c.id FROM {{schema}}.checkpoint c WHERE c.key = br.id << 32 | br.head),
  br.head, br.last_seq, br.epoch, br.origin
FROM {_BRANCH}
WHERE t.namespace = %(namespace)s AND (%(thread)s::text IS NULL OR t.name = %(thread)s)
  AND (%(scope)s::text IS NULL OR br.scope = %(scope)s) AND (br.last_seq <> 0 OR br.head <> 0)
ORDER BY br.id"""

_BY_ID = """
FROM pg_catalog.unnest(%(ids)s::bytea[]) wanted JOIN {schema}.checkpoint c ON c.id = wanted
JOIN {schema}.branch br ON br.id = c.key >> 32 JOIN {schema}.thread t ON t.id = br.thread"""
ROWS_BY_ID = f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS} {_BY_ID} WHERE true"
ROWS_BY_ID_WITH_WRITES = f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS}, {WRITE_COLUMNS} {_BY_ID} WHERE true"
ROWS_BY_ID_WITH_PAYLOAD = f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_BY_ID} {_PAYLOAD} WHERE true"
ROWS_BY_ID_WITH_BOTH = (
    f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, {WRITE_COLUMNS} {_BY_ID} {_PAYLOAD} WHERE true"
)

_OF_BRANCHES = f"""
FROM {_BRANCH} CROSS JOIN LATERAL (
  SELECT c.* FROM {{schema}}.checkpoint c
  WHERE c.key > br.id << 32 AND c.key < (br.id << 32) + %(before)s {{conditions}}
  ORDER BY c.key DESC LIMIT %(limit)s) c"""
_OF_BRANCHES_WHERE = """
WHERE t.namespace = %(namespace)s AND t.name = %(thread)s
  AND (%(scope)s::text IS NULL OR br.scope = %(scope)s) AND (%(branch)s::text IS NULL OR br.name = %(branch)s)
ORDER BY c.key & 4294967295 DESC LIMIT %(limit)s"""
ROWS_OF_BRANCHES = f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS} {_OF_BRANCHES} {_OF_BRANCHES_WHERE}"
ROWS_OF_BRANCHES_WITH_WRITES = (
    f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS}, {WRITE_COLUMNS} {_OF_BRANCHES} {_OF_BRANCHES_WHERE}"
)
ROWS_OF_BRANCHES_WITH_PAYLOAD = (
    f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_OF_BRANCHES} {_PAYLOAD} {_OF_BRANCHES_WHERE}"
)
ROWS_OF_BRANCHES_WITH_BOTH = f"""
SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, {WRITE_COLUMNS}
{_OF_BRANCHES} {_PAYLOAD} {_OF_BRANCHES_WHERE}"""

_HEADS = """
FROM {schema}.thread t
JOIN LATERAL (
  SELECT * FROM {schema}.branch n
  WHERE n.thread = t.id AND (n.last_seq <> 0 OR n.head <> 0) AND (%(scope)s::text IS NULL OR n.scope = %(scope)s)
  ORDER BY n.head DESC LIMIT 1) br ON true
LEFT JOIN {schema}.checkpoint c ON c.key = br.id << 32 | br.head
WHERE t.namespace = %(namespace)s AND (%(before)s::bigint IS NULL OR t.id < %(before)s)
  AND (c.key IS NULL OR (true {conditions}))
ORDER BY t.id DESC LIMIT %(limit)s"""
HEADS_OF_THREADS = f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS} {_HEADS}"
HEADS_OF_THREADS_WITH_WRITES = f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS}, {WRITE_COLUMNS} {_HEADS}"

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
BRANCH_NUMBER = f"""
SELECT br.id FROM {_BRANCH} WHERE t.namespace = %s AND t.name = %s AND br.scope = %s AND br.name = %s
FOR NO KEY UPDATE OF br"""
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
MOVE_BRANCH = """
WITH moved AS (UPDATE {schema}.branch SET head = %(seq)s, last_seq = %(seq)s WHERE id = %(branch)s RETURNING thread)
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
TO_DELETE = """
SELECT c.key, c.key = (br.id << 32 | br.head), br.epoch, br.owner, br.token,
  coalesce(extract(epoch FROM br.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint,
  t.namespace, t.name, br.scope, br.name,
  EXISTS (SELECT 1 FROM {schema}.record r WHERE r.checkpoint = c.id AND r.open),
  EXISTS (SELECT 1 FROM {schema}.tag g WHERE g.checkpoint = c.key),
  EXISTS (SELECT 1 FROM {schema}.branch o WHERE o.origin = c.id)
FROM {schema}.checkpoint c JOIN {schema}.branch br ON br.id = c.key >> 32 JOIN {schema}.thread t ON t.id = br.thread
WHERE c.id = ANY(%s::bytea[])"""
BRANCHES_OF_THREAD = """
SELECT br.id, br.epoch, br.owner, br.token,
  coalesce(extract(epoch FROM br.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint,
  t.namespace, t.name, br.scope, br.name
FROM {schema}.branch br JOIN {schema}.thread t ON t.id = br.thread
WHERE t.namespace = %s AND t.name = %s ORDER BY br.id"""
THREADS_OF = """
SELECT DISTINCT br.thread FROM {schema}.checkpoint c JOIN {schema}.branch br ON br.id = c.key >> 32
WHERE c.id = ANY(%s::bytea[])"""
THREAD = "SELECT id FROM {schema}.thread WHERE namespace = %s AND name = %s"
LOCK_BRANCHES = "SELECT id FROM {schema}.branch WHERE thread = ANY(%s::bigint[]) ORDER BY id FOR UPDATE"
LOCK_THREADS = "SELECT id FROM {schema}.thread WHERE id = ANY(%s::bigint[]) ORDER BY id FOR UPDATE"
THREADS_SHARING = """
SELECT DISTINCT br.thread FROM {schema}.stream_ref r
JOIN {schema}.stream_ref s ON s.stream = r.stream JOIN {schema}.branch br ON br.id = s.branch
WHERE r.branch = ANY(%s::bigint[])"""
LOCK_CHECKPOINTS = "SELECT 1 FROM {schema}.checkpoint WHERE id = ANY(%s::bytea[]) ORDER BY key FOR UPDATE"
DROP_CHECKPOINTS = "DELETE FROM {schema}.checkpoint WHERE key = ANY(%s::bigint[]) RETURNING id, digest"
KEEP_PARENT_DIGESTS = """
UPDATE {schema}.checkpoint c SET parent_digest = d.digest
FROM unnest(%(ids)s::bytea[], %(digests)s::bytea[]) d (id, digest), {schema}.branch br
WHERE c.parent = d.id AND c.parent_digest IS NULL AND c.key <> %(but_not)s
  AND c.key > br.id << 32 AND c.key < (br.id + 1) << 32
  AND (br.id = ANY(%(branches)s::bigint[]) OR br.origin = ANY(%(ids)s::bytea[])
       OR (br.thread, br.scope) IN (
         SELECT s.thread, s.scope FROM {schema}.branch s WHERE s.id = ANY(%(branches)s::bigint[])))"""
KEEP_PARENT_DIGEST = "UPDATE {schema}.checkpoint SET parent_digest = %s WHERE key = %s"
DROP_TAGS = "DELETE FROM {schema}.tag WHERE checkpoint = ANY(%s::bigint[])"
DROP_WRITES = """
DELETE FROM {schema}.write w USING {schema}.branch br
WHERE br.id = ANY(%s::bigint[]) AND w.thread = br.thread AND w.scope = br.scope AND w.checkpoint = ANY(%s::bytea[])"""
DROP_RECORDS = "DELETE FROM {schema}.record WHERE checkpoint = ANY(%s::bytea[])"
KEYS_OF_BRANCHES = """
SELECT c.key FROM pg_catalog.unnest(%s::bigint[]) br
JOIN {schema}.checkpoint c ON c.key > br << 32 AND c.key < (br + 1) << 32"""
SETTLE_HEADS = """
UPDATE {schema}.branch br SET head = n.head FROM (
  SELECT i, (SELECT c.key & 4294967295 FROM {schema}.checkpoint c WHERE c.key > i << 32 AND c.key < (i + 1) << 32
             ORDER BY c.key DESC LIMIT 1) AS head
  FROM pg_catalog.unnest(%s::bigint[]) i) n
WHERE br.id = n.i AND n.head IS NOT NULL AND br.head <> n.head"""
DROP_EMPTY_BRANCHES = """
WITH emptied AS (
  DELETE FROM {schema}.branch br WHERE br.id = ANY(%s::bigint[]) AND NOT EXISTS (
    SELECT 1 FROM {schema}.checkpoint c WHERE c.key > br.id << 32 AND c.key < (br.id + 1) << 32)
  RETURNING br.id, br.thread, br.scope, br.name),
dropped AS (
  DELETE FROM {schema}.record r USING emptied br
  WHERE r.kind = 'effect' AND r.thread = br.thread AND r.scope = br.scope AND r.branch = br.name)
SELECT id FROM emptied"""
DROP_STREAM_REFS_OF_BRANCHES = "DELETE FROM {schema}.stream_ref WHERE branch = ANY(%s::bigint[])"
DROP_BLOB_REFS_OF_BRANCHES = "DELETE FROM {schema}.blob_ref WHERE branch = ANY(%s::bigint[])"
REFS_OF_BRANCHES = """
SELECT branch, stream, NULL::bytea FROM {schema}.stream_ref WHERE branch = ANY(%(branches)s::bigint[])
UNION ALL SELECT branch, NULL, digest FROM {schema}.blob_ref WHERE branch = ANY(%(branches)s::bigint[])"""
BRANCHES_REFERRING = "SELECT stream, branch FROM {schema}.stream_ref WHERE stream = ANY(%s::bigint[])"
MANIFESTS_OF_BRANCHES = f"""
SELECT c.key >> 32, {BASE_NAME}, c.manifest FROM pg_catalog.unnest(%s::bigint[]) br
JOIN {{schema}}.checkpoint c ON c.key > br << 32 AND c.key < (br + 1) << 32
LEFT JOIN {{schema}}.blob b ON b.id = c.base"""
DROP_STREAM_REFS = """
DELETE FROM {schema}.stream_ref r USING unnest(%s::bigint[], %s::bigint[]) d (branch, stream)
WHERE r.branch = d.branch AND r.stream = d.stream"""
DROP_BLOB_REFS = """
DELETE FROM {schema}.blob_ref r USING unnest(%s::bigint[], %s::bytea[]) d (branch, digest)
WHERE r.branch = d.branch AND r.digest = d.digest"""
LOCK_BLOBS = "SELECT 1 FROM {schema}.blob WHERE digest = ANY(%s::bytea[]) ORDER BY id FOR UPDATE"
DROP_BLOBS = """
DELETE FROM {schema}.blob b WHERE b.digest = ANY(%s::bytea[])
  AND NOT EXISTS (SELECT 1 FROM {schema}.blob_ref r WHERE r.digest = b.digest) RETURNING pg_catalog.length(b.body)"""
# The same bytes may be in `chunk` and in `fresh`, even at the same address, in rows of different lengths. So every row
# is judged by its own address and length, and deleted only from its own table.
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
DROP_BRANCHES_OF_THREAD = "DELETE FROM {schema}.branch WHERE thread = %s"
DROP_THREAD = "DELETE FROM {schema}.thread WHERE id = %s"

# Maintenance ------------------------------------------------------------------------------------------------------

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
BRANCH_FACTS = """
SELECT t.id, t.next_seq, t.namespace, t.name, br.scope, br.name, br.id, br.head, br.last_seq,
  coalesce((SELECT c.key & 4294967295 FROM {schema}.checkpoint c WHERE c.key > br.id << 32 AND c.key < (br.id + 1) << 32
            ORDER BY c.key DESC LIMIT 1), 0), br.token IS NOT NULL
FROM {schema}.branch br JOIN {schema}.thread t ON t.id = br.thread ORDER BY br.id"""
BRANCHES_LOST = """
SELECT branch FROM {schema}.stream_ref r WHERE NOT EXISTS (SELECT 1 FROM {schema}.branch br WHERE br.id = r.branch)
UNION
SELECT branch FROM {schema}.blob_ref r WHERE NOT EXISTS (SELECT 1 FROM {schema}.branch br WHERE br.id = r.branch)"""
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
WHERE NOT EXISTS (SELECT 1 FROM {{schema}}.branch br WHERE br.id = n.key >> 32)
UNION ALL SELECT 'branch', pg_catalog.count(*) FROM {{schema}}.branch n WHERE {_LOST}
UNION ALL SELECT 'write', pg_catalog.count(*) FROM {{schema}}.write n WHERE {_LOST}
UNION ALL SELECT n.kind, pg_catalog.count(*) FROM {{schema}}.record n WHERE {_LOST} GROUP BY n.kind"""
BLOB_NAMES = "SELECT digest FROM {schema}.blob"
ALL_ROW_SIZES = """
SELECT false AS is_fresh, address, size FROM {schema}.chunk
UNION ALL SELECT true, address, pg_catalog.length(body) FROM {schema}.fresh"""
STREAMS = "SELECT DISTINCT address >> 28 FROM {schema}.chunk ORDER BY 1"
OWNER_THREAD = """
SELECT br.thread FROM {schema}.stream_ref r JOIN {schema}.branch br ON br.id = r.branch WHERE r.stream = %s
ORDER BY r.owned DESC LIMIT 1"""  # or, without an owner, of any other branch that needs it
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
_LEFT = "coalesce(extract(epoch FROM br.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint"
ACQUIRE = "SELECT * FROM {schema}.acquire_lease({version}, %s, %s, %s, %s, %s, %s, %s)"
_NAMED = """t.id = br.thread AND t.namespace = %(namespace)s AND t.name = %(thread)s
  AND br.scope = %(scope)s AND br.name = %(name)s"""
RENEW = f"""
UPDATE {{schema}}.branch br SET expires = {_IN_A_WHILE}
FROM {{schema}}.thread t WHERE {_NAMED} AND br.epoch = %(epoch)s AND br.token = %(token)s AND {{current}}
RETURNING br.id"""
RELEASE = f"""
UPDATE {{schema}}.branch br SET owner = NULL, token = NULL, expires = NULL
FROM {{schema}}.thread t WHERE {_NAMED} AND br.epoch = %(epoch)s AND (br.token = %(token)s OR br.token IS NULL)
RETURNING br.id, br.thread, br.last_seq"""
DROP_UNUSED_BRANCH = "DELETE FROM {schema}.branch WHERE id = %s AND last_seq = 0 AND token IS NULL RETURNING thread"
DROP_UNUSED_THREAD = """
DELETE FROM {schema}.thread t WHERE t.id = %s AND t.next_seq = 1
  AND NOT EXISTS (SELECT 1 FROM {schema}.branch br WHERE br.thread = t.id)
  AND NOT EXISTS (SELECT 1 FROM {schema}.write w WHERE w.thread = t.id)
  AND NOT EXISTS (SELECT 1 FROM {schema}.record r WHERE r.thread = t.id)"""
LEASE = f"SELECT br.epoch, br.owner, {_LEFT} FROM {{schema}}.thread t, {{schema}}.branch br WHERE {_NAMED}"
LEASES = f"""
SELECT t.namespace, t.name, br.scope, br.name, br.id, br.owner, br.epoch, {_LEFT}
FROM {_BRANCH}
WHERE t.namespace = %(namespace)s AND (%(thread)s::text IS NULL OR t.name = %(thread)s) AND br.token IS NOT NULL
  AND (NOT %(expired)s OR br.expires <= pg_catalog.clock_timestamp())
ORDER BY br.expires, br.id"""
CLAIM = f"""
WITH mine AS (
  SELECT br.id, br.token = %(token)s AS held, br.expires
  FROM {{schema}}.branch br JOIN {{schema}}.thread t ON t.id = br.thread
  WHERE t.namespace = %(namespace)s AND br.token IS NOT NULL AND {{current}}
    AND (br.expires <= pg_catalog.clock_timestamp() OR br.token = %(token)s)
  ORDER BY br.token = %(token)s DESC, br.expires, br.id LIMIT %(count)s FOR NO KEY UPDATE OF br SKIP LOCKED),
taken AS (
  UPDATE {{schema}}.branch br SET epoch = CASE WHEN m.held THEN br.epoch ELSE br.epoch + 1 END,
    owner = %(owner)s, token = %(token)s, expires = {_IN_A_WHILE}
  FROM mine m, {{schema}}.thread t WHERE br.id = m.id AND t.id = br.thread
  RETURNING t.namespace, t.name AS thread, br.scope, br.name, br.id, br.epoch, m.held, m.expires)
SELECT namespace, thread, scope, name, id, epoch FROM taken ORDER BY held DESC, expires, id"""

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

# Repair -----------------------------------------------------------------------------------------------------------

# Every save starts by locking a branch or a thread, so none is in progress while these are held. Reads continue.
NO_SAVERS = "LOCK TABLE {schema}.branch, {schema}.thread IN EXCLUSIVE MODE"
SET_BRANCH = "UPDATE {schema}.branch SET head = %s, last_seq = %s WHERE id = %s"
SET_NEXT_SEQ = "UPDATE {schema}.thread SET next_seq = %s WHERE id = %s"
DROP_BRANCHES = "DELETE FROM {schema}.branch WHERE id = ANY(%s::bigint[])"
DROP_EMPTY_BRANCH = """
DELETE FROM {schema}.branch br WHERE br.id = %s AND NOT EXISTS (
  SELECT 1 FROM {schema}.checkpoint c WHERE c.key > br.id << 32 AND c.key < (br.id + 1) << 32) RETURNING br.id"""
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
SELECT c.key, c.digest, br.id, br.thread, br.epoch, br.owner, br.token,
  coalesce(extract(epoch FROM br.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint,
  t.namespace, t.name, br.scope, br.name
FROM {{schema}}.checkpoint c LEFT JOIN ({_BRANCH}) ON br.id = c.key >> 32 WHERE c.id = %s"""
PUT_CHECKPOINT = """
UPDATE {schema}.checkpoint SET parent = %s, parent_digest = %s, step = %s, created = %s, digest = %s, size = %s,
  notes = %s, base = (SELECT b.id FROM {schema}.blob b WHERE b.digest = %s), manifest = %s
WHERE key = %s"""
OUTDATE_WRITERS = """
WITH moved AS (
  UPDATE {schema}.branch br SET last_seq = t.next_seq FROM {schema}.thread t
  WHERE br.id = %s AND br.head = %s AND t.id = br.thread RETURNING br.thread, t.next_seq AS seq)
UPDATE {schema}.thread t SET next_seq = m.seq + 1 FROM moved m WHERE t.id = m.thread"""
