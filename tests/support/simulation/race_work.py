"""What the processes of ``test_races`` do: look at a head, then, when told, try to add to it. All is recorded."""

from __future__ import annotations

from typing import Any

import backstay
from support.crew import describe, outcome
from support.simulation.history import CallRecorder, RecordedThread


class Racer:
    """One of several that want the same. ``store`` is a URL, or an open store that racers of one process share."""

    def __init__(self, store: str | backstay.Store, recorder: str | CallRecorder, name: str) -> None:
        self.store = backstay.open(store) if isinstance(store, str) else store
        self.recorder = CallRecorder(recorder) if isinstance(recorder, str) else recorder
        self.name = name
        self.recorded: RecordedThread | None = None

    def look(self, thread: str) -> str | None:
        """Load the newest checkpoint of a thread, to build on it; return its id."""
        self.recorded = RecordedThread(self.store.thread(thread), self.recorder)
        found = self.recorded.latest()
        return None if found is None else found.id

    def look_at_own(self, thread: str) -> str | None:
        """Load the newest checkpoint of a thread that nobody else writes."""
        return self.look(f"{thread}, {self.name}")

    def save(self, number: int) -> dict[str, Any]:
        """Save what only this one would save."""
        return self._timed(lambda: describe(self._recorded().save({"by": self.name, "n": number})))

    def save_as(self, id: str, text: str) -> dict[str, Any]:
        """Save something under an id that others want too."""
        return self._timed(lambda: describe(self._recorded().save({"text": text}, id=id)))

    def save_own_as(self, id: str) -> dict[str, Any]:
        """Save what only this one would save, under an id that others want too."""
        return self.save_as(id, self.name)

    def fork(self, thread: str, checkpoint: str, branch: str) -> dict[str, Any]:
        """Begin a branch that others want to begin too."""

        def begin() -> dict[str, Any]:
            forked = self.store.thread(thread).fork(checkpoint, branch=branch, set={"by": self.name})
            first = next(iter(forked.history()))
            return describe(first)

        return self._timed(begin)

    def close(self) -> None:
        self.store.close()
        self.recorder.close()

    def _recorded(self) -> RecordedThread:
        assert self.recorded is not None
        return self.recorded

    def _timed(self, call: Any) -> dict[str, Any]:
        began = self.recorder.clock()
        found = outcome(call)
        return {**found, "by": self.name, "began": began, "ended": self.recorder.clock()}
