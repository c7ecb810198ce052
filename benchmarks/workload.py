"""W1, the chat agent: a step brings two messages of about 600 bytes and a new scratch dict; a document never changes.

Everything is drawn from a seed, so that two runs store the same bytes. The text is words in Zipf-like frequencies with
punctuation: no sentence is repeated on purpose, ids are unique, and how well it compresses is printed with the results.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from backstay.codec import encode
from benchmarks.words import WORDS

DOCUMENT_BYTES = 200_000
CONTENT_BYTES = 500  # with id, role and time: about 600 encoded
START = datetime(2026, 1, 5, 9, 0, tzinfo=UTC)

State = dict[str, Any]
Message = dict[str, Any]

_WEIGHTS = list(itertools.accumulate(1 / (rank + 2.7) for rank in range(len(WORDS))))


class Prose:
    """An endless source of English-like text."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, size: int) -> str:
        """Return about ``size`` bytes: whole sentences, the last one cut."""
        parts: list[str] = []
        length = 0
        while length < size:
            sentence = self._sentence()
            parts.append(sentence)
            length += len(sentence) + 1
        return " ".join(parts)[:size]

    def _sentence(self) -> str:
        draw = self._random
        words = [self._word() for _ in range(draw.randint(5, 18))]
        words[0] = words[0].capitalize()
        if len(words) > 8 and draw.random() < 0.6:
            words[len(words) // 2] += ","
        if draw.random() < 0.15:
            words[-1] = str(draw.randint(2, 4000))
        return " ".join(words) + draw.choices(".?!", (85, 10, 5))[0]

    def _word(self) -> str:
        return WORDS[bisect.bisect_left(_WEIGHTS, self._random.random() * _WEIGHTS[-1])]

    def uuid(self) -> str:
        """Return the text of a random id."""
        digits = f"{self._random.getrandbits(128):032x}"
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def below(self, limit: int) -> int:
        """Return a number in [0, limit)."""
        return self._random.randrange(limit)


@dataclass(frozen=True, slots=True)
class Step:
    """What is new at one step."""

    messages: list[Message]
    scratch: dict[str, Any]

    @property
    def new(self) -> bytes:
        """The encoded bytes of what is new: both messages and the changed scratch."""
        return b"".join(map(encode, self.messages)) + encode(self.scratch)


class Conversation:
    """The steps of one chat."""

    def __init__(self, seed: int = 1, document_bytes: int = DOCUMENT_BYTES) -> None:
        self._prose = Prose(seed)
        self._number = 0
        self.document = Prose(seed + 1_000_000).text(document_bytes)

    def step(self) -> Step:
        """Return the next step."""
        self._number += 1
        number, prose = self._number, self._prose
        messages = [
            message(prose, "user", START + timedelta(seconds=40 * number)),
            message(prose, "assistant", START + timedelta(seconds=40 * number + 7, milliseconds=number % 1000)),
        ]
        return Step(messages, {"turn": number, "plan": prose.text(60), "tokens": 310 * number + prose.below(200)})

    def steps(self, count: int) -> Iterator[Step]:
        """Return the next steps."""
        return (self.step() for _ in range(count))

    def first(self, step: Step) -> State:
        """Return the whole state after a first step."""
        return {"document": self.document, "messages": list(step.messages), "scratch": step.scratch}


def message(prose: Prose, role: str, when: datetime, size: int = CONTENT_BYTES) -> Message:
    """Return one message."""
    return {"id": prose.uuid(), "role": role, "content": prose.text(size), "ts": when.isoformat()}


def whole_state(conversation: Conversation, count: int) -> State:
    """Return the state after ``count`` more steps."""
    steps = list(conversation.steps(count))
    messages = [item for step in steps for item in step.messages]
    return {"document": conversation.document, "messages": messages, "scratch": steps[-1].scratch}


def growing_states(count: int) -> Iterator[tuple[int, State]]:
    """Give the new bytes and the whole state of each step, as a program has it that keeps its whole state."""
    conversation = Conversation()
    state: State = {"document": conversation.document, "messages": [], "scratch": {}}
    for number, step in enumerate(conversation.steps(count)):
        state["messages"] = state["messages"] + step.messages
        state["scratch"] = step.scratch
        yield len(step.new) + (0 if number else len(encode(conversation.document))), state
