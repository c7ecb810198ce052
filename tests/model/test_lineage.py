import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput
from backstay.model.lineage import DRAW_DEPTH_MAX, Tree, draw, lineage_text, trees_of


@dataclass(frozen=True)
class Point:
    id: str
    parent_id: str | None
    seq: int
    branch: str = "main"


def chain(length: int) -> list[Point]:
    return [Point(str(seq), str(seq - 1) if seq else None, seq) for seq in range(length)]


FORKED = [
    Point("1", None, 1),
    Point("2", "1", 2),
    Point("3", "2", 3, "what-if"),
    Point("4", "3", 4, "what-if"),
    Point("5", "2", 5),
    Point("6", "1", 6, "other"),
]


@st.composite
def forests(draw_: st.DrawFn) -> list[Point]:
    """Return nodes in any order, each below an earlier one, below nothing, or below one that is not there."""
    size = draw_(st.integers(1, 25))
    points = []
    for seq in range(size):
        earlier = st.integers(0, seq - 1).map(str) if seq else st.none()
        parent = draw_(st.one_of(earlier, earlier, st.none(), st.just("gone")))
        points.append(Point(str(seq), parent, seq, draw_(st.sampled_from(["main", "a", "b"]))))
    return draw_(st.permutations(points))


@given(forests())
def test_the_tree_holds_every_node_once_below_its_parent_in_the_order_of_seq(points: list[Point]) -> None:
    known = {point.id for point in points}
    forest = trees_of(points)
    found: list[tuple[str | None, str]] = []
    waiting: list[tuple[str | None, tuple[Tree[Point], ...]]] = [(None, forest)]
    while waiting:
        parent, trees = waiting.pop()
        assert [tree.node.seq for tree in trees] == sorted(tree.node.seq for tree in trees)
        found += [(parent, tree.node.id) for tree in trees]
        waiting += [(tree.node.id, tree.children) for tree in trees]

    expected = [(point.parent_id if point.parent_id in known else None, point.id) for point in points]
    assert sorted(found, key=repr) == sorted(expected, key=repr)


def test_a_node_whose_parent_was_deleted_counts_as_a_root_and_stays_in_the_tree() -> None:
    forest = trees_of([point for point in FORKED if point.id != "2"])

    assert [tree.node.id for tree in forest] == ["1", "3", "5"]
    assert len(draw(forest, lambda point: point.id)) == 5


@pytest.mark.parametrize(
    "points",
    [
        [Point("a", "a", 1)],
        [Point("a", "b", 1), Point("b", "a", 2), Point("c", None, 3)],
        [Point("a", "b", 1), Point("b", "a", 2), Point("c", "b", 0)],
    ],
)
def test_a_cycle_is_refused_and_never_walked(points: list[Point]) -> None:
    with pytest.raises(InvalidInput, match="lead into a cycle"):
        trees_of(points)


def test_the_same_id_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="same id"):
        trees_of([Point("a", None, 1), Point("a", None, 2)])


def test_no_nodes_have_no_tree() -> None:
    assert trees_of(list[Point]()) == ()


def test_a_chain_of_a_hundred_thousand_nodes_needs_no_recursion() -> None:
    points = chain(100_000)
    random.Random(1).shuffle(points)
    (tree,) = trees_of(points)

    assert repr(tree) == "Tree('0', 1 children)"
    assert hash(tree) == hash(tree)
    assert len(draw([tree], lambda point: point.id)) == 100_000
    del tree  # taking it apart must not recurse either


def test_a_branch_is_drawn_straight_down_and_its_forks_are_indented() -> None:
    text = lineage_text(FORKED, lambda point: f"{point.id} {point.branch}")

    assert text.splitlines() == [
        "● 1 main",
        "├─● 6 other",
        "● 2 main",
        "├─● 3 what-if",
        "│ ● 4 what-if",
        "● 5 main",
    ]


def test_a_fork_that_is_the_only_child_stays_in_the_column() -> None:
    points = [Point("1", None, 1), Point("2", "1", 2, "a"), Point("3", "2", 3, "b")]

    assert lineage_text(points, lambda point: point.id).splitlines() == ["● 1", "● 2", "● 3"]


def test_a_label_cannot_break_the_line_or_drive_the_terminal() -> None:
    assert lineage_text([Point("a\nb\x1b[31m", None, 1)], lambda point: point.id) == "● a�b�[31m"


def test_forks_of_forks_beyond_the_limit_are_drawn_but_not_indented_further() -> None:
    points = [Point("m0", None, 0, "0")]
    for n in range(1, 2_000):
        points.append(Point(f"leaf{n}", f"m{n - 1}", 2 * n, str(n - 1)))
        points.append(Point(f"m{n}", f"m{n - 1}", 2 * n + 1, str(n)))

    lines = lineage_text(points, lambda point: point.id).splitlines()

    assert len(lines) == len(points)
    assert max(line.index("●") for line in lines) == 2 * DRAW_DEPTH_MAX


@given(forests())
def test_a_drawing_has_one_line_for_every_node(points: list[Point]) -> None:
    lines = draw(trees_of(points), lambda point: point.id)

    assert sorted(line.split("● ")[1] for line in lines) == sorted(point.id for point in points)
