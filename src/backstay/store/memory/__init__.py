"""The memory store: the reference, behind one lock and without any file."""

from backstay.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]
