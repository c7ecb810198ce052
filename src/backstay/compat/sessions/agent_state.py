"""What an agent is doing, by the names that stand in files."""

from __future__ import annotations

from enum import StrEnum

from backstay.errors import InvalidInput


class AgentState(StrEnum):
    """The states of an agent; ``str`` gives the name in files, ``parse`` takes it."""

    IDLE = "idle"
    RUNNING = "running"
    TOOL_CALLING = "tool_calling"
    WAITING_TOOL = "waiting_tool"
    STOPPED = "stopped"
    ERROR = "error"
    COMPLETED = "completed"

    @classmethod
    def parse(cls, text: str) -> AgentState:
        """Return the state of that name."""
        try:
            return cls(text)
        except ValueError:
            raise InvalidInput(f"no agent state is called {text!r}", hint=f"Use one of {', '.join(cls)}") from None
