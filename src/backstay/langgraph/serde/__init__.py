"""Serializers for LangGraph's formats that do not trust the bytes: ``SafeSerializer``, ``ExactSerializer``."""
