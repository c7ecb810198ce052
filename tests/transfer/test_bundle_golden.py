"""Version 1 of the format stays what it is: a bundle from the day it was made is read, and is written again alike."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from backstay.codec import encode
from backstay.model.checkpoint import Write
from backstay.model.effect import EffectStatus
from backstay.store.base import LaneKey
from backstay.store.memory import MemoryStore
from backstay.thread.access import access_of
from backstay.thread.cursor import Context
from backstay.thread.ledger import RESULT, intent_of, sealed
from backstay.thread.store import Store
from backstay.transfer import export_bundle, import_bundle, read_bundle, verify_bundle

DIGEST = "03bacdf1a4db44925e621a2e61c5fbece5a4d05ff5618395a0b4f669b43a3c3a"
"""Of the records. It does not depend on the version of zstd, as the bytes of the file do."""

BUNDLE = """
iUJTQlVORExFDQoaCgABAAAGOQAAA9XfrdQ1KLUv/WA5BV0eAJQzSAAAAAKRoFQAAAAIkaZ0aHJlYWRMk6CkbWFpbsBDAAAAe54Apm1hZGUt
McDAwAHPAAZHSEYgQADEIDjqwhZzFQ9PxpuYMduF1Q4qGTBwG3nj3S/G0myvn9cAxBGBpWxhYmVspWZpcnN0h/NDHpKhYaFiwJCTlqhtZXNz
YWdlc6FsAQAAzQEvlqFuoXYAAAABlqRnb25lAFYAAAEv2gEsaGVsbG8gVgHDbDIAwAAC1kzgPaZduqiVHu6Si+aeBSd401rSH0T24dzE6JJu
WtvEDYGhbqVtb2RlbOUoOAeQwJGSAs0BLwAGBqVhZ2FpbgJXAAAAHJekdGFzawCnY2hhbm5lbKFtAaDEB6V2YWx1ZQEPk6Clb3RoZXIyg54B
M/uHUeb7mnk6yCeG2oUNzdDtgqlOgbA7FKR/aIbE4XHoxBSCoXSkZm9yawq3EPGQwJCRAAEDaTQAwAADQc7OlwNXahuSC58TfX2fWsmxbPVe
iJ2AdcC8l7ah8gvEBFn238+QkqFukJIDzQEvBgcEB6ZlZGl0ZWSiNQTMx+u2SrktHg132R8/MpIBdRJ2dioA8LbjLo+I78KfvsQWpnJld2lu
ZFRDFwGQkm6QBgAAAQJVNgDAAUKhG8jI4hd9gg25rJQFygMQ4q/iX/crDF5nWUT/I8i/xAThidILA80BNQAGBqV0aGVyZUkAAADenKVhc2tl
ZN/5Iehf0tQX17tXJTL1Lz4jjeSgtQg9nopt5LA+oy4KxDOFomlkpGtpbmSrdXNlcnJlcXVlc3Skbm9kZcCncGF5bG9hZMCmcHJvbXB0oT9M
VBfRjsDWA7/jF1Ky0B9SALoZemw/Slrj4XCV5dRhtW6Fp2FwcHJvdmWlc2NvcGXAwKZyZWFzb26gpnRhcmdldMCibWWmd29ya2VyRQAAAG6c
bAGlb3duZXLEBwXEINylc73l0ccDOLhybXk9r23/IUh1yJSOhdGLU9fjJ6HfpGRvbmXEJqBqiM9tX3ob0mI9ImTH5aWQ3x+yAvmS6u6vXBoQ
Cc34cqRzZW50B8BaAAAAJgO6zfGk20SSXmIaLmHF++zlpNBf9WGDlaC09mm0Ojw6lQEGAQEAOSBwohmpWw+vk/hYFoBzlEExui6MO04V5iUx
wq3tHZTRit1KJoy7wG7Lh10ERjx9JwZDNIKwwP6eWGn4tfjENwLITmJwMFADux/AKXyVlKacF13zEIpE5DGCJACOKHUjKPxhtHKByLcZXYXL
hnM0R/EKP9NtQK2A5Sueb7CoPxvWJVGuJwJ2JKpq4IEoWO8O
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
    access_of(store).store.begin_effect(row, None, None)
    body = sealed(row, EffectStatus.DONE, 7, None, RESULT + encode("sent"))
    access_of(store).store.end_effect(lane, "mail", 1, "owner", "done", body, 7)


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
