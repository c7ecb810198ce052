"""LangGraph on Backstay: ``BackstaySaver`` instead of its own savers, and what else a graph's nodes and users need."""

from backstay.integrations.langgraph.effects import aeffect, effect
from backstay.integrations.langgraph.question import interrupt_id_of, resume_of
from backstay.integrations.langgraph.saver import BackstaySaver
from backstay.integrations.langgraph.serde.exact import ExactSerializer
from backstay.integrations.langgraph.serde.safe import SafeSerializer
from backstay.integrations.langgraph.stock.moving import import_langgraph

__all__ = [
    "BackstaySaver",
    "ExactSerializer",
    "SafeSerializer",
    "aeffect",
    "effect",
    "import_langgraph",
    "interrupt_id_of",
    "resume_of",
]
