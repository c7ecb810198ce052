"""What is recorded of calls: everything that is needed to judge them, also by a process that is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import backstay
from backstay.errors import Conflict, Fenced, IdTaken, InvalidInput, OutcomeUnknown, StoreBusy
from support.simulation.chain import ChainLink, chain_of, check_chain
from support.simulation.history import UNSPECIFIED, BranchName, CallError, CallOutcome, CallRecorder, RecordedThread

B = BranchName("t")


@pytest.mark.parametrize("kept", ["memory", "file"])
def test_a_recorded_thread_does_as_the_thread_and_tells_it(store: backstay.Store, kept: str, tmp_path: Path) -> None:
    recorder = CallRecorder(None if kept == "memory" else tmp_path / "history")
    mine, other = (RecordedThread(store.thread("t"), recorder) for _ in range(2))
    first = mine.save({"n": 1})
    second = mine.append(set={"n": 2}, id="second")
    assert other.latest() == second
    third = other.save({"n": 3}, on=second)
    with pytest.raises(Conflict):
        mine.save({"n": 4})
    with pytest.raises(IdTaken):
        mine.save({"n": 5}, id="second", on=first)
    with pytest.raises(InvalidInput):
        mine.save({"n": object()})
    recorder.close()

    assert [(o.action.value, o.outcome.value, o.error, o.parent, o.seq) for o in recorder.history().calls] == [
        ("append", "ok", None, None, 1),
        ("append", "ok", None, first.id, 2),
        ("read", "ok", None, UNSPECIFIED, 2),
        ("append", "ok", None, second.id, 3),
        ("append", "fail", "conflict", second.id, None),
        ("append", "fail", "taken", first.id, None),
        ("append", "fail", "refused", UNSPECIFIED, None),
    ]
    assert [o.id for o in recorder.history().calls][:4] == [first.id, "second", "second", third.id]
    assert check_chain(recorder.history(), {B: chain_of(store, *B)})


def test_what_is_awaited_is_recorded_call_by_call() -> None:
    recorder = CallRecorder()

    async def main() -> list[ChainLink]:
        async with await backstay.aopen("memory:") as store:
            thread = store.thread("t")
            with recorder.append(B, "a", parent=None) as call:
                saved = await thread.save({"n": 1}, id="a")
                call.ok(seq=saved.seq)
            return [ChainLink(meta.id, meta.parent_id, meta.seq) async for meta in thread.history()]

    chain = asyncio.run(main())

    assert check_chain(recorder.history(), {B: chain}).acknowledged == len(chain) == 1


@pytest.mark.parametrize(
    ("error", "outcome", "why"),
    [
        (Conflict("x"), CallOutcome.FAIL, CallError.CONFLICT),
        (Fenced("x", epoch=1, current=2), CallOutcome.FAIL, CallError.FENCED),
        (StoreBusy("x"), CallOutcome.FAIL, CallError.REFUSED),
        (OutcomeUnknown("x"), CallOutcome.UNKNOWN, None),
        (KeyboardInterrupt(), CallOutcome.UNKNOWN, None),
        (ConnectionError(), CallOutcome.UNKNOWN, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_says_whether_anything_was_stored(
    error: BaseException, outcome: CallOutcome, why: CallError | None
) -> None:
    recorder = CallRecorder()
    with pytest.raises(type(error)), recorder.append(B, "a", parent=None):
        raise error
    (call,) = recorder.history().calls

    assert (call.outcome, call.error) == (outcome, why)


def test_a_call_has_exactly_one_outcome() -> None:
    recorder = CallRecorder()
    with pytest.raises(InvalidInput, match="without an outcome"), recorder.read(B):
        pass
    with recorder.read(B) as call:
        call.ok()
        with pytest.raises(InvalidInput, match="already ended"):
            call.unknown()


def test_a_line_torn_anywhere_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "history"
    recorder = CallRecorder(path)
    with recorder.append(B, "a", parent=None) as call:
        call.ok(seq=1)
    whole = path.read_bytes()
    last = whole.rindex(b"\n{")
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        with recorder.read(B) as call:
            call.ok(id="a")
        history = recorder.history()

        outcome = CallOutcome.OK if cut >= len(whole) - 1 else CallOutcome.UNKNOWN
        assert [call.outcome for call in history.calls] == [outcome, CallOutcome.OK]
        assert history.torn == (last + 1 < cut < len(whole) - 1)
    recorder.close()
