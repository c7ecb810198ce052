"""Real graphs on our saver: every story ends as it does on LangGraph's own saver in memory, step by step."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from backstay.langgraph import BackstaySaver
from support.langgraph.graphs import STORIES, Account, Stage

Story = Callable[[Stage], Account]


@pytest.mark.parametrize(("verbs", "durability"), [("sync", "sync"), ("async", "async"), ("async", "exit")])
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_story_ends_as_on_langgraphs_own_saver(story: Story, url: str, verbs: str, durability: str) -> None:
    tell(story, url, verbs, durability)


@pytest.mark.parametrize("url", ["memory", "dir", "postgres"], indirect=True)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_story_ends_alike_on_every_store(story: Story, url: str) -> None:
    tell(story, url, "sync", "sync")


@functools.cache
def expected(story: Story, verbs: str, durability: str) -> Account:
    with asyncio.Runner() as runner:
        return story(Stage(InMemorySaver(), runner if verbs == "async" else None, durability=durability))


def tell(story: Story, url: str, verbs: str, durability: str) -> None:
    with asyncio.Runner() as runner, BackstaySaver(url) as saver:
        account = story(Stage(saver, runner if verbs == "async" else None, durability=durability))

        assert account == expected(story, verbs, durability)
        report = saver.store.check()
        assert report, str(report)
