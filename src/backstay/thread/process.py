"""Naming a process exactly, so that one that died can be told from one that is merely slow.

A process id alone is used again. Together with the moment its process started, the boot of the machine and the
namespaces in which both numbers count, it names one process for ever. Where this process stands in the same boot and
namespaces, the kernel knows whether the other one lives; anywhere else only its heartbeats tell.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from backstay.store.boot import WALL_CLOCK, boot_id

_PROC = Path("/proc")
_DEAD = ("Z", "X", "x")  # states of a process that has ended and was not collected yet
_STATE, _STARTED = 0, 19  # fields 3 and 22 of /proc/<pid>/stat, counted after the command's name
UNKNOWN = "-"


class Process(NamedTuple):
    """A process, told from all others. Fields that this system does not tell are ``UNKNOWN``."""

    boot: str
    namespaces: str  # those that give process ids and start times their meaning
    pid: str
    started: str
    host: str  # for people

    def __str__(self) -> str:
        return " ".join(self)

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Return the process that ``str`` named, or None if the text names none."""
        parts = text.split(" ", len(cls._fields) - 1)
        return cls(*parts) if len(parts) == len(cls._fields) and _is_pid(parts[2]) else None


def _is_pid(text: str) -> bool:
    return text.isdecimal() and len(text) < 10  # the kernel's are shorter, and no call takes longer ones


def short_name() -> str:
    """Return a name for people: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def this_process() -> Process:
    """Return the name of the process this runs in."""
    pid = os.getpid()
    boot, namespaces, stat = boot_id(), _namespaces(pid), _stat(pid)
    if boot == WALL_CLOCK or namespaces is None or stat is None:
        return Process(UNKNOWN, UNKNOWN, str(pid), UNKNOWN, socket.gethostname())
    return Process(boot, namespaces, str(pid), stat[_STARTED], socket.gethostname())


def is_alive(name: str) -> bool | None:
    """Tell whether a process lives; None if it cannot be known from here."""
    other, here = Process.parse(name), this_process()
    if other is None or here.boot == UNKNOWN or other[:2] != here[:2]:
        return None
    stat = _stat(int(other.pid))
    if stat is None:
        # It may merely be hidden from us; a signal that does nothing still finds it.
        return None if _exists(int(other.pid)) else False
    return stat[_STARTED] == other.started and stat[_STATE] not in _DEAD


def _namespaces(pid: int) -> str | None:
    try:
        if os.readlink(_PROC / "self") != str(pid):
            return None  # this /proc belongs to other namespaces than this process
        return f"{os.readlink(_PROC / 'self/ns/pid')}+{_time_namespace()}"
    except OSError:
        return None


def _time_namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/time")
    except FileNotFoundError:
        return UNKNOWN  # a kernel older than these: all have the same


def _stat(pid: int) -> list[str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold anything, also spaces and brackets
    return fields if len(fields) > _STARTED else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is there, and not ours
    return True
