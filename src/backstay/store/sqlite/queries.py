"""Every SQL statement of the SQLite store, named. Values are always bound, never written into the text."""

from backstay.store.sqlite.rows import BASE_NAME, PAYLOAD_COLUMNS, ROW_COLUMNS

# Threads and lanes ------------------------------------------------------------------------------------------------

LANE = """
SELECT l.id, t.id, l.head, l.last_seq, t.next_seq, l.epoch, l.owner, l.token, l.expires, l.boot
FROM thread t JOIN lane l ON l.thread = t.id
WHERE t.namespace = ? AND t.name = ? AND l.scope = ? AND l.branch = ?"""

LANES = """
SELECT l.id, t.id, t.namespace, t.name, l.scope, l.branch, l.head, l.last_seq, l.epoch, l.origin
FROM thread t JOIN lane l ON l.thread = t.id
WHERE t.namespace = :namespace AND (:thread IS NULL OR t.name = :thread) AND (:scope IS NULL OR l.scope = :scope)
  AND (l.last_seq <> 0 OR l.head <> 0)
ORDER BY l.id"""

LANES_OF_THREAD = """
SELECT l.id, t.id, t.namespace, t.name, l.scope, l.branch
FROM thread t JOIN lane l ON l.thread = t.id
WHERE t.namespace = :namespace AND t.name = :thread
  AND (:scope IS NULL OR l.scope = :scope) AND (:branch IS NULL OR l.branch = :branch)"""

LANE_BY_ID = """
SELECT t.id, t.namespace, t.name, l.scope, l.branch FROM lane l JOIN thread t ON t.id = l.thread WHERE l.id = ?"""

THREAD = "SELECT id, next_seq FROM thread WHERE namespace = ? AND name = ?"
ADD_THREAD = "INSERT INTO thread (namespace, name, next_seq) VALUES (?, ?, 1) RETURNING id"
NUMBER_THREAD = "UPDATE thread SET next_seq = ? WHERE id = ?"
DROP_THREAD = "DELETE FROM thread WHERE id = ?"
DROP_UNUSED_THREAD = """
DELETE FROM thread WHERE id = :thread AND next_seq = 1
  AND NOT EXISTS (SELECT 1 FROM lane WHERE thread = :thread)
  AND NOT EXISTS (SELECT 1 FROM write WHERE thread = :thread)
  AND NOT EXISTS (SELECT 1 FROM record WHERE thread = :thread)"""

ADD_LANE = """
INSERT INTO lane (thread, scope, branch, head, last_seq, origin) VALUES (?, ?, ?, 0, 0, ?) RETURNING id"""
MOVE_LANE = "UPDATE lane SET head = ?, last_seq = ? WHERE id = ?"
MOVE_LANE_UNDER_LEASE = "UPDATE lane SET head = ?, last_seq = ?, expires = ?, boot = ? WHERE id = ?"
SET_ORIGIN = "UPDATE lane SET origin = ? WHERE id = ?"
SET_HEAD = "UPDATE lane SET head = ? WHERE id = ?"
DROP_LANE = "DELETE FROM lane WHERE id = ?"
DROP_LANES_OF_THREAD = "DELETE FROM lane WHERE thread = ?"
LANE_IDS = "SELECT id FROM lane WHERE thread = ?"
SISTERS = "SELECT id FROM lane WHERE (thread, scope) = (SELECT thread, scope FROM lane WHERE id = ?)"
HEAD_OF_LANE = "SELECT head FROM lane WHERE id = ?"
LANES_FORKED_FROM = "SELECT id FROM lane WHERE origin = ?"

# Leases -----------------------------------------------------------------------------------------------------------

SET_LEASE = "UPDATE lane SET epoch = ?, owner = ?, token = ?, expires = ?, boot = ? WHERE id = ?"
END_LEASE = "UPDATE lane SET owner = NULL, token = NULL, expires = NULL, boot = NULL WHERE id = ?"
_LEASES = """
SELECT l.id, t.namespace, t.name, l.scope, l.branch, l.epoch, l.owner, l.token, l.expires, l.boot
FROM lane l CROSS JOIN thread t ON t.id = l.thread"""
LEASE_OF_HEAD = f"{_LEASES} WHERE l.id = ? AND l.head = ?"
LEASED = f"{_LEASES} WHERE l.token IS NOT NULL AND t.namespace = :namespace"
AND_LEASED_IN_THREAD = " AND l.thread = (SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)"
AND_EXPIRED = " AND (l.boot <> :boot OR l.expires <= :now)"
AND_HELD = " AND l.token = :token"
AND_NOT_HELD = " AND l.token <> :token"
EXPIRED_FIRST = " ORDER BY iif(l.boot = :boot, l.expires, 0), l.id LIMIT :limit"

# Records ----------------------------------------------------------------------------------------------------------

_RECORDS = """
SELECT r.place, t.namespace, t.name, r.scope, r.branch, r.key, r.body, r.version, r.checkpoint, r.open,
  r.expires, r.boot
FROM record r CROSS JOIN thread t ON t.id = r.thread"""
RECORD = f"{_RECORDS} WHERE r.id = ?"
_LISTED = f"{_RECORDS} WHERE r.place > :low AND r.place < :high AND t.namespace = :namespace"
_IN_THREAD = " AND r.thread = (SELECT id FROM thread WHERE namespace = :namespace AND name = :thread)"
# The ones that are open are found in their index, which tells their places too; then they are looked up in order.
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
SELECT 1 FROM record WHERE thread = (SELECT thread FROM lane WHERE id = ?) AND open AND checkpoint = ? LIMIT 1"""
DROP_RECORDS_OF_CHECKPOINT = "DELETE FROM record WHERE thread = ? AND checkpoint = ?"
DROP_RECORDS_OF_LANE = """
DELETE FROM record WHERE place > ? AND place < ?
  AND (thread, scope, branch) = (SELECT thread, scope, branch FROM lane WHERE id = ?)"""
DROP_RECORDS_OF_THREAD = "DELETE FROM record WHERE thread = ?"

# Checkpoints ------------------------------------------------------------------------------------------------------

_FROM = "FROM checkpoint c LEFT JOIN blob b ON b.id = c.base LEFT JOIN checkpoint p ON p.id = c.parent"
ROW_BY_ID = f"SELECT {ROW_COLUMNS} FROM checkpoint c WHERE c.id = :id"
ROW_BY_ID_WITH_PAYLOAD = f"SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_FROM} WHERE c.id = :id"
# With whether it has tags and pending writes, which most have not: then nobody looks for them.
HEAD = f"""
SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS}, EXISTS (SELECT 1 FROM tag WHERE checkpoint = c.key),
  EXISTS (SELECT 1 FROM write WHERE thread = ? AND scope = ? AND checkpoint = c.id)
{_FROM} WHERE c.key = ?"""
ROWS_OF_LANE = f"SELECT {ROW_COLUMNS} FROM checkpoint c WHERE c.key > ? AND c.key < ?"
ROWS_OF_LANE_WITH_PAYLOAD = f"SELECT {ROW_COLUMNS}, {PAYLOAD_COLUMNS} {_FROM} WHERE c.key > ? AND c.key < ?"
HEADS_OF_THREADS = f"""
SELECT t.id, t.namespace, t.name, l.scope, l.branch, {ROW_COLUMNS}
FROM thread t
JOIN lane l ON l.thread = t.id AND (l.last_seq <> 0 OR l.head <> 0) AND l.head = (
  SELECT max(head) FROM lane
  WHERE thread = t.id AND (last_seq <> 0 OR head <> 0) AND (:scope IS NULL OR scope = :scope))
LEFT JOIN checkpoint c ON c.key = l.id << 32 | l.head
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
MANIFESTS_OF_LANE = f"""
SELECT {BASE_NAME}, c.manifest FROM checkpoint c LEFT JOIN blob b ON b.id = c.base WHERE c.key > ? AND c.key < ?"""
PARENTS_OF_LANE = "SELECT key, parent FROM checkpoint WHERE key > ? AND key < ? AND parent_digest IS NULL"
KEEP_PARENT_DIGEST = "UPDATE checkpoint SET parent_digest = ? WHERE key = ?"
ID_BY_KEY = "SELECT id FROM checkpoint WHERE key = ?"
KEYS_OF_LANE = "SELECT key FROM checkpoint WHERE key > ? AND key < ?"

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

REFS = "SELECT source, owned FROM ref WHERE lane = ?"
# The streams that a lane may extend, with their ends: 0 if nothing of one is left.
OWNED = """
SELECT r.source, coalesce((
  SELECT c.address + c.size - (r.source << 28) FROM chunk c
  WHERE c.address >= r.source << 28 AND c.address < (r.source + 1) << 28 ORDER BY c.address DESC LIMIT 1), 0)
FROM ref r WHERE r.lane = ? AND r.owned"""
ADD_REF = "INSERT INTO ref VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
DROP_REF = "DELETE FROM ref WHERE lane = ? AND source = ?"
DROP_REFS = "DELETE FROM ref WHERE lane = ?"
IS_REFERRED = "SELECT 1 FROM ref WHERE source = ? LIMIT 1"
LANES_REFERRING = "SELECT lane FROM ref WHERE source = ?"

RESERVE = "UPDATE counter SET value = value + ? WHERE name = 'stream' RETURNING value"

# Upkeep -----------------------------------------------------------------------------------------------------------

ROW_BYTES = "SELECT coalesce(sum(length(manifest) + length(notes)), 0) FROM checkpoint"
LANE_FACTS = """
SELECT t.id, t.next_seq, t.namespace, t.name, l.scope, l.branch, l.id, l.head, l.last_seq,
  coalesce((SELECT max(key) FROM checkpoint WHERE key > l.id << 32 AND key < (l.id + 1) << 32), 0) & 4294967295,
  l.token IS NOT NULL
FROM lane l JOIN thread t ON t.id = l.thread ORDER BY l.id"""
LANES_LOST = "SELECT DISTINCT lane FROM ref WHERE lane NOT IN (SELECT id FROM lane)"
TAGS_WITHOUT_CHECKPOINT = "SELECT checkpoint, name FROM tag WHERE checkpoint NOT IN (SELECT key FROM checkpoint)"
UNREACHABLE = """
SELECT 'checkpoint', count(*) FROM checkpoint c WHERE NOT EXISTS (SELECT 1 FROM lane l WHERE l.id = c.key >> 32)
UNION ALL SELECT 'branch', count(*) FROM lane WHERE thread NOT IN (SELECT id FROM thread)
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

# Mending ----------------------------------------------------------------------------------------------------------

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
