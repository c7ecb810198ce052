"""The store a face works on: one that is handed in, or one that the face opens itself when it is first used."""

from __future__ import annotations

import os
import threading

from backstay.compat.worker import in_worker
from backstay.errors import InvalidInput, StoreError
from backstay.store.open import open_backend
from backstay.thread.store import Store, make_context
from backstay.thread.store_async import AsyncStore, async_twin

Place = Store | AsyncStore | str | os.PathLike[str]


class OpenedStore:
    """The store that a face works on. It closes what it opened, and leaves alone what it was given."""

    def __init__(self, place: Place, namespace: str = "") -> None:
        if not isinstance(place, Store | AsyncStore | str | os.PathLike):
            raise InvalidInput(
                f"a face works on an open store, or a path or URL, not on {type(place).__name__}",
                hint='For example StoreBackend("agent.db")',
            )
        if namespace and isinstance(place, Store | AsyncStore):
            raise InvalidInput("an open store has its namespace already", hint="Open the store with namespace=…")
        self.place = place
        self._owned = not isinstance(place, Store | AsyncStore)
        self._context = make_context(namespace, None)
        self._store = _wrapped(place)
        self._closed = False
        self._lock = threading.Lock()  # only ever taken in worker threads: two first uses open the store once

    async def store(self) -> AsyncStore:
        """Return the store, opening it if this is the first use."""
        store = self._store
        return await in_worker(self._open) if store is None else store

    async def close(self) -> None:
        """Close what was opened here. Closing twice is fine."""
        if self._owned:
            store = await in_worker(self._shut)
            if store is not None:
                await store.close()

    def _open(self) -> AsyncStore:
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed", hint="Make another one")
            if self._store is None:
                assert not isinstance(self.place, Store | AsyncStore)
                self._store = AsyncStore(open_backend(self.place), self._context)
            return self._store

    def _shut(self) -> AsyncStore | None:
        with self._lock:
            self._closed, store, self._store = True, self._store, None
            return store


def _wrapped(place: Place) -> AsyncStore | None:
    if isinstance(place, Store):
        return async_twin(place)
    return place if isinstance(place, AsyncStore) else None
