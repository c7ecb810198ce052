"""Faces of other checkpoint systems: their names, shapes and files, over Backstay's one core.

- ``compat.sessions``: JSON session files with ``CheckpointWriter``, for agents that keep a directory a session.
- ``compat.backend``: ``CheckpointBackend`` with its seven awaited methods, for agents that put and get by thread.
- ``compat.workflow``: ``CheckpointStore`` in memory or as one JSON file a checkpoint, for graphs that pause for people.

A face translates; it stores nothing in a way of its own, unless its files are the promise. New code needs none of them:
``backstay.open`` does more, and says more when something goes wrong.
"""
