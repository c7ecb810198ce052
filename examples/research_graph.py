"""Research in parallel, each question in its own subgraph, and then a replay from the middle with another style.

The first run researches three questions in parallel. Then the run is replayed from the step at which the questions were
known, with another style: searches that the first run made are not made again.
"""

from typing import Annotated, TypedDict

import backstay
from backstay.engine import Context
from backstay.engine.reducers import append

paid: list[str] = []  # the calls that this process really made


def search(question: str, page: int) -> str:  # a real search costs money
    paid.append(f"search {question} {page}")
    return f"{question} fact {page}"


def model(style: str, facts: list[str]) -> str:  # a fake model
    paid.append(f"model {style}")
    return f"{style}: {len(facts)} facts"


class Search(TypedDict, total=False):
    """The state of the inner graph: one question."""

    question: str
    facts: Annotated[list[str], append]


class Report(TypedDict, total=False):
    """The state of the whole run."""

    topic: str
    style: str
    questions: list[str]
    facts: Annotated[list[str], append]
    report: str


looking = backstay.Graph("look", state=Search)


@looking.node
def look(state: Search, ctx: Context) -> Search:
    return {"facts": [ctx.call("search", search, state["question"], ctx.visit)]}


looking.start("look")
looking.edge("look", "look", when=lambda state: len(state["facts"]) < 2, name="needs_more")
looking.end("look")

graph = backstay.Graph("research", state=Report)


@graph.node
def plan(state: Report) -> Report:
    return {"questions": [f"{state['topic']} {what}" for what in ("history", "use", "price")]}


@graph.node
def write(state: Report, ctx: Context) -> Report:
    return {"report": ctx.call("model", model, state["style"], state["facts"])}


graph.subgraph("research", looking, into=lambda state, item: {"question": item, "facts": []}, out={"facts": "facts"})
graph.start("plan")
graph.map("plan", "research", over="questions", join="write")
graph.end("write")

store = backstay.open("research.db")
thread = store.thread("otters")
if thread.latest() is None:
    result = graph.run_sync(thread, {"topic": "otters", "style": "short"}).raise_for_status()
    print(result.state["report"], f"({len(paid)} calls paid)")

paid.clear()
planned = thread.at(step=1)  # step 0 is the input; after step 1, the first node, the questions are known
assert planned is not None
if "long" not in [branch.key.name for branch in thread.branches()]:
    print(graph.replay_sync(thread, planned, plan=True))
    result = graph.replay_sync(thread, planned, branch="long", set={"style": "long"}).raise_for_status()
    print(result.state["report"], f"({len(paid)} calls paid)")

short, long = thread.latest(), store.thread("otters", branch="long").latest()
assert short is not None
assert long is not None
print("\n".join(str(backstay.diff(short, long)).splitlines()[2:]))  # without the two lines of ids
