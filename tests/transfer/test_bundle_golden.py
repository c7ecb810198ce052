"""Version 1 of the format stays what it is: a bundle from the day it was made is read, and is written again alike."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from holdfast.codec import encode
from holdfast.model.checkpoint import Write
from holdfast.model.effect import EffectStatus
from holdfast.store.base import LaneKey
from holdfast.store.memory import MemoryStore
from holdfast.thread.cursor import Context
from holdfast.thread.ledger import RESULT, intent_of, sealed
from holdfast.thread.store import Store
from holdfast.transfer import export_bundle, import_bundle, read_bundle, verify_bundle

DIGEST = "89a600ad3a5644dbf077b38fba980d8ae27597c7d1713c801c6966adf8bc18b8"
"""Of the records. It does not depend on the version of zstd, as the bytes of the file do."""

BUNDLE = """
iUhGQlVORExFDQoaCgABAAAGIQAAA60PbR4bKLUv/WAhBR0dAFbyxEhgpnEO9MGaxFx5Zypy/KPfg+Kwu0qtB9WvN4x1qhCbGe0o
ixVljms/pduV3c7awWqnfvTDN6GZfsfleUtVRQBSR1UsoUe+lSmuAK4AuABba8yI0RkR03qqPgFLIRZcYY6mEzDopMFPaMBw4mQJ
M6q9/EU+LFpJiFVV7rugyeT0v9LzzvaSVvr/hXCHrXKa+a9V2OW97bp8LWI1RZR58IaNr9umTLHKeVuNnwjMMaZoWXVYKrhQwRgb
HsGSJe0O2JCeGZitAwhSBVuMHM3hCc0PQohEUonbh2lZljVg4OhelX8c/n8Iuad7TSKnUqCbt75XWfT5/xbIYu3/kwJXNJQw6qR2
PU4ARkeUvynKlbj/VwKAu+U002YkdthI/BmsS1rhdTPiAteQEAZz+uhaCUd7yxOeK2e+3qABnz/I2F5+HbfpLxJl4q9lmZIvzMPA
vETBg+vcIYVq6cLKF2dQHR6LO/MV0YKm2qkANQe4PUgb9FFHUct9LxsjpwpoHlS3MMbNSL3CKu99+2ws/+fuN3kV9P8vaj3dvR3f
bp/TzJqxKBNVjrJr3OGnAHNIqlMDKL/igZeuFT9lVWxOGUjzp0UKJPgFrmwLVMroZtWmDVzKHGV78nV5EAdvW+4GkaA9/SXRVAtq
wywgA5EPStisPY47Hy8kmx8SPuTsFBG9iBLmZ0yshhsIaGQo/7k7zkLz/yZ4fLu9kWbafj6ScJrRpYAzD1aapisiKlEJyMTaDBWp
O7CzXdSSLO21peXnoKKm/2/EbiSiPR3yVolgbhLVZQalwMQQkicUUmLWHHaKvG2rAhoTr/VNVzlhIOWMiykN2uEBR/PrKrimBwEs
KEGYDOWUEaF0xPVKqQn/vyTj3s7dZHvGDGAASEYSszdGtFrXAzJi/PxCI+x4Yg6caqxhUTeQE2beWTRJBlMoC8PCRxMKCJWWYBKE
tDXJrmltnXSwfTWfU9zYjNDcg5tb3odsrNV0r8ms/v8jWv5r2aGSr1ryy3vtfpXIzrqbt0pZ5kDWhhtzIdsCgXsJ1b322LMKqKZs
6UQ4IHCiGTE7D6+zAvsog2J0LIw3TRW2SyI8W9s7KMIWq5LMz9DAn7fQGNAe10MRJ1nQZR24wCiafGYLAaUYSbFMMDyI/RP+zKGM
5iBMwY6hvBvlJ2INhutpsIYqfiS+iwNg7ADPlzM2hEtGc7RG8QI8s21ArXjP15q08vh4+Y11UViPBsJIVNX+gTFYjwk=
"""


def make(store: Store) -> None:
    """Save one of everything, with nothing left to chance."""
    thread = store.thread("thread")
    thread.save({"messages": ["hello " * 50], "n": 1, "gone": True}, tags=["b", "a"], label="first")
    thread.append({"messages": ["again"]}, set={"n": 2}, delete=["gone"], next_node="model")
    head = thread.latest()
    assert head is not None
    branch = thread.fork(head, branch="other", set={"n": 3})
    thread.save({"n": 4, "messages": ["hello " * 50, "edited", "again"]})
    thread.rewind(head)
    branch.append({"messages": ["there"]})
    thread.write(head, [Write("task", 0, "channel", {"value": 1})])
    thread.consume(thread.decide(thread.interrupt(head, prompt="?", id="asked"), "approve", by="me"), by="worker")
    lane = LaneKey("", "thread", "", "main")
    row = intent_of(lane, "mail", 1, "owner", b"request", 5)
    store._backend.begin_effect(row, None, None)
    body = sealed(row, EffectStatus.DONE, 7, None, RESULT + encode("sent"))
    store._backend.end_effect(lane, "mail", 1, "owner", "done", body, 7)


def new_store() -> Store:
    numbers = count(1)
    context = Context("", lambda: datetime(2026, 1, 1, tzinfo=UTC), lambda: f"made-{next(numbers)}")
    return Store(MemoryStore(), context)


def test_a_bundle_of_version_1_is_read(tmp_path: Path) -> None:
    path = tmp_path / "golden.bundle"
    path.write_bytes(base64.b64decode(BUNDLE))
    totals = verify_bundle(path)
    read = list(read_bundle(path))

    assert (totals.checkpoints, totals.interrupts, totals.effects, totals.digest.hex()) == (6, 1, 1, DIGEST)
    assert [(each.id, each.branch, each.state["n"]) for each in read] == [
        ("made-1", "main", 1),
        ("made-2", "main", 2),
        ("made-3", "other", 3),
        ("made-4", "main", 4),
        ("made-5", "main", 2),
        ("made-6", "other", 3),
    ]
    assert read[-1].messages == ["hello " * 50, "again", "there"]
    with new_store() as store:
        assert import_bundle(path, store)
        assert store.verify()


def test_the_same_content_still_gives_the_same_records(tmp_path: Path) -> None:
    with new_store() as store:
        make(store)
        report = export_bundle(store, tmp_path / "again.bundle")

    assert report.digest.hex() == DIGEST
