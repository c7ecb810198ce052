"""The network between us and PostgreSQL on a bad day: answers that do not come, connections that break, late requests.

A proxy stands in between and strikes exactly where it is told to, or anywhere. ``prepare=no`` puts the text of every
statement into every request, so that it can be found there.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

import backstay
from backstay.errors import Conflict, OutcomeUnknown
from backstay.store.base import Commit
from backstay.store.postgres.checkpoints import is_plain
from backstay.testing.drafts import branch_key, draft, put, wait_until
from backstay.thread.access import access_of
from support.crash.postgres_story import CHANGES, COMMIT, WRITES, Step, dump, fixed_clock, make_import, set_stage
from support.postgres import PostgresServer, Watch
from support.proxy import Fault, Proxy
from support.running import Show, effort
from support.simulation.chain import chains_of, check_chain
from support.simulation.history import BranchName, CallRecorder, RecordedThread

pytestmark = pytest.mark.effort(2)

Rows = dict[str, list[tuple[Any, ...]]]

HASTY_S = 0.8
PATIENT_S = 20
GRACE_S = 1.0
CUTS = 3 * effort()
WRITERS = 4
RACES = max(1, effort() // 3)
ACKS_BEFORE_CUT_MAX = 6
SEED = int(os.environ.get("BACKSTAY_SEED", "20261115"))


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[Proxy]:
    with Proxy(postgres.port) as between:
        yield between


class Stage:
    """One schema, reached through the proxy and directly."""

    def __init__(self, server: PostgresServer, proxy: Proxy, timeout: float) -> None:
        self._schema = f"t_{uuid.uuid4().hex}"
        self._server = server
        self.direct = backstay.open(server.url(schema=self._schema, timeout=PATIENT_S), clock=fixed_clock)
        self.watch = Watch(server, server.url(timeout=str(timeout), prepare="no", schema=self._schema))
        self.store = backstay.open(proxy.url(self.watch.url), clock=fixed_clock)
        set_stage(self.direct)

    def rows(self) -> Rows:
        with self._server.connect() as connection:
            return dump(connection, self._schema)

    def close(self) -> None:
        for store in (self.store, self.direct):
            report = store.check()
            assert report, str(report)
            store.close()
        with self._server.connect() as connection:
            connection.execute(f'drop schema "{self._schema}" cascade'.encode())


@pytest.fixture
def stage(postgres: PostgresServer, proxy: Proxy) -> Iterator[Callable[[float], Stage]]:
    with contextlib.ExitStack() as closing:

        def make(timeout: float) -> Stage:
            made = Stage(postgres, proxy, timeout)
            closing.callback(made.close)
            return made

        try:
            yield make
        finally:
            proxy.heal()  # if a test failed in the middle, everything else still ends as it should


def in_peace(stage: Stage, steps: list[Step]) -> list[tuple[object, Rows]]:
    """Return each step's answer and what is stored after it."""
    return [(step.call(stage.direct), stage.rows()) for step in steps]


@pytest.mark.crash
@pytest.mark.parametrize("fault", ["swallow_answer", "cut_before"])
def test_a_lost_answer_or_request_of_any_write_is_settled_without_the_caller_noticing(
    stage: Callable[[float], Stage], proxy: Proxy, fault: Fault
) -> None:
    expected = in_peace(stage(PATIENT_S), WRITES)
    struck = stage(PATIENT_S)
    strike = proxy.swallow_answer if fault == "swallow_answer" else proxy.cut_before

    for number, (step, (answer, rows)) in enumerate(zip(WRITES, expected, strict=True), 1):
        strike(step.request)
        assert step.call(struck.store) == answer, step.name
        assert proxy.fired[fault] == number, step.name
        assert struck.rows() == rows, step.name


@pytest.mark.crash
@pytest.mark.parametrize("fault", ["swallow_answer", "cut_before"])
@pytest.mark.parametrize("sent", [b"WITH moved AS", b"fast-"], ids=["as text", "prepared"])
def test_a_lost_answer_or_request_of_a_plain_save_is_settled(
    postgres: PostgresServer, postgres_url: str, proxy: Proxy, fault: Fault, sent: bytes
) -> None:
    """The stage prepares nothing, so its saves go through the function."""
    strike = proxy.swallow_answer if fault == "swallow_answer" else proxy.cut_before
    with backstay.open(proxy.url(postgres_url)) as store:
        thread = store.thread("agent")
        for number in range(3 if sent == b"fast-" else 1):
            thread.append({"log": [number]})
        strike(sent)
        saved = thread.append({"log": ["struck"]})

        assert proxy.fired[fault] == 1
        assert store.thread("agent").latest() == saved
        assert [meta.id for meta in thread.history(limit=1)] == [saved.id]
        assert store.check()


@pytest.mark.crash
def test_a_write_whose_answer_was_lost_with_the_network_is_unknown_and_saving_again_gives_the_first_result(
    stage: Callable[[float], Stage], proxy: Proxy, show: Show
) -> None:
    expected = in_peace(stage(PATIENT_S), WRITES)
    struck, late_s = stage(HASTY_S), []

    for number, (step, (answer, rows)) in enumerate(zip(WRITES, expected, strict=True), 1):
        struck.store.thread("t").latest()  # so that a connection is there, before no other can be had
        proxy.swallow_answer(step.request)
        proxy.refuse = True
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            step.call(struck.store)
        late_s.append(time.monotonic() - began - HASTY_S)
        assert proxy.fired["swallow_answer"] == number, step.name
        proxy.heal()
        assert struck.rows() == rows, step.name
        assert step.call(struck.direct) == answer, step.name
        assert struck.rows() == rows, step.name

    show("lost answers", f"{len(WRITES)} verbs, {proxy.fired['refuse']} reconnects refused, {max(late_s):.2f} s late")
    assert proxy.fired["refuse"] >= len(WRITES)
    assert max(late_s) <= GRACE_S


@pytest.mark.crash
@pytest.mark.parametrize("fault", ["swallow_answer", "cut_before"])
def test_a_change_whose_commit_is_lost_is_unknown_at_once_and_doing_it_again_leaves_it_done_once(
    stage: Callable[[float], Stage], proxy: Proxy, fault: Fault
) -> None:
    expected = in_peace(stage(PATIENT_S), CHANGES)
    struck = stage(PATIENT_S)
    strike = proxy.swallow_answer if fault == "swallow_answer" else proxy.cut_before

    for number, (step, (answer, rows)) in enumerate(zip(CHANGES, expected, strict=True), 1):
        before = struck.rows()
        strike(COMMIT)
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            step.call(struck.store)
        assert time.monotonic() - began < PATIENT_S, step.name
        assert proxy.fired[fault] == number, step.name
        wait_until(lambda: not struck.watch.transactions)
        assert struck.rows() == (rows if fault == "swallow_answer" else before), step.name
        again = step.call(struck.store)
        assert again == answer or (fault == "swallow_answer" and again == 0), step.name
        assert struck.rows() == rows, step.name


@pytest.mark.crash
@pytest.mark.parametrize("fault", ["swallow_answer", "cut_before"])
@pytest.mark.parametrize("request_", [b"BEGIN", b"FOR UPDATE", b".checkpoint WHERE key = ANY"])
def test_a_change_that_breaks_before_its_commit_is_done_again_by_itself(
    stage: Callable[[float], Stage], proxy: Proxy, fault: Fault, request_: bytes
) -> None:
    delete = next(step for step in CHANGES if step.name == "delete")
    [(answer, rows)] = in_peace(stage(PATIENT_S), [delete])
    struck = stage(PATIENT_S)
    (proxy.swallow_answer if fault == "swallow_answer" else proxy.cut_before)(request_)

    assert delete.call(struck.store) == answer
    assert proxy.fired[fault] == 1
    assert struck.rows() == rows


@pytest.mark.crash
def test_a_replaced_checkpoint_whose_commit_is_lost_can_be_replaced_again(
    stage: Callable[[float], Stage], proxy: Proxy
) -> None:
    struck = stage(HASTY_S)
    proxy.swallow_answer(COMMIT, then="silence")  # with less time than a second attempt needs
    with pytest.raises(OutcomeUnknown):
        struck.store.thread("t").save({"n": 9}, id="c-2", replace=True)
    assert proxy.fired["swallow_answer"] == 1
    saved = struck.store.thread("t").save({"n": 9}, id="c-2", replace=True)

    found = struck.direct.thread("t").latest()
    assert found is not None
    assert (found.id, found.state, found.digest) == ("c-2", {"n": 9}, saved.digest)
    assert [meta.id for meta in struck.direct.thread("t").history()] == ["c-2", "c-1"]


@pytest.mark.crash
@pytest.mark.parametrize(
    ("fault", "request_"),
    [
        ("cut_before", b".commit_checkpoint("),
        ("swallow_answer", b".commit_checkpoint("),
        ("cut_before", b"COPY"),  # its answer has no end as others have, so it cannot be swallowed
        ("cut_before", COMMIT),
        ("swallow_answer", COMMIT),
    ],
)
def test_an_import_that_breaks_anywhere_is_done_once(
    stage: Callable[[float], Stage], proxy: Proxy, fault: Fault, request_: bytes
) -> None:
    struck, commits = stage(PATIENT_S), make_import()
    (proxy.swallow_answer if fault == "swallow_answer" else proxy.cut_before)(request_)
    done = access_of(struck.store).store.commit_all(commits)

    assert proxy.fired[fault] == 1
    assert [place.seq for place in done] == list(range(1, len(commits) + 1))
    stored = [meta.id for meta in struck.direct.thread("imported").history()]
    assert stored[::-1] == [commit.id for commit in commits]
    assert [place.fresh for place in access_of(struck.direct).store.commit_all(commits)] == [False] * len(commits)


@pytest.mark.crash
def test_stream_numbers_are_never_given_out_twice_though_answers_are_lost(
    stage: Callable[[float], Stage], proxy: Proxy
) -> None:
    struck, taken = stage(PATIENT_S), []
    for _ in range(5):
        proxy.swallow_answer(b".counter SET value")
        taken.append(access_of(struck.store).store.reserve(10))
        taken.append(access_of(struck.direct).store.reserve(10))

    assert proxy.fired["swallow_answer"] == 5
    assert all(after - before >= 10 for before, after in pairwise(taken))


class Load:
    """Threads that save to two shared branches through the proxy, and count what is acknowledged."""

    def __init__(self, store: backstay.Store, recorder: CallRecorder) -> None:
        self._store, self._recorder = store, recorder
        self._over = False
        self._changed = threading.Condition()
        self.acks = 0
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(WRITERS)]
        for thread in self._threads:
            thread.start()

    def wait_acks(self, count: int) -> None:
        goal = self.acks + count
        with self._changed:
            assert self._changed.wait_for(lambda: self.acks >= goal or self.failures, 60)

    def end(self) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        threads = [RecordedThread(self._store.thread(name), self._recorder) for name in ("left", "right")]
        try:
            turn = 0
            while not self._over:
                turn += 1
                thread = threads[turn % 2]
                try:
                    thread.append({"log": [turn]}, set={"by": number})
                except Conflict:
                    thread.latest()
                else:
                    with self._changed:
                        self.acks += 1
                        self._changed.notify_all()
        except BaseException as failure:
            self.failures.append(failure)
            with self._changed:
                self._changed.notify_all()


@pytest.mark.crash
@pytest.mark.effort
def test_connections_cut_at_any_moment_under_load_lose_nothing_and_never_fork(
    postgres_url: str, proxy: Proxy, show: Show
) -> None:
    rng, recorder = random.Random(SEED), CallRecorder()
    with backstay.open(proxy.url(f"{postgres_url}&timeout={PATIENT_S}&pool={WRITERS}")) as store:
        load = Load(store, recorder)
        for _ in range(CUTS):
            load.wait_acks(rng.randint(1, ACKS_BEFORE_CUT_MAX))
            proxy.cut()
        load.wait_acks(WRITERS)
        load.end()
        history = recorder.history()
        verdict = check_chain(history, chains_of(store, history.branches))
        report = store.check()

    show("cuts under load", f"seed {SEED}, {CUTS} times, {proxy.fired['cut']} connections cut; {verdict}")
    assert load.failures == []
    assert proxy.fired["cut"] >= CUTS
    assert verdict.conflicts, "the writers never raced"
    assert verdict, str(verdict)
    assert report, str(report)


class Late:
    """A writer whose save hangs in the network until it has given it up, and another one that builds on the same."""

    branch = branch_key("t")

    def __init__(self, server: PostgresServer, proxy: Proxy, url: str) -> None:
        self.server, self.proxy = server, proxy
        self.recorder = CallRecorder()
        self.near = backstay.open(url)
        self.far = backstay.open(proxy.url(f"{url}&timeout={HASTY_S}"))
        with self.recorder.append(BranchName("t"), id="first", parent=None) as call:
            put(access_of(self.near).store, self.branch, {"n": 0}, "first")
            call.ok()

    def prepare(self, name: str) -> Commit:
        """Return a commit that builds on what is there now, and takes the quick way."""
        commit = draft(access_of(self.near).store, self.branch, {"n": name}, name)
        assert is_plain(commit)
        return commit

    def commit(self, store: backstay.Store, commit: Commit) -> bool:
        """Commit and tell whether that gave a new checkpoint."""
        with self.recorder.append(BranchName("t"), id=commit.id, parent=commit.parent_id) as call:
            committed = access_of(store).store.commit(commit)
            call.ok(seq=committed.seq)
        return committed.fresh

    def hang(self, commit: Commit) -> None:
        """Commit into a network that stands still, until that is given up. The request is on its way from then on."""
        access_of(self.far).store.head(self.branch)  # so that there is a connection
        stalled = self.proxy.fired["stall"]
        self.proxy.stall()
        with pytest.raises(OutcomeUnknown):
            self.commit(self.far, commit)
        assert self.proxy.fired["stall"] > stalled

    def refusals(self) -> int:
        """Return how many quick commits the server has refused."""
        return self.server.log.read_text(encoding="utf-8", errors="replace").count("not as the writer thinks")

    def judge(self) -> None:
        history = self.recorder.history()
        verdict = check_chain(history, chains_of(self.near, history.branches))
        assert verdict, str(verdict)
        assert self.near.check()
        self.far.close()
        self.near.close()


@pytest.fixture
def late(postgres: PostgresServer, proxy: Proxy, postgres_url: str) -> Late:
    return Late(postgres, proxy, postgres_url)


@pytest.mark.crash
def test_a_save_that_arrives_after_another_writers_is_refused_by_the_server_itself(late: Late) -> None:
    mine, other = late.prepare("mine"), late.prepare("other")
    late.hang(mine)
    assert late.commit(late.near, other)
    refused = late.refusals()
    late.proxy.resume()

    wait_until(lambda: late.refusals() > refused)  # it did arrive
    with pytest.raises(Conflict):
        late.commit(late.far, mine)
    assert [meta.id for meta in late.near.thread("t").history()] == ["other", "first"]
    late.judge()


@pytest.mark.crash
def test_a_save_that_arrives_late_but_first_is_found_by_its_writer_and_is_a_conflict_to_the_other(late: Late) -> None:
    mine, other = late.prepare("mine"), late.prepare("other")
    late.hang(mine)
    late.proxy.resume()

    wait_until(lambda: late.near.get("mine"))
    with pytest.raises(Conflict):
        late.commit(late.near, other)
    assert not late.commit(late.far, mine)
    assert [meta.id for meta in late.near.thread("t").history()] == ["mine", "first"]
    late.judge()


@pytest.mark.crash
@pytest.mark.effort
def test_when_a_late_save_and_another_writers_race_exactly_one_lands(late: Late, show: Show) -> None:
    won = 0
    for number in range(RACES):
        mine, other = late.prepare(f"mine-{number}"), late.prepare(f"other-{number}")
        late.hang(mine)
        resuming = threading.Thread(target=late.proxy.resume)
        resuming.start()
        try:
            won += late.commit(late.near, other)
            landed = other.id
        except Conflict:
            landed = mine.id
        resuming.join()
        with contextlib.suppress(Conflict):
            assert not late.commit(late.far, mine), "it was stored only now"
        newest = late.near.thread("t").latest()
        assert newest is not None
        assert newest.id == landed
    show("late saves that raced another writer's", f"{RACES}, of which the other won {won}")
    late.judge()
