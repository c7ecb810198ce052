"""Blocking work for callers with an event loop: done in a worker thread, as by stores."""

from __future__ import annotations

from backstay.thread.offload import Offload

in_worker = Offload().run
