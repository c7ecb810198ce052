"""LangGraph on Holdfast: ``HoldfastSaver`` instead of its own savers, and what else a graph's nodes and users need."""

from holdfast.integrations.langgraph.effects import aeffect, effect
from holdfast.integrations.langgraph.question import interrupt_id_of, resume_of
from holdfast.integrations.langgraph.saver import HoldfastSaver
from holdfast.integrations.langgraph.serde.exact import ExactSerializer
from holdfast.integrations.langgraph.serde.safe import SafeSerializer
from holdfast.integrations.langgraph.stock.moving import import_langgraph

__all__ = [
    "ExactSerializer",
    "HoldfastSaver",
    "SafeSerializer",
    "aeffect",
    "effect",
    "import_langgraph",
    "interrupt_id_of",
    "resume_of",
]
