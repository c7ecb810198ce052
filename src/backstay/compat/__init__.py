"""Adapters for other checkpoint systems: their names, records and files, on top of Backstay.

- ``compat.sessions``: JSON session files with ``CheckpointWriter``, for agents with a directory per session.
- ``compat.backend``: ``CheckpointBackend`` with its seven awaited methods, for agents that put and get by thread.
- ``compat.workflow``: ``CheckpointStore``, in memory or as JSON files, for graphs that pause for people.
- ``compat.graph``: positions of a graph, sinks, policies, and checkpoints as bytes of the caller's own codec.

Each has importers or exporters for its data. An adapter only translates, unless its files are what it promises. New
code needs none of them: ``backstay.open`` does more, and its errors say more.
"""
