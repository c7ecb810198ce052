"""A checkpoint that is put again, while what is known is its parent: what is known must not be taken for it."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from backstay.langgraph import BackstaySaver


def checkpoint(checkpoint_id: str, messages: list[Any], version: int) -> Checkpoint:
    return {
        **empty_checkpoint(),
        "id": checkpoint_id,
        "channel_values": {"messages": messages},
        "channel_versions": {"messages": version},
    }


@pytest.mark.parametrize("encrypted", [False, True])
def test_an_id_that_exists_elsewhere_is_not_mistaken_for_the_next_one(encrypted: bool) -> None:
    """The branch's head is known with three messages; the id belongs to the head of another branch, with three too."""
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef") if encrypted else None
    with BackstaySaver("memory:", serde=serde) as saver:
        first, second, third = (str(uuid6()) for _ in range(3))
        start: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        said = [HumanMessage(f"said {number}", id=str(number)) for number in range(3)]
        other = [HumanMessage(f"other {number}", id=f"o{number}") for number in range(3)]
        one = saver.put(start, checkpoint(first, said[:2], 1), {"source": "loop", "step": 0}, {"messages": 1})
        two = saver.put(one, checkpoint(second, said, 2), {"source": "loop", "step": 1}, {"messages": 2})
        saver.put(start, checkpoint(third, other, 1), {"source": "loop", "step": 0}, {"messages": 1})

        more = [*said, HumanMessage("more", id="m")]
        saver.put(two, checkpoint(third, more, 3), {"source": "loop", "step": 2}, {"messages": 3})

        found = saver.get_tuple({"configurable": {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": third}})
        assert found is not None
        assert found.checkpoint["channel_values"]["messages"] == more
        kept = saver.get_tuple(two)
        assert kept is not None
        assert kept.checkpoint["channel_values"]["messages"] == said
        assert saver.store.check()
