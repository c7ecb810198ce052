"""History and threads: newest first, filtered, paged, metadata only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backstay
from backstay.model.decision import Interrupt, InterruptKind
from support.running import effort

HOSTILE = [
    "'; DROP TABLE thread; --",
    '"',
    "%",
    "_",
    "*",
    "$.a",
    "a.b",
    "../x",
    "\\",
    "ключ",
    "a\x1eb",
    " ",
    "[0]",
    "{}",
]


def test_history_lists_metadata_newest_first(store: backstay.Store) -> None:
    thread = store.thread("t")
    saved = [thread.save({"n": number}) for number in range(5)]
    listed = list(thread.history())

    assert [meta.id for meta in listed] == [cp.id for cp in reversed(saved)]
    assert [meta.digest for meta in listed] == [cp.digest for cp in reversed(saved)]
    assert not any(hasattr(meta, "state") for meta in listed)


def test_history_pages_through_more_than_any_page_holds(store: backstay.Store) -> None:
    thread = store.thread("t")
    for number in range(230):
        thread.save({"n": number})

    assert [meta.step for meta in thread.history()] == list(range(230, 0, -1))
    assert [meta.step for meta in thread.history(limit=3)] == [230, 229, 228]
    assert [meta.step for meta in thread.history(limit=2, before=3)] == [2, 1]
    assert list(thread.history(limit=0)) == []


def test_saving_inside_a_loop_over_history_neither_blocks_nor_repeats(store: backstay.Store) -> None:
    thread = store.thread("t")
    for number in range(150):
        thread.save({"n": number})
    seen = []
    for meta in thread.history():
        seen.append(meta.step)
        if len(seen) % 50 == 0:
            thread.save({"n": "meanwhile"})

    assert seen == list(range(150, 0, -1))


def test_filters_narrow_a_history_down(store: backstay.Store) -> None:
    thread = store.thread("t")
    thread.save({}, graph="g1", trigger="tool_call", metadata={"user": "u1", "n": 1})
    thread.save({}, graph="g2", metadata={"user": "u2", "n": 1.0})
    thread.save({}, interrupt=Interrupt(id="i", kind=InterruptKind.BEFORE_NODE), metadata={"user": "u1", "n": True})

    def steps(**wanted: Any) -> list[int]:
        return [meta.step for meta in thread.history(**wanted)]

    assert steps(graph="g1") == [1]
    assert steps(trigger="tool_call") == [1]
    assert steps(trigger="manual") == [3, 2]
    assert steps(interrupt=True) == [3]
    assert steps(interrupt=False) == [2, 1]
    assert steps(interrupt="beforenode") == [3]
    assert steps(interrupt="toolapproval") == []
    assert steps(where={"user": "u1"}) == [3, 1]
    assert steps(where={"user": "u1"}, limit=1) == [3]
    assert steps(where={"n": 1}) == [1]
    assert steps(where={"n": True}) == [3]
    assert steps(where={"missing": None}) == []


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_keys_and_values_mean_only_themselves(store: backstay.Store, text: str) -> None:
    store.thread(text, branch=text).save({text: 1}, metadata={text: text}, tags=[text], graph=text)
    store.thread("innocent").save({"a": 1}, metadata={"user": "u1"})
    thread = store.thread(text, branch=text)

    assert [meta.thread_id for meta in store.threads(where={text: text})] == [text]
    assert [meta.thread_id for meta in store.threads(tag=text)] == [text]
    assert [meta.thread_id for meta in thread.history(graph=text)] == [text]
    assert len(list(store.threads())) == 2
    assert store.thread(text).delete().checkpoints == 1
    assert [meta.thread_id for meta in store.threads()] == ["innocent"]


@settings(max_examples=5 * effort())
@given(
    st.lists(
        st.dictionaries(st.sampled_from("ab"), st.sampled_from([0, 1, True, 1.0, "1", None, (1,), [1]])), max_size=8
    ),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from([0, 1, True, 1.0, "1", None, (1,), [1]]), min_size=1),
)
def test_where_finds_exactly_what_a_plain_comparison_with_types_finds(
    metadatas: list[dict[str, Any]], where: dict[str, Any]
) -> None:
    def matches(metadata: dict[str, Any]) -> bool:
        return all(
            key in metadata and type(metadata[key]) is type(value) and metadata[key] == value
            for key, value in where.items()
        )

    with backstay.open("memory:") as store:
        thread = store.thread("t")
        for metadata in metadatas:
            thread.save({}, metadata=metadata)
        expected = [number for number, metadata in enumerate(metadatas, 1) if matches(metadata)]

        assert [meta.step for meta in thread.history(where=where)] == expected[::-1]


def test_threads_shows_each_thread_by_its_newest_checkpoint(store: backstay.Store) -> None:
    for name in ("a", "b", "c"):
        store.thread(name).save({"n": 1})
        store.thread(name).save({"n": 2}, metadata={"who": name})
    side = store.thread("b").fork(next(store.thread("b").history()), branch="side")
    side.save({"n": 3}, metadata={"who": "side"})

    assert [(meta.thread_id, meta.step) for meta in store.threads()] == [("c", 2), ("b", 3), ("a", 2)]
    assert [meta.thread_id for meta in store.threads(limit=2)] == ["c", "b"]
    assert [meta.thread_id for meta in store.threads(where={"who": "side"})] == ["b"]


def test_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    def opened(namespace: str) -> backstay.Store:
        return backstay.open(tmp_path / "shared.db", namespace=namespace)

    with opened("one") as one, opened("two") as two, opened("") as none:
        for store in (one, two, none):
            store.thread("t").save({"in": store.namespace}, id="same-id", tags=["x"], metadata={"k": 1})
        found = [store.get("same-id") for store in (one, two, none)]
        assert [cp and cp.state for cp in found] == [{"in": "one"}, {"in": "two"}, {"in": ""}]
        one.delete_all()

        assert list(one.threads()) == []
        assert [meta.namespace for meta in two.threads(tag="x", where={"k": 1})] == ["two"]
        assert two.thread("t").delete_checkpoint("same-id") == 1
        assert none.get("same-id") is not None
        assert none.check()


@pytest.mark.parametrize(
    "wanted",
    [{"limit": -1}, {"limit": "5"}, {"limit": True}, {"before": "x"}, {"interrupt": "nonsense"}, {"where": ["a"]}],
)
def test_impossible_filters_are_refused(thread: backstay.Thread, wanted: dict[str, Any]) -> None:
    with pytest.raises(backstay.InvalidInput):
        list(thread.history(**wanted))


def test_lists_and_checkpoints_show_themselves_in_a_notebook(store: backstay.Store) -> None:
    thread = store.thread("t")
    saved = thread.save({"html": "<script>alert(1)</script>"}, tags=["<b>"], summary="<i>")
    history = thread.history()
    assert next(history).id == saved.id
    tables = [history._repr_html_(), store.threads()._repr_html_()]

    for text in (*tables, saved.meta._repr_html_(), saved._repr_html_()):
        assert saved.id in text
        assert "<script>" not in text
        assert "<i>" not in text
    assert list(history) == [], "showing it does not rewind it"
