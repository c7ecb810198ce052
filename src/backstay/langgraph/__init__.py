"""LangGraph on Backstay: ``BackstaySaver`` instead of its own savers, and what else a graph's nodes and users need."""

from backstay.langgraph.effects import aeffect, effect
from backstay.langgraph.importer.importer import import_langgraph
from backstay.langgraph.interrupts import interrupt_id_of, resume_of
from backstay.langgraph.saver import BackstaySaver
from backstay.langgraph.serde.exact import ExactSerializer
from backstay.langgraph.serde.safe import SafeSerializer

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
