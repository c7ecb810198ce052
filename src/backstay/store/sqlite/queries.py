"""All SQL statements of the SQLite store, by name. Values are always bound, never written into the text."""

ROW_COLUMNS = "c.key, c.id, c.parent, c.parent_digest, c.step, c.created, c.digest, c.size, c.notes"
# If the base's row is missing its name is empty, which no blob has: that is damage, unlike a row without a base.
BASE_NAME = "iif(c.base IS NULL, NULL, coalesce(b.digest, x''))"
PAYLOAD_COLUMNS = f"{BASE_NAME}, b.size, b.body, c.manifest, p.digest"

# Threads and branches ------------------------------------------------------------------------------------------------

BRANCH = """
SELECT br.id, t.id, br.head, br.last_seq, t.next_seq, br.epoch, br.owner, br.token, br.expires, br.boot
FROM thread t JOIN branch br ON br.thread = t.id
WHERE t.namespace = ? AND t.name = ? AND br.scope = ? AND br.name = ?"""

BRANCHES = """
SELECT br.id, t.id, t.namespace, t.name, br.scope, br.name, br.head, br.last_seq, br.epoch, br.origin
FROM thread t JOIN branch br ON br.thread = t.id
WHERE t.namespace = :namespace AND (:thread IS NULL OR t.name = :thread) AND (:scope IS NULL OR br.scope = :scope)
  AND (br.last_seq <> 0 OR br.head <> 0)
ORDER BY br.id"""

BRANCHES_OF_THREAD = """
SELECT br.id, t.id, t.namespace, t.name, br.scope, br.name
FROM thread t JOIN branch br ON br.thread = t.id
WHERE t.namespace = :namespace AND t.name = :thread
  AND (:scope IS NULL OR br.scope = :scope) AND (:branch IS NULL OR br.name = :branch)"""

BRANCH_BY_ID = """
SELECT t.id, t.namespace, t.name, br.scope, br.name FROM branch br JOIN thread t ON t.id = br.thread WHERE br.id = ?"""

THREAD = "SELECT id, next_seq FROM thread WHERE namespace = ? AND name = ?"
ADD_THREAD = "INSERT INTO thread (namespace, name, next_seq) VALUES (?, ?, 1) RETURNING id"
NUMBER_THREAD = "UPDATE thread SET next_seq = ? WHERE id = ?"
DROP_THREAD = "DELETE FROM thread WHERE id = ?"
DROP_UNUSED_THREAD = """
DELETE FROM thread WHERE id = :thread AND next_seq = 1
  AND NOT EXISTS (SELECT 1 FROM branch WHERE thread = :thread)
  AND NOT EXISTS (SELECT 1 FROM write WHERE thread = :thread)
  AND NOT EXISTS (SELECT 1 FROM record WHERE thread = :thread)"""

ADD_BRANCH = """
INSERT INTO branch (thread, scope, name, head, last_seq) VALUES (?, ?, ?, 0, 0) RETURNING id"""
MOVE_BRANCH = "UPDATE branch SET head = ?, last_seq = ? WHERE id = ?"
MOVE_BRANCH_UNDER_LEASE = "UPDATE branch SET head = ?, last_seq = ?, expires = ?, boot = ? WHERE id = ?"
SET_ORIGIN = "UPDATE branch SET origin = ? WHERE id = ?"
SET_HEAD = "UPDATE branch SET head = ? WHERE id = ?"
DROP_BRANCH = "DELETE FROM branch WHERE id = ?"
DROP_BRANCHES_OF_THREAD = "DELETE FROM branch WHERE thread = ?"
BRANCH_IDS = "SELECT id FROM branch WHERE thread = ?"
SISTERS = "SELECT id FROM branch WHERE (thread, scope) = (SELECT thread, scope FROM branch WHERE id = ?)"
HEAD_OF_BRANCH = "SELECT head FROM branch WHERE id = ?"
BRANCHES_FORKED_FROM = "SELECT id FROM branch WHERE origin = ?"

# Leases -----------------------------------------------------------------------------------------------------------

SET_LEASE = "UPDATE branch SET epoch = ?, owner = ?, token = ?, expires = ?, boot = ? WHERE id = ?"
END_LEASE = "UPDATE branch SET owner = NULL, token = NULL, expires = NULL, boot = NULL WHERE id = ?"
_LEASES = """
SELECT br.id, t.namespace, t.name, br.scope, br.name, br.epoch, br.owner, br.token, br.expires, br.boot
FROM branch br CROSS JOIN thread t ON t.id = br.thread"""
LEASE_OF_HEAD = f"{_LEASES} WHERE br.id = ? AND br.head = ?"
LEASED = f"{_LEASES} WHERE br.token IS NOT NULL AND t.namespace = :namespace"
AND_LEASED_IN_THREAD = " AND br.thread = (SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)"
AND_EXPIRED = " AND (br.boot <> :boot OR br.expires <= :now)"
AND_HELD = " AND br.token = :token"
AND_NOT_HELD = " AND br.token <> :token"
EXPIRED_FIRST = " ORDER BY iif(br.boot = :boot, br.expires, 0), br.id LIMIT :limit"

# Records ----------------------------------------------------------------------------------------------------------

_RECORDS = """
SELECT r.place, t.namespace, t.name, r.scope, r.branch, r.key, r.body, r.version, r.checkpoint, r.open,
  r.expires, r.boot
FROM record r CROSS JOIN thread t ON t.id = r.thread"""
RECORD = f"{_RECORDS} WHERE r.id = ?"
_LISTED = f"{_RECORDS} WHERE r.place > :low AND r.place < :high AND t.namespace = :namespace"
_IN_THREAD = " AND r.thread = (SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)"
# Open records are found in their index, which has their places too; then they are looked up in order.
_OPEN_ANYWHERE = " AND r.place IN (SELECT place FROM record WHERE open AND place > :low AND place < :high)"
_FIRST_STORED_FIRST = " ORDER BY r.place LIMIT :limit"
RECORDS = {  # of one thread or of all, only open ones or all
    (False, False): _LISTED + _FIRST_STORED_FIRST,
    (False, True): _LISTED + _OPEN_ANYWHERE + _FIRST_STORED_FIRST,
    (True, False): _LISTED + _IN_THREAD + _FIRST_STORED_FIRST,
    (True, True): _LISTED + _IN_THREAD + " AND r.open" + _FIRST_STORED_FIRST,
}
NEXT_RECORD = "UPDATE counter SET value = value + 1 WHERE name = 'record' RETURNING value"
ADD_RECORD = """
INSERT INTO record (place, id, thread, scope, branch, key, checkpoint, version, open, expires, boot, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
CHANGE_RECORD = "UPDATE record SET version = ?, open = ?, expires = ?, boot = ?, body = ? WHERE id = ?"
HAS_OPEN_RECORD = """
SELECT 1 FROM record WHERE thread = (SELECT thread FROM branch WHERE id = ?) AND open AND checkpoint = ? LIMIT 1"""
DROP_RECORDS_OF_CHECKPOINT = "DELETE FROM record WHERE thread = ? AND checkpoint = ?"
DROP_RECORDS_OF_BRANCH = """
DELETE FROM record WHERE place > ? AND place < ?
  AND (thread, scope, branch) = (SELECT thread, scope, name FROM branch WHERE id = ?)"""
DROP_RECORDS_OF_THREAD = "DELETE FROM record WHERE thread = ?"

# Checkpoints ------------------------------------------------------------------------------------------------------

_FROM = "FROM checkpoint c LEFT JOIN blob b ON b.id = c.base LEFT JOIN checkpoint p ON p.id = c.parent"
ROW_BY_ID = f"SELECT {ROW_COLUMNS} FROM checkpoint c WHERE c.id = :id"
ROW_BY_ID_WITH_PAYLOAD = f"SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_FROM} WHERE c.id = :id"
# With whether it has tags and pending writes. Most rows have none, and then no other statement looks for them.
HEAD = f"""
SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, EXISTS (SELECT 1 FROM tag WHERE checkpoint = c.key),
  EXISTS (SELECT 1 FROM write WHERE thread = ? AND scope = ? AND checkpoint = c.id)
{_FROM} WHERE c.key = ?"""
ROWS_OF_BRANCH = f"SELECT {ROW_COLUMNS} FROM checkpoint c WHERE c.key > ? AND c.key < ?"
ROWS_OF_BRANCH_WITH_PAYLOAD = f"SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_FROM} WHERE c.key > ? AND c.key < ?"
HEADS_OF_THREADS = f"""
SELECT t.id, t.namespace, t.name, br.scope, br.name, {ROW_COLUMNS}
FROM thread t
JOIN branch br ON br.thread = t.id AND (br.last_seq <> 0 OR br.head <> 0) AND br.head = (
  SELECT max(head) FROM branch
  WHERE thread = t.id AND (last_seq <> 0 OR head <> 0) AND (:scope IS NULL OR scope = :scope))
LEFT JOIN checkpoint c ON c.key = br.id << 32 | br.head
WHERE t.namespace = :namespace AND (:before IS NULL OR t.id < :before) AND (c.key IS NULL OR (true"""

AND_STEP_MAX = " AND c.step <= :step_max"
AND_TAG = " AND c.key IN (SELECT checkpoint FROM tag WHERE name = :tag)"
NEWEST_FIRST = " ORDER BY c.key DESC LIMIT :limit"
NEWEST_THREAD_FIRST = ")) ORDER BY t.id DESC LIMIT :limit"

IDENTITY = "SELECT key, digest FROM checkpoint WHERE id = ?"
ADD_CHECKPOINT = """
INSERT INTO checkpoint (key, id, parent, step, created, digest, size, notes, base, manifest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, (SELECT id FROM blob WHERE digest = ?), ?)"""
DROP_CHECKPOINT = "DELETE FROM checkpoint WHERE key = ? RETURNING id, digest"
RENAME_CHECKPOINT = "UPDATE checkpoint SET id = ? WHERE key = ?"
NEWEST_KEY = "SELECT max(key) FROM checkpoint WHERE key > ? AND key < ?"
MANIFESTS_OF_BRANCH = f"""
SELECT {BASE_NAME}, c.manifest FROM checkpoint c LEFT JOIN blob b ON b.id = c.base WHERE c.key > ? AND c.key < ?"""
PARENTS_OF_BRANCH = "SELECT key, parent FROM checkpoint WHERE key > ? AND key < ? AND parent_digest IS NULL"
KEEP_PARENT_DIGEST = "UPDATE checkpoint SET parent_digest = ? WHERE key = ?"
ID_BY_KEY = "SELECT id FROM checkpoint WHERE key = ?"
KEYS_OF_BRANCH = "SELECT key FROM checkpoint WHERE key > ? AND key < ?"

# Tags and writes --------------------------------------------------------------------------------------------------

TAGS = "SELECT name FROM tag WHERE checkpoint = ? ORDER BY name"
TAGS_BETWEEN = "SELECT checkpoint, name FROM tag WHERE checkpoint BETWEEN ? AND ? ORDER BY checkpoint, name"
ADD_TAG = "INSERT INTO tag VALUES (?, ?) ON CONFLICT DO NOTHING"
DROP_TAG = "DELETE FROM tag WHERE checkpoint = ? AND name = ?"
DROP_TAGS = "DELETE FROM tag WHERE checkpoint = ?"

WRITES = "SELECT task, size, pieces, body FROM write WHERE thread = ? AND scope = ? AND checkpoint = ?"
_OF_TASK = "thread = ? AND scope = ? AND checkpoint = ? AND task = ?"
WRITES_OF_TASK = f"SELECT size, pieces, body FROM write WHERE {_OF_TASK}"
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
DROP_BLOB = "DELETE FROM blob WHERE digest = ? RETURNING length(body)"
BLOB_SIZES = "SELECT digest, coalesce(length(body), 0) FROM blob"

CHUNKS = """
SELECT address, size, body FROM chunk
WHERE address >= coalesce((SELECT max(address) FROM chunk WHERE address <= :start AND address >= :stream), :start)
  AND address < :end
ORDER BY address"""
CHUNKS_IN_WINDOW = "SELECT address, size, body FROM chunk WHERE address >= ? AND address < ? ORDER BY address"
CHUNK_SIZES = "SELECT address, size, length(body) FROM chunk WHERE address >= ? AND address < ? ORDER BY address"
ADD_CHUNK = "INSERT INTO chunk VALUES (?, ?, ?)"
DROP_CHUNKS = "DELETE FROM chunk WHERE address >= ? AND address < ?"
DROP_CHUNK = "DELETE FROM chunk WHERE address = ?"
STREAM_SIZES = "SELECT address >> 28, coalesce(sum(length(body)), 0) FROM chunk GROUP BY 1"

REFS = "SELECT source, owned FROM ref WHERE branch = ?"
# The streams that a branch may extend, with their ends: 0 if a stream is empty.
OWNED = """
SELECT r.source, coalesce((
  SELECT c.address + c.size - (r.source << 28) FROM chunk c
  WHERE c.address >= r.source << 28 AND c.address < (r.source + 1) << 28 ORDER BY c.address DESC LIMIT 1), 0)
FROM ref r WHERE r.branch = ? AND r.owned"""
ADD_REF = "INSERT INTO ref VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
DROP_REF = "DELETE FROM ref WHERE branch = ? AND source = ?"
DROP_REFS = "DELETE FROM ref WHERE branch = ?"
IS_REFERRED = "SELECT 1 FROM ref WHERE source = ? LIMIT 1"
BRANCHES_REFERRING = "SELECT branch FROM ref WHERE source = ?"

RESERVE = "UPDATE counter SET value = value + ? WHERE name = 'stream' RETURNING value"

# Maintenance ------------------------------------------------------------------------------------------------------

ROW_BYTES = "SELECT coalesce(sum(length(manifest) + length(notes)), 0) FROM checkpoint"
BRANCH_FACTS = """
SELECT t.id, t.next_seq, t.namespace, t.name, br.scope, br.name, br.id, br.head, br.last_seq,
  coalesce((SELECT max(key) FROM checkpoint WHERE key > br.id << 32 AND key < (br.id + 1) << 32), 0) & 4294967295,
  br.token IS NOT NULL
FROM branch br JOIN thread t ON t.id = br.thread ORDER BY br.id"""
BRANCHES_LOST = "SELECT DISTINCT branch FROM ref WHERE branch NOT IN (SELECT id FROM branch)"
TAGS_WITHOUT_CHECKPOINT = "SELECT checkpoint, name FROM tag WHERE checkpoint NOT IN (SELECT key FROM checkpoint)"
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

CHECK_FILE = "PRAGMA integrity_check(100)"
CHECK_TABLE = "SELECT * FROM pragma_integrity_check(?)"
TABLES = "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name"
REINDEX = {
    "blob": "REINDEX blob",
    "checkpoint": "REINDEX checkpoint",
    "chunk": "REINDEX chunk",
    "record": "REINDEX record",
    "ref": "REINDEX ref",
}
DISOWN = "UPDATE ref SET owned = 0"
EXPIRE = "UPDATE record SET boot = '' WHERE boot IS NOT NULL"
