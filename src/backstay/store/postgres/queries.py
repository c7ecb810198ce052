"""All SQL statements of the PostgreSQL store, by name. Values are always bound; {schema} is a checked, quoted name.

Another user of the database may plant functions and operators in a schema of the search path, and a pooler does not
keep a search path of ours. So every function is called with its schema, except ``unnest`` of several arrays, which
PostgreSQL itself takes from pg_catalog. Operators get operands with exactly the types of one of PostgreSQL's own, so
that no planted operator is preferred: the casts in the arithmetic are necessary.

Every write checks that the schema still has the version that its process opened: a function gets {version}, any other
statement has {current} among its conditions, and a transaction of several statements starts with it.
"""

from backstay.store.postgres.rows import BRANCH_COLUMNS, PAYLOAD_COLUMNS, ROW_COLUMNS, WRITE_COLUMNS

_BRANCH = "{schema}.thread t JOIN {schema}.branch br ON br.thread = t.id"
# The thread of a dropped branch that was alone has the next number itself again.
_NUMBERED = """numbered AS (
  UPDATE {schema}.thread t SET next_seq = greatest(t.next_seq, e.last_seq + 1), alone = NULL FROM emptied e
  WHERE t.id = e.thread AND t.alone = e.id)"""
_PAYLOAD = "LEFT JOIN {schema}.blob b ON b.digest = c.base LEFT JOIN {schema}.checkpoint p ON p.id = c.parent"

BEGIN = "BEGIN; SELECT {current}"
# Only one delete runs at a time. Its statements are about given rows, so the planner need not guess how many there are.
BEGIN_DELETE = f"""{BEGIN}; SET LOCAL idle_in_transaction_session_timeout = '60s'; SET LOCAL enable_seqscan = off;
SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off;
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('backstay delete {{schema}}', 0))"""
BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"

# Reading ----------------------------------------------------------------------------------------------------------

HEAD = f"""
SELECT {BRANCH_COLUMNS}, br.last_seq, br.epoch,
  ARRAY(SELECT r.stream FROM {{schema}}.ref r WHERE r.branch = br.id AND r.owned ORDER BY r.stream),
  ARRAY(SELECT greatest(
          (SELECT k.address + k.size FROM {{schema}}.chunk k
           WHERE k.address >= r.stream << 28 AND k.address < (r.stream + 1) << 28 ORDER BY k.address DESC LIMIT 1),
          (SELECT pg_catalog.max(f.address + pg_catalog.length(f.body)) FROM {{schema}}.fresh f
           WHERE f.slot >= r.stream << 6 AND f.slot < (r.stream + 1) << 6))
        FROM {{schema}}.ref r WHERE r.branch = br.id AND r.owned ORDER BY r.stream),
  {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, {WRITE_COLUMNS}
FROM {_BRANCH} LEFT JOIN {{schema}}.checkpoint c ON c.key = br.id << 32 | br.head {_PAYLOAD}
WHERE t.namespace = %s AND t.name = %s AND br.scope = %s AND br.name = %s"""

BRANCHES = f"""
SELECT {BRANCH_COLUMNS}, (SELECT c.id FROM {{schema}}.checkpoint c WHERE c.key = br.id << 32 | br.head),
  br.head, br.last_seq, br.epoch, br.origin
FROM {_BRANCH}
WHERE t.namespace = %(namespace)s {{conditions}} AND (br.last_seq <> 0 OR br.head <> 0) AND br.id > %(after)s
ORDER BY br.id LIMIT %(limit)s"""
AND_THREAD = "AND t.name = %(thread)s"
AND_SCOPE = "AND br.scope = %(scope)s"
AND_BRANCH = "AND br.name = %(branch)s"
FORKED = "SELECT DISTINCT origin FROM {schema}.branch WHERE origin = ANY(%s::bytea[])"

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
WHERE t.namespace = %(namespace)s AND t.name = %(thread)s {branches}
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
WHERE t.namespace = %(namespace)s AND t.id < %(before)s
  AND (c.key IS NULL OR (true {conditions}))
ORDER BY t.id DESC LIMIT %(limit)s"""
HEADS_OF_THREADS = f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS} {_HEADS}"
HEADS_OF_THREADS_WITH_WRITES = f"SELECT {BRANCH_COLUMNS}, {ROW_COLUMNS}, {WRITE_COLUMNS} {_HEADS}"

AND_TAG = " AND EXISTS (SELECT 1 FROM {schema}.tag g WHERE g.checkpoint = c.key AND g.name = %(tag)s)"

BYTES = """
SELECT r.n, k.address, NULL::bytea, k.size, k.body, k.checks
FROM unnest(%(first)s::bigint[], %(start)s::bigint[], %(end)s::bigint[]) WITH ORDINALITY r (first, start, stop, n)
CROSS JOIN LATERAL (
  SELECT c.address, c.size, c.body, NULL::bytea AS checks FROM {schema}.chunk c
  WHERE c.address >= coalesce(
      (SELECT pg_catalog.max(e.address) FROM {schema}.chunk e
       WHERE e.address <= r.start AND e.address >= r.first), r.start)
    AND c.address < r.stop
  UNION ALL
  SELECT f.address, pg_catalog.length(f.body), f.body, f.checks FROM {schema}.fresh f
  WHERE f.slot >= r.first >> 22 AND f.slot < (r.first >> 22) + 64
    AND f.address < r.stop AND f.address + pg_catalog.length(f.body) > r.start) k
UNION ALL
SELECT 0, NULL, b.digest, b.size, b.body, NULL FROM {schema}.blob b WHERE b.digest = ANY(%(blobs)s::bytea[])"""

# Writing ----------------------------------------------------------------------------------------------------------

FRESH_CONFLICT = """ON CONFLICT (slot) DO UPDATE SET
    address = CASE WHEN f.address >> 16 = excluded.address >> 16 THEN f.address ELSE excluded.address END,
    body = CASE WHEN f.address >> 16 = excluded.address >> 16 THEN f.body || excluded.body ELSE excluded.body END,
    checks = CASE WHEN f.address >> 16 = excluded.address >> 16 THEN f.checks ELSE ''::bytea END || excluded.checks
  WHERE CASE WHEN f.address >> 16 = excluded.address >> 16
    THEN f.address + pg_catalog.length(f.body) = excluded.address
    ELSE f.address + pg_catalog.length(f.body) <= (
      SELECT k.address + k.size FROM {schema}.chunk k
      WHERE k.address < f.address + pg_catalog.length(f.body) ORDER BY k.address DESC LIMIT 1)
    END"""
"""The rule of ``put_fresh`` for a slot that is in use."""


def _append(is_leased: bool, is_alone: bool, has_bytes: bool) -> str:
    """Return the statement of a plain save, which changes everything or nothing: see ``checkpoints.is_plain``.

    It has no function around it and touches as few tables as possible, because most of its time is spent on that. It
    fails if the branch is not as the writer expects: then ``commit_checkpoint`` finds out why.
    """
    seq = "br.last_seq + 1" if is_alone else "t.next_seq"
    extend = ", expires = pg_catalog.clock_timestamp() + $10::double precision * interval '1 microsecond'"
    numbered = """
numbered AS (
  UPDATE {schema}.thread t SET next_seq = m.seq + 1 FROM moved m WHERE t.id = m.thread AND t.next_seq = m.seq
  RETURNING 1),"""
    put = f"""
put AS (
  INSERT INTO {{schema}}.fresh AS f SELECT $8, $9, $17, $19 FROM moved {FRESH_CONFLICT} RETURNING 1),"""
    return f"""
WITH moved AS (
  UPDATE {{schema}}.branch br SET head = {seq}, last_seq = {seq}{extend if is_leased else ""}
  {"" if is_alone else "FROM {schema}.thread t"}
  WHERE br.id = $1 AND br.last_seq = $2 AND br.head = $3 AND br.epoch = $4
    AND {"br.alone" if is_alone else "NOT br.alone AND t.id = br.thread AND t.alone IS NULL"}
    AND {"br.token = $18" if is_leased else "(br.expires IS NULL OR br.expires <= pg_catalog.clock_timestamp())"}
    AND (SELECT m.version FROM {{schema}}.meta m) = {{version}}
  RETURNING br.last_seq AS seq, br.thread),{"" if is_alone else numbered}{put if has_bytes else ""}
added AS (
  INSERT INTO {{schema}}.checkpoint
    (key, side, id, parent, parent_digest, step, created, digest, size, notes, base, manifest)
  SELECT $1 << 32 | m.seq, $12 IS DISTINCT FROM (SELECT h.id FROM {{schema}}.checkpoint h WHERE h.key = $1 << 32 | $3),
    $11, $12, ''::bytea, $5, $6, $13, $7, $14, $15, $16
  FROM moved m{"" if is_alone else ", numbered"}{", put" if has_bytes else ""} RETURNING 1)
SELECT CASE WHEN EXISTS (SELECT 1 FROM added) THEN (SELECT m.seq FROM moved m) ELSE {{schema}}.refuse_append() END"""


_BYTEA, _INT8, _TEXT = 17, 20, 25
APPEND_TYPES = (*[_INT8] * 10, *[_BYTEA] * 7, _TEXT, _BYTEA)
"""The types of the parameters of ``APPEND``, as PostgreSQL numbers them."""
APPEND = {
    (is_leased, is_alone, has_bytes): _append(is_leased, is_alone, has_bytes)
    for is_leased in (False, True)
    for is_alone in (False, True)
    for has_bytes in (False, True)
}
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
COPY_CHECKPOINTS = """
COPY {schema}.checkpoint (key, side, id, parent, parent_digest, step, created, digest, size, notes, base, manifest)
FROM STDIN (FORMAT BINARY)"""
COPY_CHUNKS = "COPY {schema}.chunk (address, size, body) FROM STDIN (FORMAT BINARY)"
COPY_TAGS = "COPY {schema}.tag (checkpoint, name) FROM STDIN (FORMAT BINARY)"
ADD_REFS = """
INSERT INTO {schema}.ref SELECT %s, u.* FROM unnest(%s::bigint[], %s::boolean[], %s::bytea[]) u
ON CONFLICT DO NOTHING"""
MOVE_BRANCH = """
WITH moved AS (UPDATE {schema}.branch SET head = %(seq)s, last_seq = %(seq)s WHERE id = %(branch)s RETURNING thread)
UPDATE {schema}.thread t SET next_seq = %(seq)s + 1 FROM moved m WHERE t.id = m.thread"""

RESERVE = "UPDATE {schema}.counter SET value = value + %s WHERE {current} RETURNING value"

_WRITES = "SELECT * FROM {schema}.put_writes({version}, %s, %s, %s, %s, %s::bytea[], %s::int[], %s::bytea[]"
ADD_WRITES = f"{_WRITES})"
SWAP_WRITES = f"{_WRITES}, p_was => %s::bytea[])"

TAG = """
WITH found AS (SELECT key FROM {schema}.checkpoint WHERE id = %(id)s AND {current} FOR KEY SHARE),
wanted AS (SELECT f.key, ARRAY(SELECT g.name FROM {schema}.tag g WHERE g.checkpoint = f.key
                               UNION SELECT pg_catalog.unnest(%(add)s::text[])
                               EXCEPT SELECT pg_catalog.unnest(%(remove)s::text[])) AS names
           FROM found f),
allowed AS (SELECT key FROM wanted WHERE pg_catalog.cardinality(names) <= %(most)s),
added AS (INSERT INTO {schema}.tag SELECT a.key, n FROM allowed a, pg_catalog.unnest(%(add)s::text[]) n
          WHERE n <> ALL(%(remove)s::text[]) ON CONFLICT DO NOTHING),
removed AS (DELETE FROM {schema}.tag g USING allowed a WHERE g.checkpoint = a.key AND g.name = ANY(%(remove)s::text[]))
SELECT names FROM wanted"""

# Deleting ---------------------------------------------------------------------------------------------------------

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
  ARRAY(SELECT c.key FROM {schema}.checkpoint c WHERE c.key > br.id << 32 AND c.key < (br.id + 1) << 32),
  coalesce(extract(epoch FROM br.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint,
  t.namespace, t.name, br.scope, br.name
FROM {schema}.branch br JOIN {schema}.thread t ON t.id = br.thread
WHERE t.namespace = %s AND t.name = %s ORDER BY br.id FOR UPDATE OF br"""
THREADS_OF = """
SELECT DISTINCT br.thread FROM {schema}.checkpoint c JOIN {schema}.branch br ON br.id = c.key >> 32
WHERE c.id = ANY(%s::bytea[])"""
THREAD = "SELECT id FROM {schema}.thread WHERE namespace = %s AND name = %s"
LOCK_BRANCHES_AND_THREADS = """
WITH locked AS MATERIALIZED (
  SELECT id FROM {schema}.branch WHERE thread = ANY(%(threads)s::bigint[]) ORDER BY id FOR UPDATE)
SELECT id FROM {schema}.thread
WHERE id = ANY(%(threads)s::bigint[]) AND (SELECT pg_catalog.count(*) FROM locked) >= 0 ORDER BY id FOR UPDATE"""
LOCK_THREADS = "SELECT id FROM {schema}.thread WHERE id = ANY(%s::bigint[]) ORDER BY id FOR UPDATE"
# Branches may share many streams: each stream, and then each branch, is looked up only once.
THREADS_SHARING = """
SELECT DISTINCT br.thread FROM (
  SELECT DISTINCT s.branch
  FROM (SELECT DISTINCT stream FROM {schema}.ref WHERE branch = ANY(%s::bigint[]) AND stream > 0) r
  JOIN {schema}.ref s ON s.stream = r.stream) b
JOIN {schema}.branch br ON br.id = b.branch"""
LOCK_CHECKPOINTS = "SELECT 1 FROM {schema}.checkpoint WHERE id = ANY(%s::bytea[]) ORDER BY key FOR UPDATE"
# Deletes checkpoints with their tags, writes and records, and gives their children the digest. The children are found
# among all rows as they were before, so a row that is deleted too is left out. Returns each row with its neighbours.
DROP_CHECKPOINTS = """
WITH doomed AS MATERIALIZED (
  SELECT c.key, c.id, c.digest, c.base, c.manifest, br.thread, br.scope,
    coalesce(br.id << 32 | br.head = c.key, false) AS is_head,
    (SELECT p.key FROM {schema}.checkpoint p WHERE p.key < c.key AND p.key > c.key >> 32 << 32
     ORDER BY p.key DESC LIMIT 1) AS previous,
    (SELECT n.key FROM {schema}.checkpoint n WHERE n.key > c.key AND n.key < ((c.key >> 32) + 1) << 32
     ORDER BY n.key LIMIT 1) AS following
  FROM {schema}.checkpoint c LEFT JOIN {schema}.branch br ON br.id = c.key >> 32
  WHERE c.key = ANY(%(keys)s::bigint[])),
children AS MATERIALIZED (
  SELECT d.following AS key, d.id, d.digest FROM doomed d
  UNION ALL
  SELECT s.key, d.id, d.digest FROM doomed d JOIN {schema}.checkpoint s
    ON s.parent = coalesce(%(replaced)s::bytea, d.id) AND s.side),
gone AS (DELETE FROM {schema}.checkpoint WHERE key = ANY(%(keys)s::bigint[])),
untagged AS (DELETE FROM {schema}.tag WHERE checkpoint = ANY(%(keys)s::bigint[])),
unwritten AS (
  DELETE FROM {schema}.write w USING doomed d WHERE w.thread = d.thread AND w.scope = d.scope AND w.checkpoint = d.id),
unrecorded AS (DELETE FROM {schema}.record r USING doomed d WHERE r.checkpoint = d.id),
informed AS (
  UPDATE {schema}.checkpoint c SET parent_digest = h.digest FROM children h
  WHERE c.key = h.key AND c.parent = coalesce(%(replaced)s::bytea, h.id) AND c.parent_digest = ''::bytea
    AND c.key <> ALL(%(keys)s::bigint[]) AND c.key <> %(but_not)s::bigint)
SELECT key, is_head, previous, following, base, manifest FROM doomed"""
KEEP_PARENT_DIGEST = "UPDATE {schema}.checkpoint SET parent_digest = %s WHERE key = %s"
MANIFESTS = "SELECT key, base, manifest FROM {schema}.checkpoint WHERE key = ANY(%s::bigint[])"
BLOBS = "SELECT digest, size, body FROM {schema}.blob WHERE digest = ANY(%s::bytea[])"
_SETTLED = """settled AS (
  UPDATE {schema}.branch br SET head = n.head FROM (
    SELECT i, (SELECT c.key & 4294967295 FROM {schema}.checkpoint c WHERE c.key > i << 32 AND c.key < (i + 1) << 32
               ORDER BY c.key DESC LIMIT 1) AS head
    FROM pg_catalog.unnest(%(branches)s::bigint[]) i) n
  WHERE br.id = n.i AND n.head IS NOT NULL AND br.head <> n.head),
emptied AS (
  DELETE FROM {schema}.branch br WHERE br.id = ANY(%(branches)s::bigint[]) AND NOT EXISTS (
    SELECT 1 FROM {schema}.checkpoint c WHERE c.key > br.id << 32 AND c.key < (br.id + 1) << 32)
  RETURNING br.id, br.thread, br.last_seq, br.scope, br.name),
unreferred AS (
  DELETE FROM {schema}.ref r USING emptied e WHERE r.branch = e.id RETURNING r.branch, r.stream, r.digest)"""
# Gives branches their newest row as the head, and drops those without a row; returns them with what they referred to.
SETTLE_BRANCHES = f"""WITH {_SETTLED},
{_NUMBERED}
SELECT id, NULL::bigint, NULL::bytea FROM emptied UNION ALL SELECT branch, stream, digest FROM unreferred"""
SETTLE_BRANCHES_AND_EFFECTS = f"""WITH {_SETTLED},
{_NUMBERED},
dropped AS (
  DELETE FROM {{schema}}.record r USING emptied br
  WHERE r.kind = 'effect' AND r.thread = br.thread AND r.scope = br.scope AND r.branch = br.name)
SELECT id, NULL::bigint, NULL::bytea FROM emptied UNION ALL SELECT branch, stream, digest FROM unreferred"""
DROP_REFS_OF_BRANCHES = "DELETE FROM {schema}.ref WHERE branch = ANY(%s::bigint[])"
REFS_OF_BRANCHES = "SELECT branch, stream, digest FROM {schema}.ref WHERE branch = ANY(%s::bigint[])"
BRANCHES_REFERRING = "SELECT stream, branch FROM {schema}.ref WHERE stream = ANY(%s::bigint[])"
MANIFESTS_OF_BRANCHES = """
SELECT c.key >> 32, c.base, c.manifest FROM pg_catalog.unnest(%s::bigint[]) br
JOIN {schema}.checkpoint c ON c.key > br << 32 AND c.key < (br + 1) << 32"""
DROP_REFS = """
DELETE FROM {schema}.ref r USING unnest(%s::bigint[], %s::bigint[], %s::bytea[]) d (branch, stream, digest)
WHERE r.branch = d.branch AND r.stream = d.stream AND r.digest = d.digest"""
LOCK_BLOBS = "SELECT 1 FROM {schema}.blob WHERE digest = ANY(%s::bytea[]) ORDER BY digest FOR UPDATE"
DROP_BLOBS = """
DELETE FROM {schema}.blob b WHERE b.digest = ANY(%s::bytea[])
  AND NOT EXISTS (SELECT 1 FROM {schema}.ref r WHERE r.stream = 0 AND r.digest = b.digest)
RETURNING pg_catalog.length(b.body)"""
# The same bytes may be in `chunk` and in `fresh`, even at the same address, in rows of different lengths. So every row
# is judged by its own address and length, and deleted only from its own table.
ROW_SIZES = """
SELECT false AS is_fresh, k.address, k.size FROM pg_catalog.unnest(%(streams)s::bigint[]) s
JOIN {schema}.chunk k ON k.address >= s << 28 AND k.address < (s + 1) << 28
UNION ALL
SELECT true, f.address, pg_catalog.length(f.body) FROM pg_catalog.unnest(%(streams)s::bigint[]) s
JOIN {schema}.fresh f ON f.slot >= s << 6 AND f.slot < (s + 1) << 6"""
BLOB_SIZE = "SELECT size FROM {schema}.blob WHERE digest = %s"
IDENTITY = "SELECT key, digest FROM {schema}.checkpoint WHERE id = %s"
DROP_CHUNKS = "DELETE FROM {schema}.chunk WHERE address = ANY(%s::bigint[]) RETURNING pg_catalog.length(body)"
DROP_FRESH = """
DELETE FROM {schema}.fresh f USING pg_catalog.unnest(%s::bigint[]) a
WHERE f.slot = (a >> 28 << 6) | ((a >> 10) & 63::bigint) AND f.address = a RETURNING pg_catalog.length(body)"""
DROP_THREAD = """
WITH unwritten AS (DELETE FROM {schema}.write WHERE thread = %(thread)s),
unrecorded AS (DELETE FROM {schema}.record WHERE thread = %(thread)s),
unbranched AS (DELETE FROM {schema}.branch WHERE thread = %(thread)s)
DELETE FROM {schema}.thread WHERE id = %(thread)s"""

# Maintenance ------------------------------------------------------------------------------------------------------

TABLE_BYTES = """
SELECT coalesce(pg_catalog.sum(pg_catalog.pg_total_relation_size(c.oid)), 0)::bigint FROM pg_catalog.pg_class c
WHERE c.relnamespace = %s::regnamespace::oid AND c.relkind = 'r'"""
TABLES_OF_OTHERS = """
SELECT c.relname FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
WHERE c.relnamespace = %s::regnamespace::oid AND c.relkind = 'r' AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')
AND NOT pg_catalog.pg_has_role(d.datdba, 'USAGE') ORDER BY 1"""
MAY_MAINTAIN = "SELECT pg_catalog.has_table_privilege(%s, 'MAINTAIN')"  # from PostgreSQL 17 on
BLOB_SIZES = "SELECT digest, pg_catalog.length(body) FROM {schema}.blob"
STREAM_SIZES = """
SELECT s.address >> 28, pg_catalog.sum(s.bytes)::bigint FROM (
  SELECT address, pg_catalog.length(body) AS bytes FROM {schema}.chunk
  UNION ALL SELECT address, pg_catalog.length(body) FROM {schema}.fresh) s
GROUP BY 1"""
OF_BLOBS = " WHERE digest = ANY(%s::bytea[])"
SIZES_OF_STREAMS = """
SELECT s.stream, pg_catalog.sum(s.bytes)::bigint FROM (
  SELECT s AS stream, pg_catalog.length(k.body) AS bytes FROM pg_catalog.unnest(%(streams)s::bigint[]) s
  JOIN {schema}.chunk k ON k.address >= s << 28 AND k.address < (s + 1) << 28
  UNION ALL
  SELECT s, pg_catalog.length(f.body) FROM pg_catalog.unnest(%(streams)s::bigint[]) s
  JOIN {schema}.fresh f ON f.slot >= s << 6 AND f.slot < (s + 1) << 6) s
GROUP BY 1"""
TOTALS = """
SELECT pg_catalog.count(DISTINCT b.thread), pg_catalog.count(*),
  coalesce(pg_catalog.sum(b.checkpoints), 0)::bigint, coalesce(pg_catalog.sum(b.bytes), 0)::bigint
FROM (
  SELECT br.thread, pg_catalog.count(c.key) AS checkpoints, pg_catalog.sum(c.size) AS bytes
  FROM {schema}.thread t JOIN {schema}.branch br ON br.thread = t.id
  LEFT JOIN {schema}.checkpoint c ON c.key >> 32 = br.id
  WHERE t.namespace = %s AND (br.head <> 0 OR br.last_seq <> 0) GROUP BY br.id) b"""
BRANCH_FACTS = """
SELECT t.id, CASE WHEN pg_catalog.bool_or(br.alone AND br.id IS DISTINCT FROM t.alone) OVER (PARTITION BY t.id) THEN 0
    ELSE greatest(t.next_seq, (SELECT a.last_seq + 1 FROM {schema}.branch a WHERE a.id = t.alone)) END,
  t.namespace, t.name, br.scope, br.name, br.id, br.head, br.last_seq,
  coalesce((SELECT c.key & 4294967295 FROM {schema}.checkpoint c WHERE c.key > br.id << 32 AND c.key < (br.id + 1) << 32
            ORDER BY c.key DESC LIMIT 1), 0), br.token IS NOT NULL
FROM {schema}.branch br JOIN {schema}.thread t ON t.id = br.thread ORDER BY br.id"""
BRANCHES_LOST = """
SELECT DISTINCT branch FROM {schema}.ref r
WHERE NOT EXISTS (SELECT 1 FROM {schema}.branch br WHERE br.id = r.branch)"""
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
SELECT br.thread FROM {schema}.ref r JOIN {schema}.branch br ON br.id = r.branch WHERE r.stream = %s
ORDER BY r.owned DESC LIMIT 1"""  # or, without an owner, of any other branch that needs it
CHUNKS_OF_STREAM = """
SELECT address, size, body FROM {schema}.chunk WHERE address >= %s AND address < %s ORDER BY address"""
FRESH_ROWS = """
SELECT f.address, f.body, f.checks, greatest(h.stop - f.address, 0)::int FROM {schema}.fresh f
LEFT JOIN LATERAL (
  SELECT k.address + k.size AS stop FROM {schema}.chunk k
  WHERE k.address < f.address + pg_catalog.length(f.body) ORDER BY k.address DESC LIMIT 1) h ON true
WHERE f.slot >= %(start)s >> 28 << 6 AND f.slot < (%(start)s >> 28 << 6) + 64
  AND f.address >= %(start)s AND f.address < %(end)s AND f.address + pg_catalog.length(f.body) > coalesce(h.stop, 0)
ORDER BY f.address"""
ADD_CHUNK = "INSERT INTO {schema}.chunk VALUES (%s, %s, %s)"

# Leases -----------------------------------------------------------------------------------------------------------

_IN_A_WHILE = "pg_catalog.clock_timestamp() + %(ttl_us)s::double precision * interval '1 microsecond'"
_LEFT = "coalesce(extract(epoch FROM br.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint"
ACQUIRE = "SELECT * FROM {schema}.acquire_lease({version}, %s, %s, %s, %s, %s, %s, %s, %s)"
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
DROP_UNUSED_BRANCH = f"""
WITH emptied AS (
  DELETE FROM {{schema}}.branch WHERE id = %s AND last_seq = 0 AND token IS NULL RETURNING id, thread, last_seq),
{_NUMBERED}
SELECT id FROM emptied"""
DROP_UNUSED_THREAD = """
DELETE FROM {schema}.thread t WHERE t.id = %s AND t.next_seq = 1
  AND NOT EXISTS (SELECT 1 FROM {schema}.branch br WHERE br.thread = t.id)
  AND NOT EXISTS (SELECT 1 FROM {schema}.write w WHERE w.thread = t.id)
  AND NOT EXISTS (SELECT 1 FROM {schema}.record r WHERE r.thread = t.id)"""
LEASE = f"SELECT br.epoch, br.owner, {_LEFT} FROM {{schema}}.thread t, {{schema}}.branch br WHERE {_NAMED}"
LEASES = f"""
SELECT t.namespace, t.name, br.scope, br.name, br.id, br.owner, br.epoch, {_LEFT}, br.token
FROM {_BRANCH}
WHERE t.namespace = %(namespace)s AND (%(thread)s::text IS NULL OR t.name = %(thread)s) AND br.token IS NOT NULL
  AND (NOT %(expired)s OR br.expires <= pg_catalog.clock_timestamp())
ORDER BY br.expires, br.id"""
# A claim locks the rows that it takes and waits for no lock: rows that others have locked are skipped.
_IS_FREE = """(br.id IS NULL OR br.token IS NULL OR br.expires <= pg_catalog.clock_timestamp()
      OR br.token = ANY(%(dead)s::text[]))"""
LEFT_RUNS = f"""
SELECT {{columns}}, br.epoch, br.id
FROM {{schema}}.record r JOIN {{schema}}.thread t ON t.id = r.thread
LEFT JOIN {{schema}}.branch br ON br.thread = r.thread AND br.scope = r.scope AND br.name = r.branch
WHERE r.namespace = %(namespace)s AND r.graph = ANY(%(graphs)s::text[]) AND r.status = 'running'
  AND (r.graph, r.fingerprint) IN (
    SELECT g, f FROM unnest(%(graphs)s::text[], %(fingerprints)s::text[]) u (g, f))
  AND r.number <> ALL(%(seen)s::bigint[]) AND {_IS_FREE} AND {{current}}
ORDER BY br.expires, r.number LIMIT %(count)s FOR NO KEY UPDATE OF r SKIP LOCKED"""
DUE_RUNS = f"""
SELECT {{columns}}, r.epoch, r.branch_id
FROM unnest(%(graphs)s::text[], %(fingerprints)s::text[]) u (g, f)
CROSS JOIN LATERAL (
  SELECT r.*, br.epoch, br.id AS branch_id FROM {{schema}}.record r
  LEFT JOIN {{schema}}.branch br ON br.thread = r.thread AND br.scope = r.scope AND br.name = r.branch
  WHERE r.due IS NOT NULL AND r.namespace = %(namespace)s AND r.graph = u.g AND r.fingerprint = u.f
    AND r.due <= %(now)s AND r.number <> ALL(%(seen)s::bigint[]) AND {_IS_FREE}
  ORDER BY r.due, r.number LIMIT %(count)s FOR NO KEY UPDATE OF r SKIP LOCKED) r
JOIN {{schema}}.thread t ON t.id = r.thread
WHERE {{current}} ORDER BY r.due, r.number LIMIT %(count)s"""
LOCK_BRANCHES_NOW = """
SELECT id FROM {schema}.branch WHERE id = ANY(%s::bigint[]) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED"""

# Records ----------------------------------------------------------------------------------------------------------

RECORD_COLUMNS = """r.id, r.kind, t.namespace, t.name, r.scope, r.branch, r.key, r.checkpoint, r.body, r.open,
  r.version, r.number, r.status, r.graph, r.fingerprint, r.due"""
_RECORD = f"""
SELECT {RECORD_COLUMNS}
FROM {{schema}}.record r JOIN {{schema}}.thread t ON t.id = r.thread"""
LEFT_RUNS = LEFT_RUNS.replace("{columns}", RECORD_COLUMNS)
DUE_RUNS = DUE_RUNS.replace("{columns}", RECORD_COLUMNS)
RECORD = f"{_RECORD} WHERE r.id = %s"
RECORDS = f"""{_RECORD}
WHERE t.namespace = %(namespace)s AND r.kind = %(kind)s AND r.number > %(after)s {{conditions}}
ORDER BY r.number LIMIT %(limit)s"""
AND_THREAD = " AND t.name = %(thread)s"
AND_OPEN = " AND r.open"
PUT_RECORD = """
SELECT * FROM {schema}.put_record(
  {version}, %s, %s, %s, %s, %s, %s::bigint, %s::text,
  %s, %s, %s, %s::bytea, %s, %s, %s::bigint, %s::bigint, %s::text, %s::text, %s::text, %s::bigint)"""
DROP_RECORDS = """
DELETE FROM {schema}.record r USING unnest(%s::bytea[], %s::bigint[]) d (id, version)
WHERE r.id = d.id AND r.version = d.version AND {current} RETURNING 1"""
_RUNS = f"""
SELECT {RECORD_COLUMNS}, br.id, br.owner, br.epoch, {_LEFT}, br.token, (
  SELECT c.step FROM {{schema}}.checkpoint c WHERE c.key = br.id << 32 | br.head)
FROM {{schema}}.record r JOIN {{schema}}.thread t ON t.id = r.thread
LEFT JOIN {{schema}}.branch br ON br.thread = r.thread AND br.scope = r.scope AND br.name = r.branch"""
RUN_OF_BRANCH = f"""{_RUNS}
WHERE t.namespace = %(namespace)s AND t.name = %(thread)s AND r.scope = %(scope)s AND r.branch = %(name)s
  AND r.status IS NOT NULL ORDER BY r.number DESC LIMIT 1"""
RUNS = f"""{_RUNS}
WHERE r.kind = 'run' AND r.namespace = %(namespace)s AND r.status IS NOT NULL AND r.number < %(before)s {{conditions}}
ORDER BY r.number DESC LIMIT %(limit)s"""
AND_STATUS = " AND r.status = %(status)s"
AND_GRAPH = " AND r.graph = %(graph)s"
# The newest runs of a graph with any status: of each status the newest, because the index is in that order.
RUNS_OF_GRAPH = f"""{_RUNS}
WHERE r.kind = 'run' AND r.number IN (
  SELECT n.number FROM pg_catalog.unnest(%(statuses)s::text[]) s (status) CROSS JOIN LATERAL (
    SELECT x.number FROM {{schema}}.record x
    WHERE x.namespace = %(namespace)s AND x.graph = %(graph)s AND x.status = s.status AND x.number < %(before)s
    ORDER BY x.number DESC LIMIT %(limit)s) n)
ORDER BY r.number DESC LIMIT %(limit)s"""
STATUSES_OF_GRAPH = """
WITH RECURSIVE found AS (
  (SELECT r.status FROM {schema}.record r WHERE r.status IS NOT NULL AND r.namespace = %(namespace)s
    AND r.graph = %(graph)s ORDER BY r.status LIMIT 1)
  UNION ALL
  SELECT (SELECT r.status FROM {schema}.record r WHERE r.status IS NOT NULL AND r.namespace = %(namespace)s
    AND r.graph = %(graph)s AND r.status > found.status ORDER BY r.status LIMIT 1)
  FROM found WHERE found.status IS NOT NULL)
SELECT status FROM found WHERE status IS NOT NULL"""
COUNT_RUNS = """
SELECT s.status, (SELECT pg_catalog.count(*) FROM {schema}.record r
  WHERE r.namespace = %s AND r.status = s.status AND r.status IS NOT NULL)
FROM pg_catalog.unnest(%s::text[]) s (status)"""

# Repair -----------------------------------------------------------------------------------------------------------

# Every save starts by locking a branch or a thread, so none is in progress while these are held. Reads continue.
NO_SAVERS = "LOCK TABLE {schema}.branch, {schema}.thread IN EXCLUSIVE MODE"
SET_BRANCH = "UPDATE {schema}.branch SET head = %s, last_seq = %s WHERE id = %s"
SET_NEXT_SEQ = """
WITH cleared AS (UPDATE {schema}.branch SET alone = false WHERE thread = %(thread)s AND alone)
UPDATE {schema}.thread SET next_seq = %(seq)s, alone = NULL WHERE id = %(thread)s"""
DROP_BRANCHES = f"""
WITH emptied AS (DELETE FROM {{schema}}.branch WHERE id = ANY(%s::bigint[]) RETURNING id, thread, last_seq),
{_NUMBERED}
SELECT id FROM emptied"""
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
SELECT f.address, f.body, f.checks, f.slot FROM {schema}.fresh f
WHERE f.slot >= %(stream)s >> 22 AND f.slot < (%(stream)s >> 22) + 64
  AND f.address < %(end)s AND f.address + pg_catalog.length(f.body) > %(start)s FOR UPDATE"""
PUT_CHUNK = """
INSERT INTO {schema}.chunk VALUES (%s, %s, %s)
ON CONFLICT (address) DO UPDATE SET size = excluded.size, body = excluded.body"""
DROP_CHUNK = "DELETE FROM {schema}.chunk WHERE address = %s"
PUT_FRESH = "UPDATE {schema}.fresh SET body = %s, checks = %s WHERE slot = %s"
PLACE = f"""
SELECT c.key, c.digest, br.id, br.thread, br.epoch, br.owner, br.token,
  coalesce(extract(epoch FROM br.expires - pg_catalog.clock_timestamp())::numeric * 1000000::numeric, 0)::bigint,
  t.namespace, t.name, br.scope, br.name
FROM {{schema}}.checkpoint c LEFT JOIN ({_BRANCH}) ON br.id = c.key >> 32 WHERE c.id = %s"""
PUT_CHECKPOINT = """
UPDATE {schema}.checkpoint SET parent = %s, parent_digest = %s, step = %s, created = %s, digest = %s, size = %s,
  notes = %s, base = %s, manifest = %s
WHERE key = %s"""
OUTDATE_WRITERS = """
WITH moved AS (
  UPDATE {schema}.branch br SET last_seq = greatest(t.next_seq, br.last_seq + 1) FROM {schema}.thread t
  WHERE br.id = %s AND br.head = %s AND t.id = br.thread RETURNING br.thread, br.last_seq AS seq)
UPDATE {schema}.thread t SET next_seq = m.seq + 1 FROM moved m WHERE t.id = m.thread"""
