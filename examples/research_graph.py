"""Research in parallel, each part in a graph of its own, and then once more from the middle with another wish.

The first run researches three questions side by side. Then the same run is taken up from the point where the questions
were known, with another style: what was found before is not looked up again.
"""

from typing import Annotated, TypedDict

import backstay
from backstay.engine import Context, append

paid: list[str] = []  # what was asked of the world outside in this process


def search(question: str, page: int) -> str:  # stands for a search that costs money
    paid.append(f"search {question} {page}")
    return f"{question} fact {page}"


def model(style: str, facts: list[str]) -> str:  # stands for a model
    paid.append(f"model {style}")
    return f"{style}: {len(facts)} facts"


class Search(TypedDict, total=False):
    """What the inner graph knows: one question."""

    question: str
    facts: Annotated[list[str], append]


class Report(TypedDict, total=False):
    """What the whole run knows."""

    topic: str
    style: str
    questions: list[str]
    facts: Annotated[list[str], append]
    report: str


looking = backstay.Graph("look", state=Search)


@looking.node
def look(state: Search, ctx: Context) -> Search:
    return {"facts": [ctx.effect("search", search, state["question"], ctx.visit)]}


looking.start("look")
looking.edge("look", "look", when=lambda state: len(state["facts"]) < 2, name="needs_more")
looking.end("look")

graph = backstay.Graph("research", state=Report)


@graph.node
def plan(state: Report) -> Report:
    return {"questions": [f"{state['topic']} {what}" for what in ("history", "use", "price")]}


@graph.node
def write(state: Report, ctx: Context) -> Report:
    return {"report": ctx.effect("model", model, state["style"], state["facts"])}


graph.subgraph("research", looking, into=lambda state, item: {"question": item, "facts": []}, out={"facts": "facts"})
graph.start("plan")
graph.map("plan", "research", over="questions", join="write")
graph.end("write")

store = backstay.open("research.db")
thread = store.thread("otters")
if thread.latest() is None:
    result = graph.run_sync(thread, {"topic": "otters", "style": "short"}).check()
    print(result.state["report"], f"({len(paid)} calls paid)")

paid.clear()
planned = thread.at(step=1)  # step 0 is the input, step 1 the first node: the questions are known
assert planned is not None
if "long" not in [lane.key.branch for lane in thread.branches()]:
    print(graph.replay_sync(thread, planned, plan=True))
    result = graph.replay_sync(thread, planned, branch="long", set={"style": "long"}).check()
    print(result.state["report"], f"({len(paid)} calls paid)")

short, long = thread.latest(), store.thread("otters", branch="long").latest()
assert short is not None
assert long is not None
print("\n".join(str(backstay.diff(short, long)).splitlines()[2:]))  # without the two lines of ids
