"""LangGraph on Holdfast: ``HoldfastSaver`` instead of its own savers."""

from holdfast.integrations.langgraph.saver import HoldfastSaver

__all__ = ["HoldfastSaver"]
