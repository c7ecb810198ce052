"""All SQL statements of the SQLite store, by name. Values are always bound, never written into the text."""

ROW_COLUMNS = "c.key, c.id, c.parent, c.parent_digest, c.back, c.step, c.created, c.digest, c.size, c.notes, c.tags"
# If the base's row is missing its name is empty, which no blob has: that is damage, unlike a row without a base.
BASE_NAME = "iif(c.base IS NULL, NULL, coalesce(b.digest, x''))"
PAYLOAD_COLUMNS = f"{BASE_NAME}, b.size, b.body, c.manifest, p.digest"

# Threads and branches ------------------------------------------------------------------------------------------------
#
# Each is looked up through one index, and once more through another if it is not found.

BRANCH_COLUMNS = """t.id, t.floor, t.seal, br.id, br.head, br.last_seq, br.epoch, br.owner, br.token, br.expires,
  br.boot, br.origin, br.seal, br.lease_seal"""
_NAMES = "t.namespace, t.name, br.scope, br.name"
_BY_NAME = """
FROM thread t INDEXED BY thread_name CROSS JOIN branch br INDEXED BY branch_name ON br.thread = t.id"""
_NAMED = "WHERE t.namespace = ? AND t.name = ? AND br.scope = ? AND br.name = ?"
BRANCH = f"SELECT {BRANCH_COLUMNS} {_BY_NAME} {_NAMED}"
BRANCH_AGAIN = f"""
SELECT 1 FROM thread t INDEXED BY thread_again CROSS JOIN branch br INDEXED BY branch_again ON br.thread = t.id
{_NAMED}"""
BRANCH_BY_ID = f"""
SELECT {_NAMES}, {BRANCH_COLUMNS} FROM branch br CROSS JOIN thread t ON t.id = br.thread WHERE br.id = ?"""

_HAS_CHECKPOINT = "(br.last_seq <> 0 OR br.head <> 0)"
# The namespace is in a thread's row and in its index: if one of them is damaged, the seal of the thread shows it.
_IN_NAMESPACE = """(t.namespace = :namespace
  OR EXISTS (SELECT 1 FROM thread x INDEXED BY thread_listed WHERE x.namespace = :namespace AND x.id = {}.thread))"""
_LISTED_BRANCHES = f"AND (:scope IS NULL OR br.scope = :scope) AND {_HAS_CHECKPOINT} AND br.id > :after"
BRANCHES = f"""
SELECT {_NAMES}, {BRANCH_COLUMNS} FROM branch br LEFT JOIN thread t ON t.id = br.thread
WHERE (t.id IS NULL OR {_IN_NAMESPACE.format("br")}) {_LISTED_BRANCHES}
ORDER BY br.id LIMIT :limit"""
# A damaged row may have another number, and then a search by number goes the wrong way and misses its neighbours.
BRANCHES_COUNTED_TWICE = """
SELECT count(*), sum(id & 4294967295) FROM branch NOT INDEXED WHERE id > 0
UNION ALL SELECT count(*), sum(id & 4294967295) FROM branch INDEXED BY branch_again WHERE id > 0"""
BRANCHES_IN_THREAD = f"""
SELECT {_NAMES}, {BRANCH_COLUMNS} {_BY_NAME} WHERE t.namespace = :namespace AND t.name = :thread {_LISTED_BRANCHES}
ORDER BY br.id LIMIT :limit"""
COUNT_BRANCHES_IN_THREAD_AGAIN = f"""
SELECT count(*) FROM thread t INDEXED BY thread_again CROSS JOIN branch br INDEXED BY branch_again ON br.thread = t.id
WHERE t.namespace = :namespace AND t.name = :thread {_LISTED_BRANCHES}"""
BRANCHES_OF_THREAD = f"""
SELECT {_NAMES}, {BRANCH_COLUMNS} {_BY_NAME}
WHERE t.namespace = :namespace AND t.name = :thread"""
COUNT_BRANCHES_AGAIN = """
SELECT count(*) FROM thread t INDEXED BY thread_again CROSS JOIN branch br INDEXED BY branch_again ON br.thread = t.id
WHERE t.namespace = :namespace AND t.name = :thread"""
# With the number of the newest row before another one, as lists show it: the row after it names it, or it is the head.
BRANCHES_BY_ROWS = f"""
SELECT {_NAMES}, {BRANCH_COLUMNS}, coalesce((
    SELECT iif(typeof(back) = 'integer' AND back <> 0, key - back & 4294967295, 0) FROM checkpoint
    WHERE key >= br.id << 32 | :before AND key < (br.id + 1) << 32 ORDER BY key LIMIT 1), br.head) AS newest
{_BY_NAME} WHERE t.namespace = :namespace AND t.name = :thread"""
NEWEST_ROW_FIRST = " ORDER BY newest DESC"
COUNT_BRANCHES = f"SELECT count(*) {_BY_NAME} WHERE t.namespace = :namespace AND t.name = :thread"
AND_SCOPE = " AND br.scope = :scope"
AND_BRANCH = " AND br.name = :branch"
OLDEST_BRANCH_FIRST = " ORDER BY br.id"

THREAD = "SELECT id, floor, seal FROM thread INDEXED BY thread_name WHERE namespace = ? AND name = ?"
THREAD_AGAIN = "SELECT 1 FROM thread INDEXED BY thread_again WHERE namespace = ? AND name = ?"
ADD_THREAD = "INSERT INTO thread (namespace, name, floor, seal) VALUES (?, ?, 0, 0) RETURNING id"
PUT_FLOOR = "UPDATE thread SET floor = ?, seal = ? WHERE id = ?"
DROP_THREAD = "DELETE FROM thread WHERE id = ?"
DROP_UNUSED_THREAD = """
DELETE FROM thread WHERE id = :thread AND floor = 0
  AND NOT EXISTS (SELECT 1 FROM branch WHERE thread = :thread)
  AND NOT EXISTS (SELECT 1 FROM write WHERE thread = :thread)
  AND NOT EXISTS (SELECT 1 FROM record WHERE thread = :thread)"""

ADD_BRANCH = """
INSERT INTO branch (thread, scope, name, head, last_seq, epoch, seal) VALUES (?, ?, ?, 0, 0, 0, 0) RETURNING id"""
PUT_BRANCH = """
UPDATE branch SET head = ?, last_seq = ?, epoch = ?, owner = ?, token = ?, expires = ?, boot = ?, origin = ?, seal = ?,
  lease_seal = ?
WHERE id = ?"""
# A save moves its branch if it has seen its newest row. x XOR y is (x | y) - (x & y).
_MOVE = "UPDATE branch SET head = ?, last_seq = ?, seal = (seal | ?) - (seal & ?)"
_SEEN = "WHERE id = ? AND last_seq = ? AND head = ? AND epoch = ?"
MOVE_BRANCH = f"{_MOVE} {_SEEN} AND (token IS NULL OR boot <> ? OR expires <= ?)"
MOVE_BRANCH_UNDER_LEASE = f"{_MOVE}, boot = ?, expires = ?, lease_seal = ? {_SEEN} AND token = ?"
HIGHEST_SEQ = "SELECT max(last_seq) FROM branch WHERE thread = ?"
DROP_BRANCH = "DELETE FROM branch WHERE id = ?"
DROP_BRANCHES_OF_THREAD = "DELETE FROM branch WHERE thread = ?"
BRANCH_IDS = "SELECT id FROM branch WHERE thread = ?"
NEWEST_BRANCHES = "SELECT id FROM branch WHERE thread = ? ORDER BY id DESC"
HEAD_OF_BRANCH = "SELECT head FROM branch WHERE id = ?"
BRANCHES_FORKED_FROM = "SELECT id FROM branch WHERE origin = ?"

# Leases -----------------------------------------------------------------------------------------------------------

LEASED = f"""
SELECT {_NAMES}, {BRANCH_COLUMNS} FROM branch br LEFT JOIN thread t ON t.id = br.thread
WHERE br.token IS NOT NULL AND (t.id IS NULL OR {_IN_NAMESPACE.format("br")})"""
AND_LEASED_IN_THREAD = " AND br.thread = (SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)"
EXPIRED_FIRST = " ORDER BY iif(br.boot = :boot, br.expires, 0), br.id LIMIT :limit"

# Records ----------------------------------------------------------------------------------------------------------

_RECORDS = """
SELECT r.place, t.namespace, t.name, r.scope, r.branch, r.key, r.body, r.version, r.checkpoint, r.open,
  r.namespace, r.status, r.graph, r.fingerprint, r.due, r.seal, r.thread, t.floor, t.seal
FROM record r LEFT JOIN thread t ON t.id = r.thread"""
RECORD = f"{_RECORDS} WHERE r.id = ?"
RECORD_AGAIN = """
SELECT 1 FROM thread t INDEXED BY thread_name CROSS JOIN record r INDEXED BY record_thread ON r.thread = t.id
WHERE t.namespace = ? AND t.name = ? AND r.key = ? AND r.place > ? AND r.place < ?
  AND (? = 'interrupt' OR (r.scope = ? AND r.branch = ?))"""
_LISTED = f"""{_RECORDS} WHERE r.place > :low AND r.place < :high AND (t.id IS NULL OR {_IN_NAMESPACE.format("r")})"""
_IN_THREAD = " AND r.thread = (SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)"
_FIRST_STORED_FIRST = " ORDER BY r.place LIMIT :limit"
_BY_OPEN, _BY_THREAD, _BY_OPEN_THREAD = (
    _LISTED.replace("record r", f"record r INDEXED BY {index}")
    for index in ("record_open", "record_again", "record_open_again")
)
RECORDS = {  # of one thread or of all, only open ones or all
    (False, False): _LISTED + _FIRST_STORED_FIRST,
    (False, True): _BY_OPEN + " AND r.open" + _FIRST_STORED_FIRST,
    (True, False): _BY_THREAD + _IN_THREAD + _FIRST_STORED_FIRST,
    (True, True): _BY_OPEN_THREAD + _IN_THREAD + " AND r.open" + _FIRST_STORED_FIRST,
}
# Each list is counted through the index that it was read from, and through another tree. That one is in another order,
# so whole lists are counted. The first column says whether the thread was found. The open records of a thread are
# compared with all open ones or, if these are many, with all records of the thread.
_THREAD = "(SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)"
_COUNT = "(SELECT count(*) FROM record INDEXED BY {} WHERE place > :low AND place < :high AND {})"
_OF_THREAD, _OPEN_OF_THREAD = f"thread = {_THREAD}", f"open AND thread = {_THREAD}"
_FEW_ARE_OPEN = """(SELECT count(*) <= 200 FROM (
  SELECT 1 FROM record INDEXED BY record_open WHERE open AND place > :low AND place < :high LIMIT 201))"""
RECORD_COUNTS = {
    (False, True): f"SELECT 0, {_COUNT.format('record_open', 'open')}, {_COUNT.format('record_open_again', 'open')}",
    (True, False): f"""
SELECT {_THREAD}, {_COUNT.format("record_again", _OF_THREAD)}, {_COUNT.format("record_thread", _OF_THREAD)}""",
    (True, True): f"""
SELECT {_THREAD}, {_COUNT.format("record_open_again", _OPEN_OF_THREAD)}, CASE WHEN {_FEW_ARE_OPEN}
  THEN {_COUNT.format("record_open", _OPEN_OF_THREAD)} ELSE {_COUNT.format("record_again", _OPEN_OF_THREAD)} END""",
}
ADD_RECORD = """
INSERT INTO record (place, id, thread, scope, branch, key, checkpoint, version, open, body,
  namespace, status, graph, fingerprint, due, seal)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
CHANGE_RECORD = """
UPDATE record SET version = ?, open = ?, body = ?, namespace = ?, status = ?, graph = ?, fingerprint = ?, due = ?,
  seal = ?
WHERE id = ?"""
DROP_RECORD_AS = "DELETE FROM record WHERE id = ? AND version = ? RETURNING 1"
HAS_OPEN_RECORD = """
SELECT 1 FROM record WHERE thread = (SELECT thread FROM branch WHERE id = ?) AND open AND checkpoint = ? LIMIT 1"""
CHECKPOINTS_WITH_RECORDS = "SELECT DISTINCT checkpoint FROM record WHERE thread = ? AND checkpoint IS NOT NULL"
DROP_RECORDS_OF_CHECKPOINT = "DELETE FROM record WHERE thread = ? AND checkpoint = ?"
DROP_RECORDS_OF_BRANCH = """
DELETE FROM record WHERE place > ? AND place < ?
  AND (thread, scope, branch) = (SELECT thread, scope, name FROM branch WHERE id = ?)"""
DROP_RECORDS_OF_THREAD = "DELETE FROM record WHERE thread = ?"

# Runs: newest first, through the index that holds what is asked for. The step of the branch's newest checkpoint is read
# with them, because a list shows it.
_NEWEST_RUN_FIRST = " AND r.place < :before ORDER BY r.place DESC LIMIT :limit"
_RUNS = f"""{
    _RECORDS.replace(
        "FROM",
        ''', br.id, (
    SELECT c.step FROM checkpoint c WHERE c.key = br.id << 32 | br.head)
FROM''',
        1,
    )
} LEFT JOIN branch br INDEXED BY branch_name
  ON br.thread = r.thread AND br.scope = r.scope AND br.name = r.branch"""
RUN_OF_BRANCH = f"""
{_RUNS.replace("record r", "record r INDEXED BY record_branch", 1)} WHERE r.thread = (
    SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)
  AND r.scope = :scope AND r.branch = :name AND r.status IS NOT NULL ORDER BY r.place DESC LIMIT 1"""
# A run is listed if its own column or its thread says so: they differ only if one of them is damaged.
RUNS = f"{_RUNS} WHERE r.place > :low AND (r.namespace = :namespace OR t.namespace = :namespace) {_NEWEST_RUN_FIRST}"
RUNS_OF_THREAD = f"""
{_RUNS.replace("record r", "record r INDEXED BY record_again", 1)} WHERE r.place > :low
  AND r.thread = (SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)
  AND (:status IS NULL OR r.status = :status) AND (:graph IS NULL OR r.graph = :graph) {_NEWEST_RUN_FIRST}"""
RUNS_WITH_STATUS = f"""
{_RUNS.replace("record r", "record r INDEXED BY record_status", 1)}
WHERE r.namespace = :namespace AND r.status = :status {_NEWEST_RUN_FIRST}"""
RUNS_OF_GRAPH_WITH_STATUS = f"""
{_RUNS.replace("record r", "record r INDEXED BY record_graph", 1)}
WHERE r.namespace = :namespace AND r.graph = :graph AND r.status = :status {_NEWEST_RUN_FIRST}"""
STATUSES_OF_GRAPH = """
WITH RECURSIVE found (status) AS (
  SELECT min(status) FROM record INDEXED BY record_graph
  WHERE status IS NOT NULL AND namespace = :namespace AND graph = :graph
  UNION ALL
  SELECT (SELECT min(r.status) FROM record r INDEXED BY record_graph
    WHERE r.status IS NOT NULL AND r.namespace = :namespace AND r.graph = :graph AND r.status > found.status)
  FROM found WHERE found.status IS NOT NULL)
SELECT status FROM found WHERE status IS NOT NULL"""
COUNT_RUNS = """
SELECT count(*) FROM record INDEXED BY record_status WHERE status IS NOT NULL AND namespace = ? AND status = ?"""
RUNNING_OF_GRAPH = f"""
{_RUNS.replace("record r", "record r INDEXED BY record_graph", 1)}
WHERE r.status IS NOT NULL AND r.namespace = :namespace AND r.graph = :graph AND r.status = 'running'
  AND r.fingerprint = :fingerprint ORDER BY r.place"""
DUE_RUNS = f"""
{_RUNS.replace("record r", "record r INDEXED BY record_due", 1)}
WHERE r.due IS NOT NULL AND r.namespace = :namespace AND r.graph = :graph AND r.fingerprint = :fingerprint
  AND r.due <= :now ORDER BY r.due, r.place"""

# Checkpoints ------------------------------------------------------------------------------------------------------

_FROM = "FROM checkpoint c LEFT JOIN blob b ON b.id = c.base LEFT JOIN checkpoint p ON p.id = c.parent"
ROW_BY_ID = f"SELECT {ROW_COLUMNS} FROM checkpoint c WHERE c.id = :id"
ROW_BY_ID_WITH_PAYLOAD = f"SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_FROM} WHERE c.id = :id"
IS_HIDDEN = "SELECT 1 FROM checkpoint NOT INDEXED WHERE +id = ?"  # SQLite 3.35 would use the index for a plain id
# The branch, its newest row, the streams that it may extend with their ends, and whether it has pending writes: most
# rows have none, and then no other statement looks for them.
HEAD = f"""
SELECT {BRANCH_COLUMNS}, EXISTS (SELECT 1 FROM write INDEXED BY sqlite_autoindex_write_1
      WHERE thread = t.id AND scope = br.scope AND checkpoint = c.id)
    OR EXISTS (SELECT 1 FROM write INDEXED BY write_again WHERE checkpoint = c.id),
  (SELECT group_concat(r.source || ' ' || coalesce((
      SELECT k.address + k.size - (r.source << 28) FROM chunk k
      WHERE k.address >= r.source << 28 AND k.address < (r.source + 1) << 28 ORDER BY k.address DESC LIMIT 1), 0))
    FROM ref r WHERE r.branch = br.id AND r.owned),
  {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_BY_NAME}
LEFT JOIN checkpoint c ON c.key = br.id << 32 | br.head
LEFT JOIN blob b ON b.id = c.base LEFT JOIN checkpoint p ON p.id = c.parent
{_NAMED}"""
ROWS_OF_BRANCH = f"SELECT {ROW_COLUMNS} FROM checkpoint c WHERE c.key > :low AND c.key < :high"
TAGGED_OF_BRANCH = f"""
SELECT {ROW_COLUMNS} FROM checkpoint c INDEXED BY checkpoint_tagged
WHERE c.tags IS NOT NULL AND c.key > :low AND c.key < :high ORDER BY c.key DESC"""
TAGGED_OF_BRANCH_WITH_PAYLOAD = f"""
SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_FROM.replace("checkpoint c", "checkpoint c INDEXED BY checkpoint_tagged", 1)}
WHERE c.tags IS NOT NULL AND c.key > :low AND c.key < :high ORDER BY c.key DESC"""
ROWS_OF_BRANCH_WITH_PAYLOAD = f"SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_FROM} WHERE c.key > :low AND c.key < :high"
# The row that follows another in its branch.
FOLLOWING = "SELECT key, back FROM checkpoint WHERE key > ? AND key < ? ORDER BY key LIMIT 1"
# The index has the threads of a namespace in the order of their numbers, so a page reads only the threads it shows.
_LISTED_BRANCH = "WHERE thread = t.id AND (last_seq <> 0 OR head <> 0) AND (:scope IS NULL OR scope = :scope)"
HEADS_OF_THREADS = f"""
SELECT t.id, t.name, (
    SELECT id FROM branch INDEXED BY branch_again {_LISTED_BRANCH} ORDER BY last_seq DESC LIMIT 1) AS again,
  {_NAMES}, {BRANCH_COLUMNS}, {ROW_COLUMNS}
FROM thread t INDEXED BY thread_listed
LEFT JOIN branch br ON br.id = (
    SELECT id FROM branch INDEXED BY branch_name {_LISTED_BRANCH} ORDER BY head DESC LIMIT 1)
LEFT JOIN checkpoint c ON c.key = br.id << 32 | br.head
WHERE t.namespace = :namespace AND t.id < :before AND (br.id IS NOT NULL OR again IS NOT NULL)
  AND (c.key IS NULL OR (true"""
COUNT_THREADS = """
SELECT
  (SELECT count(*) FROM thread INDEXED BY thread_listed WHERE namespace = :namespace AND id >= :low AND id < :high),
  (SELECT count(*) FROM thread NOT INDEXED WHERE namespace = :namespace AND id >= :low AND id < :high)"""

# A tag is stored between two NULs, in the row and in an index: if one of them is damaged, their checksum shows it.
AND_TAG = """ AND c.tags IS NOT NULL AND (instr(c.tags, :tag) OR EXISTS (
  SELECT 1 FROM checkpoint x INDEXED BY checkpoint_tagged_again
  WHERE x.key = c.key AND x.tags IS NOT NULL AND instr(x.tags, :tag)))"""
TAGGED_COUNTS = """
SELECT (SELECT count(*) FROM checkpoint INDEXED BY checkpoint_tagged WHERE tags IS NOT NULL AND key > ? AND key < ?),
  (SELECT count(*) FROM checkpoint INDEXED BY checkpoint_tagged_again WHERE tags IS NOT NULL AND key > ? AND key < ?)"""
NEWEST_FIRST = " ORDER BY c.key DESC LIMIT :limit"
NEWEST_THREAD_FIRST = ")) ORDER BY t.id DESC LIMIT :limit"

IDENTITY = "SELECT key, digest FROM checkpoint WHERE id = ?"
ADD_CHECKPOINT = """
INSERT INTO checkpoint (key, id, parent, back, step, created, digest, size, notes, tags, manifest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
ADD_CHECKPOINT_WITH_BASE = """
INSERT INTO checkpoint (key, id, parent, back, step, created, digest, size, notes, tags, manifest, base)
SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, id FROM blob WHERE digest = ?"""
DROP_CHECKPOINT = "DELETE FROM checkpoint WHERE key = ?"
TO_DROP = f"""
SELECT c.id, c.digest, {BASE_NAME}, c.manifest FROM checkpoint c LEFT JOIN blob b ON b.id = c.base WHERE c.key = ?"""
RENAME_CHECKPOINT = "UPDATE checkpoint SET id = ? WHERE key = ?"
NEWEST_KEY = "SELECT max(key) FROM checkpoint WHERE key > ? AND key < ?"
LINKS_OF_BRANCH = "SELECT key, back FROM checkpoint WHERE key > ? AND key < ? ORDER BY key"
PREVIOUS_KEY = "SELECT max(key) FROM checkpoint WHERE key > ? AND key < ?"
FOLLOWING_KEY = "SELECT min(key) FROM checkpoint WHERE key > ? AND key < ?"
FOLLOWING_PARENT = "SELECT key, parent FROM checkpoint WHERE key > ? AND key < ? ORDER BY key LIMIT 1"
SET_BACK = "UPDATE checkpoint SET back = ? WHERE key = ?"
MANIFESTS_OF_BRANCH = f"""
SELECT {BASE_NAME}, c.manifest FROM checkpoint c LEFT JOIN blob b ON b.id = c.base WHERE c.key > ? AND c.key < ?"""
KEEP_PARENT_DIGEST = "UPDATE checkpoint SET parent_digest = ? WHERE key = ?"
KEEP_PARENT_DIGEST_IF = """
UPDATE checkpoint SET parent_digest = ? WHERE key = ? AND parent = ? AND parent_digest IS NULL"""
ID_BY_KEY = "SELECT id FROM checkpoint WHERE key = ?"
KEY_BY_ID = "SELECT key FROM checkpoint INDEXED BY checkpoint_id WHERE id = ?"
KEYS_OF_BRANCH = "SELECT key FROM checkpoint WHERE key > ? AND key < ? ORDER BY key DESC LIMIT ?"

# Tags and writes --------------------------------------------------------------------------------------------------

TAGS = "SELECT tags, id FROM checkpoint WHERE key = ?"
SET_TAGS = "UPDATE checkpoint SET tags = ? WHERE key = ?"

_WRITE = "write INDEXED BY sqlite_autoindex_write_1"  # its own tree
WRITES = f"SELECT task, size, pieces, body FROM {_WRITE} WHERE thread = ? AND scope = ? AND checkpoint = ?"
WRITES_AGAIN = """
SELECT count(*) FROM write INDEXED BY write_again WHERE thread = ? AND scope = ? AND checkpoint = ?"""
_OF_TASK = "thread = ? AND scope = ? AND checkpoint = ? AND task = ?"
WRITES_OF_TASK = f"SELECT size, pieces, body FROM {_WRITE} WHERE {_OF_TASK}"
ADD_WRITES = "INSERT INTO write VALUES (?, ?, ?, ?, ?, ?, ?)"
DROP_WRITES = "DELETE FROM write WHERE thread = ? AND scope = ? AND checkpoint = ? RETURNING pieces, body"
DROP_WRITES_OF_TASK = f"DELETE FROM write WHERE {_OF_TASK} RETURNING pieces, body"
DROP_WRITES_OF_THREAD = "DELETE FROM write WHERE thread = ? RETURNING pieces, body"

PIECES_OF = "SELECT body FROM write_piece WHERE number >= ? AND number < ? ORDER BY number"
NEXT_PIECE = "SELECT coalesce(max(number), 0) + 1 FROM write_piece"
ADD_PIECE = "INSERT INTO write_piece VALUES (?, ?)"
DROP_PIECES = "DELETE FROM write_piece WHERE number >= ? AND number < ?"

# Bytes ------------------------------------------------------------------------------------------------------------

BLOB = "SELECT size, body FROM blob WHERE digest = ?"
HAS_BLOB = "SELECT 1 FROM blob WHERE digest = ?"
ADD_BLOB = "INSERT INTO blob (digest, size, body) VALUES (?, ?, ?)"
DROP_BLOB = "DELETE FROM blob WHERE digest = ?"
BLOB_SIZE = "SELECT length(body) FROM blob WHERE digest = ?"
BLOB_SIZES = "SELECT digest, coalesce(length(body), 0) FROM blob"

CHUNKS = """
SELECT address, size, body FROM chunk
WHERE address >= coalesce((SELECT max(address) FROM chunk WHERE address <= :start AND address >= :stream), :start)
  AND address < :end
ORDER BY address"""
CHUNKS_IN_WINDOW = "SELECT address, size, body FROM chunk WHERE address >= ? AND address < ? ORDER BY address"
CHUNK_SIZES_OVER = """
SELECT address, size FROM chunk
WHERE address >= coalesce((SELECT max(address) FROM chunk WHERE address <= :start AND address >= :stream), :start)
  AND address < :end ORDER BY address"""
CHUNK_SIZE = "SELECT length(body) FROM chunk WHERE address = ?"
CHUNK_SIZES = "SELECT address, size, length(body) FROM chunk WHERE address >= ? AND address < ? ORDER BY address"
ADD_CHUNK = "INSERT INTO chunk VALUES (?, ?, ?)"
DROP_CHUNKS = "DELETE FROM chunk WHERE address >= ? AND address < ?"
DROP_CHUNK = "DELETE FROM chunk WHERE address = ?"
STREAM_SIZE = "SELECT sum(length(body)) FROM chunk WHERE address >= ? AND address < ?"
STREAM_SIZES = "SELECT address >> 28, coalesce(sum(length(body)), 0) FROM chunk GROUP BY 1"

REFS = "SELECT source FROM ref WHERE branch = ?"
ADD_REF = "INSERT INTO ref VALUES (?, ?, ?, 0) ON CONFLICT DO UPDATE SET scattered = 1"
ADD_SCATTERED_REF = "INSERT INTO ref VALUES (?, ?, 0, 1) ON CONFLICT DO UPDATE SET scattered = 1"
SCATTER_REFS = "UPDATE ref SET scattered = 1 WHERE branch = ?"
IS_SCATTERED = "SELECT scattered FROM ref WHERE branch = ? AND source = ?"
DROP_REF = "DELETE FROM ref WHERE branch = ? AND source = ?"
DROP_REFS = "DELETE FROM ref WHERE branch = ?"
BRANCHES_REFERRING = "SELECT branch FROM ref WHERE source = ?"

CHECK_REFS = "PRAGMA integrity_check('ref')"

COUNTER = "SELECT value, seal FROM counter WHERE name = ?"
PUT_COUNTER = "INSERT OR REPLACE INTO counter VALUES (?, ?, ?)"

TOTALS = """
SELECT count(DISTINCT thread), count(*), coalesce(sum(checkpoints), 0), coalesce(sum(bytes), 0) FROM (
  SELECT br.thread, count(c.key) AS checkpoints, sum(c.size) AS bytes
  FROM thread t CROSS JOIN branch br ON br.thread = t.id
  LEFT JOIN checkpoint c ON c.key > br.id << 32 AND c.key < (br.id + 1) << 32
  WHERE t.namespace = ? AND (br.head <> 0 OR br.last_seq <> 0) GROUP BY br.id)"""
COUNTED_TWICE = """
SELECT (SELECT count(*) FROM checkpoint NOT INDEXED), (SELECT count(*) FROM checkpoint INDEXED BY checkpoint_id),
  (SELECT count(*) FROM branch NOT INDEXED), (SELECT count(*) FROM branch INDEXED BY branch_name),
  (SELECT count(*) FROM thread NOT INDEXED), (SELECT count(*) FROM thread INDEXED BY thread_name)"""

# Maintenance ------------------------------------------------------------------------------------------------------

ALL_BRANCHES = f"SELECT {_NAMES}, {BRANCH_COLUMNS} FROM branch br LEFT JOIN thread t ON t.id = br.thread ORDER BY br.id"
BRANCHES_LOST = "SELECT DISTINCT branch FROM ref WHERE branch NOT IN (SELECT id FROM branch)"
UNREACHABLE = """
SELECT 'checkpoint', count(*) FROM checkpoint c WHERE NOT EXISTS (SELECT 1 FROM branch br WHERE br.id = c.key >> 32)
UNION ALL SELECT 'branch', count(*) FROM branch WHERE thread NOT IN (SELECT id FROM thread)
UNION ALL SELECT 'record', count(*) FROM record WHERE thread NOT IN (SELECT id FROM thread)
UNION ALL SELECT 'write', count(*) FROM write WHERE thread NOT IN (SELECT id FROM thread)"""
ALL_CHUNK_SIZES = "SELECT address, size FROM chunk ORDER BY address"
PIECES = "SELECT number FROM write_piece ORDER BY number"
PIECES_NEEDED = "SELECT body, pieces FROM write WHERE typeof(body) = 'integer'"
RECORD_NAMES = """
SELECT r.place, r.id, t.namespace, t.name, r.scope, r.branch, r.key FROM record r JOIN thread t ON t.id = r.thread"""
RECORDS_WITHOUT_CHECKPOINT = """
SELECT r.place, r.key, t.name, r.checkpoint FROM record r LEFT JOIN thread t ON t.id = r.thread
WHERE r.checkpoint IS NOT NULL AND NOT EXISTS (SELECT 1 FROM checkpoint c WHERE c.id = r.checkpoint)"""

# Repair -----------------------------------------------------------------------------------------------------------

PUT_BLOB = """
INSERT INTO blob (digest, size, body) VALUES (?, ?, ?)
ON CONFLICT (digest) DO UPDATE SET size = excluded.size, body = excluded.body"""
PUT_CHUNK = "INSERT OR REPLACE INTO chunk VALUES (?, ?, ?)"
DROP_RECORD = "DELETE FROM record WHERE place = ?"
PUT_CHECKPOINT = """
UPDATE checkpoint SET parent = ?, parent_digest = ?, step = ?, created = ?, digest = ?, size = ?, notes = ?,
  base = (SELECT id FROM blob WHERE digest = ?), manifest = ?
WHERE key = ?"""

TABLES = "SELECT count(*) FROM sqlite_schema"
RELEASE_PAGES = "PRAGMA incremental_vacuum(2000)"  # not all at once, so that other writers wait only for a moment
CHECK_FILE = "PRAGMA integrity_check(100)"
CHECK_TABLE = "SELECT * FROM pragma_integrity_check(?)"
CHECK_REFERENCES = "PRAGMA foreign_key_check"

# The names in the indexes, which hold them like the table does.
THREADS = "SELECT id, namespace, name, floor, seal FROM thread NOT INDEXED"
THREAD_NAMES = [
    f"SELECT id, namespace, name FROM thread INDEXED BY {index} WHERE {first} >= ''"
    for index, first in (("thread_name", "namespace"), ("thread_again", "name"))
]
BRANCH_NAMES = [
    f"SELECT id, thread, scope, name FROM branch INDEXED BY {index} WHERE thread >= 0"
    for index in ("branch_name", "branch_again")
]
NAMED_INDEXES = (
    *("thread_name", "thread_again", "thread_listed"),
    *("branch_name", "branch_again", "branch_leased", "branch_origin"),
)
DROP_INDEX = {name: f"DROP INDEX {name}" for name in NAMED_INDEXES}
_TABLES = ("blob", "branch", "checkpoint", "chunk", "counter", "record", "ref", "thread", "write", "write_piece")
READ_TABLE = {name: f"SELECT * FROM {name} NOT INDEXED" for name in _TABLES}
REINDEX = {name: f"REINDEX {name}" for name in _TABLES}
COLUMNS = "SELECT name, type, pk FROM pragma_table_info(?)"
PUT_THREAD = "UPDATE thread SET namespace = ?, name = ?, floor = ?, seal = ? WHERE id = ?"
PUT_BRANCH_NAMES = "UPDATE branch SET thread = ?, scope = ?, name = ? WHERE id = ?"
RECORD_SEALS = """
SELECT place, thread, scope, branch, key, checkpoint, namespace, status, graph, fingerprint, due, seal FROM record"""
NUMBERS_USED = """
SELECT max(coalesce((SELECT max(address) >> 28 FROM chunk), 0),
  coalesce((SELECT max(source) FROM ref WHERE typeof(source) = 'integer'), 0)),
  coalesce((SELECT max(place & 281474976710655) FROM record), 0)"""
# Threads and branches whose rows are lost get such that a rebuild repairs.
_ADD_BRANCH_AS = "INSERT INTO branch (id, thread, scope, name, head, last_seq, epoch, seal)"
NAMES_LEFT = [
    *((read, "INSERT INTO thread VALUES (?, ?, ?, 0, -1)") for read in THREAD_NAMES),
    *((read, f"{_ADD_BRANCH_AS} VALUES (?, ?, ?, ?, 0, 0, 0, -1)") for read in BRANCH_NAMES),
]
