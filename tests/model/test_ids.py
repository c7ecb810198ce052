import itertools
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput
from backstay.model.ids import ID_LENGTH_MAX, LABEL_LENGTH_MAX, IdMaker, check_id, check_label

TIME_MS_MAX = 2**48 - 1


def zeros(count: int) -> bytes:
    """Entropy that helps nobody: what still holds with it does not rest on chance."""
    return bytes(count)


def maker_at(*times_ms: int, entropy: Callable[[int], bytes] = zeros) -> IdMaker:
    """Return a maker whose clock shows these times, and the last one for ever."""
    clock = itertools.chain(times_ms, itertools.repeat(times_ms[-1]))
    return IdMaker(lambda: next(clock), entropy)


@pytest.mark.parametrize(
    "text",
    ["a", "../x", "'; DROP TABLE x; --", "*", "%", "a/b\\c", "\n\x1b[31m", "名前", "😀", " ", "x" * ID_LENGTH_MAX],
)
def test_any_text_that_every_store_can_hold_is_an_id_and_prints_as_itself(text: str) -> None:
    assert check_id(text, "thread_id") == text
    assert str(check_id(text, "thread_id")) == text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "empty"),
        ("x" * (ID_LENGTH_MAX + 1), "256 characters; at most 255 are allowed"),
        ("a\0b", "NUL"),
        ("a\ud800", "lone surrogate at character 1"),
        (b"a", "bytes, not text"),
        (None, "NoneType, not text"),
        (7, "int, not text"),
        (type("Name", (str,), {})("a"), "Name, not text"),
    ],
)
def test_what_cannot_be_an_id_is_refused_with_its_name_and_advice(value: object, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_id(value, "thread_id")

    assert str(caught.value).startswith("invalid input: thread_id ")
    assert problem in str(caught.value)
    assert caught.value.hint


@given(st.text(alphabet=st.characters(), max_size=ID_LENGTH_MAX + 20))
def test_an_accepted_id_survives_utf_8_unchanged(text: str) -> None:
    try:
        accepted = check_id(text, "id")
    except InvalidInput:
        return

    assert accepted.encode().decode() == text


def test_a_label_may_be_empty_and_has_its_own_bound() -> None:
    assert check_label("", "label") == ""
    assert check_label("x" * LABEL_LENGTH_MAX, "label") == "x" * LABEL_LENGTH_MAX

    with pytest.raises(InvalidInput, match="label has 1025 characters"):
        check_label("x" * (LABEL_LENGTH_MAX + 1), "label")
    with pytest.raises(InvalidInput, match="3 are allowed"):
        check_label("four", "label", length_max=3)


def test_a_made_id_is_the_bare_text_of_a_uuid_7_that_holds_the_time() -> None:
    text = maker_at(1_700_000_000_123, entropy=os.urandom).make()

    parsed = uuid.UUID(text)
    assert text == str(parsed)
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert parsed.int >> 80 == 1_700_000_000_123
    assert check_id(text, "id") == text


@given(st.lists(st.integers(0, TIME_MS_MAX - 1), min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_ids_only_grow_whatever_the_clock_does(times_ms: list[int], random: object) -> None:
    randbytes: Callable[[int], bytes] = random.randbytes  # type: ignore[attr-defined]  # Hypothesis types it as object
    maker = maker_at(*times_ms, entropy=randbytes)

    made = [maker.make() for _ in range(len(times_ms) + 5)]

    assert made == sorted(set(made))
    assert all(uuid.UUID(text).version == 7 and uuid.UUID(text).variant == uuid.RFC_4122 for text in made)


def test_ids_go_on_growing_when_the_counter_of_a_millisecond_is_used_up() -> None:
    maker = maker_at(5)

    made = [maker.make() for _ in range(10_000)]

    assert made == sorted(set(made))
    assert uuid.UUID(made[4095]).int >> 80 == 5
    assert uuid.UUID(made[4096]).int >> 80 == 6


def test_every_id_has_62_fresh_random_bits() -> None:
    ones = int("1" * 62, 2)

    assert uuid.UUID(maker_at(5, entropy=lambda count: b"\xff" * count).make()).int & ones == ones
    assert uuid.UUID(maker_at(5).make()).int & ones == 0


def test_makers_that_share_a_clock_do_not_clash() -> None:
    one, other = maker_at(5, entropy=os.urandom), maker_at(5, entropy=os.urandom)

    made = [maker.make() for _ in range(5_000) for maker in (one, other)]

    assert len(set(made)) == len(made)


@pytest.mark.parametrize("time_ms", [-1, TIME_MS_MAX + 1, 1.5, True, None])
def test_a_clock_that_shows_no_time_is_refused(time_ms: object) -> None:
    maker = IdMaker(lambda: time_ms, zeros)  # type: ignore[arg-type,return-value]  # the point of the test

    with pytest.raises(InvalidInput, match="clock_ms returned"):
        maker.make()


def test_the_last_millisecond_gives_ids_until_its_counter_ends() -> None:
    maker = maker_at(TIME_MS_MAX)
    made = [maker.make() for _ in range(4096)]

    assert made == sorted(set(made))
    with pytest.raises(InvalidInput, match="the last possible id"):
        maker.make()


def test_a_source_that_gives_too_few_random_bytes_is_refused() -> None:
    with pytest.raises(InvalidInput, match="entropy returned 1 bytes"):
        maker_at(5, entropy=lambda count: b"x").make()


def test_threads_that_share_a_maker_each_see_growing_ids_and_no_clash() -> None:
    maker = maker_at(5)  # no entropy: only the counter keeps ids apart
    made: list[list[str]] = [[] for _ in range(8)]
    start = threading.Barrier(len(made))

    def work(mine: list[str]) -> None:
        start.wait()
        mine.extend(maker.make() for _ in range(2_000))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(mine == sorted(mine) for mine in made)
    assert len(set().union(*made)) == 16_000


FORK_WHILE_ANOTHER_THREAD_HOLDS_THE_LOCK = """
import os, threading
from backstay.model import ids
maker = ids.IdMaker(lambda: 5, os.urandom)
maker.make()
held, done = threading.Event(), threading.Event()
def hold():
    with ids._lock:
        held.set()
        done.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, "\\n".join(maker.make() for _ in range(1000)).encode())
    os._exit(0)
os.close(writer)
done.set()
mine = {maker.make() for _ in range(1000)}
theirs = set(open(reader).read().split())
print(len(mine), len(theirs), len(mine & theirs))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_parent_and_child_of_a_fork_make_different_ids_and_the_child_never_hangs() -> None:
    # In a process of its own: newer Pythons warn when a process with threads forks.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_WHILE_ANOTHER_THREAD_HOLDS_THE_LOCK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.stdout.split(), done.stderr) == (["1000", "1000", "0"], "")
