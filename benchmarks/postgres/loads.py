"""What loads and lists cost in PostgreSQL, against decoding alone and against LangGraph's saver."""

from __future__ import annotations

import importlib
from contextlib import ExitStack

import backstay
from benchmarks.bench import THREAD
from benchmarks.loads import DECODING, cold, decoding
from benchmarks.postgres.place import Place
from benchmarks.table import Row
from benchmarks.timing import take_turns, timed

N = 1000


def run(place: Place) -> None:
    """Measure loading and listing."""
    place.bench.table.begin(
        f"PostgreSQL loads: W1, N={N:,}, 1.4 MB state, every byte verified",
        "a new handle asks for everything; the same handle only for what is new. Pages are in the server's memory",
        "with connecting = a new store object or saver each time; our open() is not timed, the peer has none",
    )
    _loads(place)
    _lists(place)


def _loads(place: Place) -> None:
    url = place.url(place.w1(N).schema)
    with ExitStack() as stack:
        store = stack.enter_context(backstay.open(url))
        thread = store.thread(THREAD)
        latest = thread.latest()
        assert latest is not None
        ops = {
            "decode": decoding(latest.state),
            "new": timed(lambda _: store.thread(THREAD).latest()),
            "same": timed(lambda _: thread.latest()),
            "middle": timed(lambda _: store.thread(THREAD).at(N // 2)),
            "connecting": cold(url),
        }
        if place.has_peers:
            peers = importlib.import_module("benchmarks.postgres.peers")
            ops |= peers.loading(stack, peers.measured(place, N).url)
        times = dict(zip(ops, take_turns(list(ops.values()), place.bench.pick(60, 15)), strict=True))
    for name, one, other, against in (
        ("load latest, new handle", "new", "decode", DECODING),
        ("load latest, same handle", "same", "decode", DECODING),
        ("load latest, with connecting", "connecting", "decode", DECODING),
        ("load the middle step, new handle", "middle", "new", "latest, new handle"),
        ("load latest, new handle", "new", "peer", "PostgresSaver.get_tuple"),
        ("load latest, same handle", "same", "peer", "PostgresSaver.get_tuple"),
        ("load latest, with connecting", "connecting", "peer connecting", "get_tuple, connecting"),
    ):
        if other in times:
            place.bench.table.add(Row(name, times[one].p50, "s", times[one].p99, times[other].p50, against))


def _lists(place: Place) -> None:
    with backstay.open(place.url(place.w1(N).schema)) as store:
        thread = store.thread(THREAD)
        (times,) = take_turns([timed(lambda _: list(thread.history(limit=N)))], place.bench.pick(30, 10))
    other = None
    if place.has_peers:
        peers = importlib.import_module("benchmarks.postgres.peers")
        other = peers.listing(peers.measured(place, N).url, N)
    name = "PostgresSaver.list, once" if other else ""
    place.bench.table.add(Row(f"list {N:,} metadata rows", times.p50, "s", times.p99, other, name))
