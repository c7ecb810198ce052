"""A TCP proxy that injures connections to PostgreSQL: the network as it is on a bad day.

It stands between a client and a server on this machine and does nothing until it is told to::

    with Proxy(server.port) as proxy:
        connection = psycopg.connect(proxy.url(server.url()))
        proxy.swallow_answer(b"COMMIT")     # the server commits, the client never hears of it

It knows the frames of PostgreSQL's protocol, not their meaning: a request is what the server answers as a whole, so a
pattern is found even if it arrives in two halves, and an answer is swallowed only when the server has given all of it.
It speaks no TLS and says so itself, so it can read everything. Every fault is counted in ``fired`` when it strikes.

One thread owns all sockets; the methods ask it and return when it has done what they say.
"""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

Fault = Literal["cut", "refuse", "stall", "swallow_answer", "cut_before"]
Match = bytes | Callable[[bytes], bool]
"""Bytes that a request contains, or a function of the request's bytes. A function runs on the proxy's thread and must
not call the proxy. psycopg sends the SQL of a statement it has prepared only once, later only its name and values."""

LOCALHOST = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""Below the range from which the kernel takes the ports of outgoing connections: it cannot take ours meanwhile."""

READ_BYTES = 1 << 16
UNSENT_BYTES_MAX = 1 << 20  # of one side; the other side is not read while more than that waits
ANSWER_SECONDS = 10.0

TLS_REQUESTS = (80877103, 80877104)  # SSLRequest, GSSENCRequest
CANCEL_REQUEST = 80877102
PARTS = b"PBDEC"  # parse, bind, describe, execute, close: parts of a request, up to a sync or a flush
ASKS_READY = b"QSF"  # query, sync, function call: each is answered with "ready for query" in the end
READY = b"Z"
PART_DONE = b"CIEs"  # command complete, empty query, error, portal suspended


def bind_free_port() -> socket.socket:
    """Return a socket bound to a port that is ours from now on, at which the holder or another process may listen.

    While the socket is open, whoever looks for a free port in the same way does not get this one.
    """
    chance = random.SystemRandom()  # not the shared one: with a fixed seed all processes would try the same ports
    while True:
        bound = socket.socket()
        try:
            bound.bind((LOCALHOST, chance.choice(PORTS)))
        except OSError:
            bound.close()
            continue
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind: before, it would share with others
        return bound


@dataclass(eq=False)
class _Side:
    """One end of a link: its socket, what was read from it, what is still to be sent to it."""

    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    ended: bool = False
    events: int = 0  # what the selector watches

    def read(self) -> int:
        """Read what is there and return how many bytes that was; note the end."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        self.ended = not data
        self.inbox += data
        return len(data)

    def flush(self) -> None:
        if self.outbox:
            try:
                del self.outbox[: self.socket.send(self.outbox)]
            except BlockingIOError:
                return

    def take(self, head: int) -> bytes | None:
        """Take one whole message from the inbox; its length stands behind ``head`` bytes."""
        if len(self.inbox) < head + 4:
            return None
        size = int.from_bytes(self.inbox[head : head + 4])
        if size < 4:
            raise ConnectionError("this is not PostgreSQL's protocol")
        if len(self.inbox) < head + size:
            return None
        message = bytes(self.inbox[: head + size])
        del self.inbox[: head + size]
        return message


@dataclass(eq=False)
class _Rule:
    """A fault that waits for its request."""

    fault: Fault
    match: Match
    then: Literal["cut", "silence"]
    left: int | None

    def applies(self, request: bytes) -> bool:
        if self.left == 0 or not (self.match in request if isinstance(self.match, bytes) else self.match(request)):
            return False
        if self.left is not None:
            self.left -= 1
        return True


@dataclass(eq=False)
class _Swallow:
    """An answer that will not arrive."""

    rule: _Rule
    before: int  # "ready for query" of earlier requests, which pass
    last: bytes  # the kinds of message that end the answer


@dataclass(eq=False)
class _Link:
    """One connection of a client and the one to the server that serves it."""

    client: _Side
    server: _Side
    starting: bool = True
    parts: bytearray = field(default_factory=bytearray)  # of a request that is not complete yet
    asks: bool = False  # the last request is answered with "ready for query" in the end
    owed: int = 0  # how often the server has yet to say "ready for query"
    swallow: _Swallow | None = None
    silent: bool = False
    closed: bool = False

    @property
    def sides(self) -> tuple[_Side, _Side]:
        return self.client, self.server

    def next_request(self) -> bytes | None:
        """Return the next request that is complete."""
        if self.starting:
            return self._first_request()
        while (message := self.client.take(head=1)) is not None:
            self.parts += message
            if message[:1] not in PARTS:
                self.asks = message[:1] in ASKS_READY
                request = bytes(self.parts)
                self.parts.clear()
                return request
        return None

    def _first_request(self) -> bytes | None:
        while (message := self.client.take(head=0)) is not None:
            code = int.from_bytes(message[4:8])
            if code not in TLS_REQUESTS:
                self.starting, self.asks = False, code != CANCEL_REQUEST
                return message
            self.client.outbox += b"N"
        return None

    def forward(self, request: bytes, rule: _Rule | None) -> None:
        """Let a request through; ``rule`` will swallow its answer."""
        if rule:
            self.swallow = _Swallow(rule, before=self.owed, last=READY if self.asks else PART_DONE)
        self.owed += self.asks
        self.server.outbox += request

    def next_swallowed(self) -> _Rule | None:
        """Pass answers on; return the rule whose answer has just been swallowed to its end."""
        while (message := self.server.take(head=1)) is not None:
            kind = message[:1]
            self.owed -= kind == READY
            if self.swallow is None or self.swallow.before:
                self.client.outbox += message
                if self.swallow is not None and kind == READY:
                    self.swallow.before -= 1
            elif kind in self.swallow.last:
                rule, self.swallow = self.swallow.rule, None
                return rule
        return None


class Proxy:
    """Forwards connections to a PostgreSQL port of this machine, and breaks them as told."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.refuse = False
        """Accept new connections and close them at once."""
        self._fired: Counter[Fault] = Counter()
        self._strikes = threading.Condition()
        self._links: set[_Link] = set()
        self._rules: list[_Rule] = []
        self._stalled = False
        self._closing = False
        self._orders: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._listener = bind_free_port()
        self.port: int = self._listener.getsockname()[1]
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._bell, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._ear, selectors.EVENT_READ, self._obey)
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and the proxy itself."""
        if self._thread.is_alive():
            self._order(partial(setattr, self, "_closing", True))
        self._thread.join()
        self._bell.close()

    def url(self, server_url: str) -> str:
        """Return the URL with this proxy in place of the server."""
        parts = urlsplit(server_url)
        user, at, _ = parts.netloc.rpartition("@")
        given = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)  # a plus means itself to libpq
        query = [(name, value) for name, value in given if name not in ("host", "hostaddr", "port")]
        address = f"{user}{at}{LOCALHOST}:{self.port}"
        return urlunsplit(parts._replace(netloc=address, query=urlencode(query, quote_via=quote)))

    @property
    def fired(self) -> Counter[Fault]:
        """How often each fault has struck: connections cut or refused, reads stalled, requests and answers lost."""
        with self._strikes:
            return self._fired.copy()

    def wait_fired(self, fault: Fault, count: int = 1, timeout: float = ANSWER_SECONDS) -> None:
        """Wait until a fault has struck so many times in all."""
        with self._strikes:
            if not self._strikes.wait_for(lambda: self._fired[fault] >= count, timeout):
                raise TimeoutError(f"{fault} struck {self._fired[fault]} times in {timeout:g} s, not {count}")

    def cut(self) -> None:
        """Reset all live connections, on both sides."""
        self._order(self._cut_all)

    def stall(self) -> None:
        """Become a black hole: accept, read and acknowledge everything, and pass nothing on."""
        self._order(partial(self._set_stalled, True))

    def resume(self) -> None:
        """End the stall. What was held arrives now, late, also from a client that has left since."""
        self._order(partial(self._set_stalled, False))

    def swallow_answer(self, match: Match, *, then: Literal["cut", "silence"] = "cut", times: int | None = 1) -> None:
        """Let the next matching request through and swallow its whole answer; then cut, or say nothing ever after.

        ``times`` is the number of requests to strike; None means every one.
        """
        self._order(partial(self._rules.append, _Rule("swallow_answer", match, then, times)))

    def cut_before(self, match: Match, *, times: int | None = 1) -> None:
        """Reset the connection on which a matching request comes; nothing of the request reaches the server."""
        self._order(partial(self._rules.append, _Rule("cut_before", match, "cut", times)))

    def heal(self) -> None:
        """Forget all faults that are armed and resume; connections that are cut or silenced stay so."""
        self.refuse = False
        self._order(self._rules.clear)
        self.resume()

    # What follows runs on the proxy's thread, except _order.

    def _order(self, action: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the proxy is closed")
        done: Future[None] = Future()
        self._orders.put((action, done))
        self._bell.send(b"!")
        done.result(ANSWER_SECONDS)

    def _obey(self, events: int) -> None:
        self._ear.recv(READ_BYTES)
        while not self._orders.empty():
            action, done = self._orders.get()
            action()
            done.set_result(None)

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select():
                    key.data(events)
        finally:
            for link in list(self._links):
                self._close(link)
            self._selector.close()
            self._listener.close()
            self._ear.close()

    def _strike(self, fault: Fault) -> None:
        """Count a fault, before anybody can notice it: who does notice finds it counted."""
        with self._strikes:
            self._fired[fault] += 1
            self._strikes.notify_all()

    def _accept(self, events: int) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        if self.refuse:
            self._strike("refuse")
            client.close()
            return
        try:
            server = socket.create_connection((LOCALHOST, self.target), timeout=ANSWER_SECONDS)
        except OSError:
            client.close()
            return
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(_Side(client), _Side(server))
        self._links.add(link)
        self._watch(link)

    def _serve(self, link: _Link, side: _Side, events: int) -> None:
        if link.closed:
            return  # by the other side's event, a moment ago
        if events & selectors.EVENT_READ and side.read() and self._stalled:
            self._strike("stall")
        self._move(link)

    def _move(self, link: _Link) -> None:
        """Bring a link on as far as it goes."""
        try:
            if link.silent:
                self._drop(link)
            elif not self._stalled:
                self._pass_on(link)
        except OSError:
            self._close(link, reset=True)
        if not link.closed:
            self._watch(link)

    def _drop(self, link: _Link) -> None:
        for side in link.sides:
            side.inbox.clear()
            side.flush()
        if link.client.ended or link.server.ended:
            self._close(link)

    def _pass_on(self, link: _Link) -> None:
        self._pass_requests(link)
        if not link.closed:
            self._pass_answers(link)
        if link.closed or link.silent:
            return
        for side in link.sides:
            side.flush()
        if (link.client.ended and not link.server.outbox) or (link.server.ended and not link.client.outbox):
            self._close(link)

    def _pass_requests(self, link: _Link) -> None:
        while (request := link.next_request()) is not None:
            rule = next((rule for rule in self._rules if rule.applies(request)), None)
            if rule and rule.fault == "cut_before":
                link.server.flush()  # what came before it
                self._strike("cut_before")
                self._close(link, reset=True)
                return
            link.forward(request, rule)

    def _pass_answers(self, link: _Link) -> None:
        rule = link.next_swallowed()
        if rule is None:
            return
        link.silent = True
        link.client.flush()  # what came before it
        self._strike("swallow_answer")
        if rule.then == "cut":
            self._close(link, reset=True)

    def _watch(self, link: _Link) -> None:
        for side, other in (link.sides, link.sides[::-1]):
            reads = not side.ended and len(other.outbox) < UNSENT_BYTES_MAX
            writes = bool(side.outbox) and not self._stalled
            events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
            if side.events and not events:
                self._selector.unregister(side.socket)
            elif events and not side.events:
                self._selector.register(side.socket, events, partial(self._serve, link, side))
            elif events != side.events:
                self._selector.modify(side.socket, events, partial(self._serve, link, side))
            side.events = events

    def _set_stalled(self, stalled: bool) -> None:
        self._stalled = stalled
        for link in list(self._links):
            self._move(link)

    def _cut_all(self) -> None:
        for link in list(self._links):
            self._strike("cut")
            self._close(link, reset=True)

    def _close(self, link: _Link, reset: bool = False) -> None:
        link.closed = True
        self._links.discard(link)
        for side in link.sides:
            if side.events:
                self._selector.unregister(side.socket)
            if reset:
                side.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            side.socket.close()
