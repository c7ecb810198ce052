import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import InvalidInput, NotFound
from backstay.model.lineage import DRAW_DEPTH_MAX, Lineage, Tree, draw, lineage_text


@dataclass(frozen=True)
class Point:
    id: str
    parent_id: str | None
    seq: int
    branch: str = "main"


def ids(points: tuple[Point, ...]) -> list[str]:
    return [point.id for point in points]


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


def naive_ancestors(points: list[Point], id: str) -> list[str]:
    found: list[str] = []
    while True:
        parents = [p.parent_id for p in points if p.id == (found[-1] if found else id)]
        if parents[0] is None or parents[0] not in [p.id for p in points]:
            return found
        found.append(parents[0])


@given(forests())
def test_every_answer_agrees_with_a_naive_model(points: list[Point]) -> None:
    lineage = Lineage(points)
    above = {p.id: naive_ancestors(points, p.id) for p in points}
    by_seq = sorted(points, key=lambda p: p.seq)

    assert ids(lineage.roots) == [p.id for p in by_seq if not above[p.id]]
    assert ids(lineage.branch_points) == [p.id for p in by_seq if len(lineage.children(p.id)) > 1]
    for p in points:
        assert ids(lineage.ancestors(p.id)) == above[p.id]
        assert lineage.depth(p.id) == len(above[p.id])
        assert ids(lineage.children(p.id)) == [c.id for c in by_seq if above[c.id][:1] == [p.id]]
        assert set(ids(lineage.descendants(p.id))) == {d.id for d in points if p.id in above[d.id]}
        assert len(lineage.descendants(p.id)) == len(set(lineage.descendants(p.id)))


@given(forests())
def test_the_common_ancestor_is_the_nearest_one_of_both(points: list[Point]) -> None:
    lineage = Lineage(points)
    for a in points:
        for b in points:
            of_a = [a.id, *naive_ancestors(points, a.id)]
            of_b = [b.id, *naive_ancestors(points, b.id)]
            expected = next((id for id in of_a if id in of_b), None)

            found = lineage.common_ancestor(a.id, b.id)

            assert (found.id if found else None) == expected


@given(forests())
def test_the_tree_holds_every_node_once_below_its_parent_in_the_order_of_seq(points: list[Point]) -> None:
    lineage = Lineage(points)
    edges: list[tuple[str, str]] = []
    waiting = list(lineage.tree())
    assert [tree.node for tree in waiting] == list(lineage.roots)

    while waiting:
        tree = waiting.pop()
        assert tuple(child.node for child in tree.children) == lineage.children(tree.node.id)
        edges.extend((tree.node.id, child.node.id) for child in tree.children)
        waiting.extend(tree.children)

    assert sorted(edges) == sorted((lineage.ancestors(p.id)[0].id, p.id) for p in points if lineage.depth(p.id))


def test_descendants_follow_each_line_to_its_end_before_the_next() -> None:
    assert ids(Lineage(FORKED).descendants("1")) == ["2", "3", "4", "5", "6"]


def test_a_node_whose_parent_was_deleted_counts_as_a_root_and_stays_in_the_tree() -> None:
    lineage = Lineage([point for point in FORKED if point.id != "2"])

    assert ids(lineage.roots) == ["1", "3", "5"]
    assert sum(1 + len(lineage.descendants(root.id)) for root in lineage.roots) == 5


def test_a_node_whose_parent_was_deleted_hangs_below_the_survivor_that_adopt_names() -> None:
    lineage = Lineage([point for point in FORKED if point.id != "2"], adopt={"2": "1"})

    assert ids(lineage.roots) == ["1"]
    assert ids(lineage.children("1")) == ["3", "5", "6"]


def test_adopting_may_take_several_hops_and_may_find_nobody() -> None:
    points = [Point("0", None, 0), Point("a", "x", 1), Point("b", "y", 2), Point("c", "z", 3)]

    lineage = Lineage(points, adopt={"x": "y", "y": "0", "z": "nobody"})

    assert ids(lineage.children("0")) == ["a", "b"]
    assert ids(lineage.roots) == ["0", "c"]


def test_adopt_does_not_move_a_node_whose_parent_is_there() -> None:
    assert ids(Lineage(FORKED, adopt={"2": "6"}).children("2")) == ["3", "5"]


@pytest.mark.parametrize(
    ("points", "adopt"),
    [
        ([Point("a", "a", 1)], {}),
        ([Point("a", "b", 1), Point("b", "a", 2), Point("c", None, 3)], {}),
        ([Point("a", "b", 1), Point("b", "a", 2), Point("c", "b", 0)], {}),
        ([Point("a", "gone", 1)], {"gone": "a"}),
    ],
)
def test_a_cycle_is_refused_and_never_walked(points: list[Point], adopt: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="lead into a cycle"):
        Lineage(points, adopt=adopt)


def test_a_cycle_of_adoptions_is_refused() -> None:
    with pytest.raises(InvalidInput, match="adopt leads from 'x' back to itself"):
        Lineage([Point("a", "x", 1)], adopt={"x": "y", "y": "x"})


def test_the_same_id_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="same id"):
        Lineage([Point("a", None, 1), Point("a", None, 2)])


def test_asking_for_a_node_that_is_not_there_names_it() -> None:
    lineage = Lineage(FORKED)

    for ask in (lineage.ancestors, lineage.children, lineage.descendants, lineage.depth):
        with pytest.raises(NotFound, match="'nope'"):
            ask("nope")
    with pytest.raises(NotFound):
        lineage.common_ancestor("1", "nope")


def test_no_nodes_are_a_lineage_too() -> None:
    lineage: Lineage[Point] = Lineage([])

    assert (lineage.roots, lineage.branch_points, lineage.tree()) == ((), (), ())


def test_a_chain_of_a_hundred_thousand_nodes_needs_no_recursion() -> None:
    points = chain(100_000)
    random.Random(1).shuffle(points)
    lineage = Lineage(points)

    assert lineage.depth("99999") == len(lineage.ancestors("99999")) == len(lineage.descendants("0")) == 99_999
    assert lineage.common_ancestor("99999", "5") == Point("5", "4", 5)
    (tree,) = lineage.tree()
    assert repr(tree) == "Tree('0', 1 children)"
    assert hash(tree) == hash(tree)
    assert len(draw([tree], lambda point: point.id)) == 100_000
    del tree  # taking it apart must not recurse either


def test_a_hundred_thousand_orphans_below_one_chain_of_deleted_parents_are_adopted_in_linear_time() -> None:
    adopt = {f"gone-{n}": f"gone-{n - 1}" if n else "root" for n in range(50_000)}
    orphans = [Point(f"o{n}", "gone-49999", n + 1) for n in range(50_000)]

    assert len(Lineage([Point("root", None, 0), *orphans], adopt=adopt).children("root")) == 50_000


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
    forest: tuple[Tree[Point], ...] = Lineage(points).tree()

    lines = draw(forest, lambda point: point.id)

    assert sorted(line.split("● ")[1] for line in lines) == sorted(point.id for point in points)
