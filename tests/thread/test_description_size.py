"""What every list reads has a bound: descriptions, questions and decisions. A value may be as large as before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import backstay
from backstay.compat.backend import Checkpoint, CheckpointMetadata, StoreBackend
from backstay.errors import EncodeError
from backstay.model.decision import QUESTION_BYTES_MAX, Interrupt
from backstay.model.fields import DESCRIPTION_BYTES_MAX

BIG = "x" * DESCRIPTION_BYTES_MAX
BIGGER = "x" * QUESTION_BYTES_MAX


def everything(store: backstay.Store) -> list[Any]:
    metas = [
        (meta.id, meta.tags, meta.metadata)
        for thread in store.threads()
        for meta in store.thread(thread.thread_id).history(branch="*")
    ]
    return [metas, [(each.id, each.decision) for each in store.interrupts(pending=False)]]


def test_a_description_that_lists_would_read_again_is_refused_before_anything_is_stored(store: backstay.Store) -> None:
    thread = store.thread("t")
    first = thread.save({"n": 1}, metadata={"who": "me"})
    asked = thread.interrupt(first, prompt="?")
    before = everything(store)
    large: dict[str, Any] = {"small": 1, "report": {"pages": BIG}}
    calls: dict[str, Callable[[], object]] = {
        "checkpoint.metadata.report.pages": lambda: thread.save({"n": 2}, metadata=large),
        "checkpoint.metadata.report.pages ": lambda: thread.append({"m": [1]}, metadata=large),
        "checkpoint.metadata.report.pages  ": lambda: thread.fork(first, branch="b", metadata=large),
        "checkpoint.metadata.report.pages   ": lambda: thread.rewind(first, metadata=large),
        "checkpoint.interrupt.payload": lambda: thread.save(
            {"n": 2},
            interrupt=Interrupt(id="i", kind="userrequest", payload=BIG),  # type: ignore[arg-type]
        ),
        "interrupt.payload": lambda: thread.interrupt(first, payload=BIGGER),
        "decision.value": lambda: thread.decide(asked, "modify", value=BIGGER, by="me"),
    }
    for path, call in calls.items():
        with pytest.raises(EncodeError, match="more than") as raised:
            call()
        assert raised.value.path == path.rstrip()
        assert BIG not in str(raised.value)
    assert everything(store) == before

    thread.save({"large": BIGGER}, metadata={"report": BIG[:-100]})  # up to the bound, and values of any size


def test_many_small_fields_count_together(store: backstay.Store) -> None:
    part = "x" * 60_000

    with pytest.raises(EncodeError, match=str(DESCRIPTION_BYTES_MAX)):
        store.thread("t").save({}, label=part, summary=part, resume_hint=part, metadata={"a": part, "b": part})
    assert list(store.threads()) == []


def test_the_record_of_another_system_is_refused_whole_and_not_cut(store: backstay.Store) -> None:
    backend = StoreBackend(store)
    draft = Checkpoint(CheckpointMetadata("t", "c", 1, extra={"notes": BIG}), [], {}, {})

    with pytest.raises(EncodeError, match=r"metadata\.notes is the largest"):
        asyncio.run(backend.put(draft))
    assert list(store.threads()) == []
