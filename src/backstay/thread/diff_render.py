"""A diff as people see it: lines for a terminal, a table for a notebook, a summary by top-level key.

A state holds what models and tools wrote, so none of it is trusted here: a character that does not print (control
characters, terminal escapes, changes of writing direction) is shown as its code, HTML is escaped, and both the length
of a value and the number of lines are bounded.
"""

from __future__ import annotations

import html
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from backstay.model.checkpoint import shorten

LINES_MAX: Final = 1000
"""Operations shown; the rest are counted."""

VALUE_CHARS_MAX: Final = 120
PATH_CHARS_MAX: Final = 200
_SIGNS: Final = {"add": "+", "remove": "-", "replace": "~"}
_COLOURS: Final = {"+": "#1a7f37", "-": "#cf222e", "~": "#9a6700"}
_PAST: Final = {"add": "added", "remove": "removed", "replace": "replaced"}
_INT_BITS_SHOWN_MAX: Final = 1024


def text(before: str, after: str, patch: Sequence[dict[str, Any]], gone: Sequence[Any]) -> str:
    """Return the diff as lines of plain text."""
    if not patch:
        return f"{visible(before)} and {visible(after)} are the same"
    lines = [f"--- {visible(before)}", f"+++ {visible(after)}"]
    lines += [f"{sign} {path}: {value}" for sign, path, value in _rows(patch, gone)]
    return "\n".join(lines + _rest(patch))


def table(before: str, after: str, patch: Sequence[dict[str, Any]], gone: Sequence[Any]) -> str:
    """Return the diff as an HTML table."""
    title = f"{visible(before)} → {visible(after)}" + ("" if patch else ": the same")
    rows = "".join(
        f"<tr style='color:{_COLOURS[sign]}'><td>{sign}</td><td style='text-align:left'><code>{html.escape(path)}"
        f"</code></td><td style='text-align:left'><code>{html.escape(value)}</code></td></tr>"
        for sign, path, value in _rows(patch, gone)
    )
    rest = "".join(f"<tr><td colspan='3'>{html.escape(line)}</td></tr>" for line in _rest(patch))
    return f"<table><caption>{html.escape(title)}</caption>{rows}{rest}</table>"


def summary(patch: Sequence[dict[str, Any]], lists: frozenset[str]) -> str:
    """Return one line for each top-level key that changed."""
    counts: dict[str, dict[str, int]] = {}
    edited: set[tuple[str, str]] = set()
    for operation in patch:
        parts = operation["path"][1:].split("/")
        key = parts[0].replace("~1", "/").replace("~0", "~")
        word = _word(operation["op"], parts, key in lists)
        if word == "edited":
            item = (parts[0], parts[1])
            if item in edited:
                continue  # one more change within the same item
            edited.add(item)
        words = counts.setdefault(key, {})
        words[word] = words.get(word, 0) + (len(parts) > 1)
    return "\n".join(
        f"{_shown_key(key)}: {', '.join(f'{count} {word}' if count else word for word, count in words.items())}"
        for key, words in counts.items()
    )


def visible(text: str) -> str:
    """Return the text with every character that does not print replaced by its code."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _word(op: str, parts: list[str], is_list: bool) -> str:
    if len(parts) > 2:
        return "edited"
    if op == "add" and len(parts) == 2 and is_list:
        return "appended" if parts[1] == "-" else "inserted"
    return _PAST[op]


def _shown_key(key: str) -> str:
    return shorten(visible(key), PATH_CHARS_MAX) or "''"


def _rows(patch: Sequence[dict[str, Any]], gone: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield sign, path and what changed, ready to be seen."""
    for number, operation in enumerate(patch[:LINES_MAX]):
        known = number < len(gone)
        old = _shown(gone[number]) if known and operation["op"] != "add" else ""
        new = _shown(operation["value"]) if "value" in operation else ""
        path = shorten(visible(operation["path"]), PATH_CHARS_MAX)
        yield _SIGNS[operation["op"]], path, " → ".join(filter(None, (old, new)))


def _rest(patch: Sequence[dict[str, Any]]) -> list[str]:
    return [f"… and {len(patch) - LINES_MAX} more"] if len(patch) > LINES_MAX else []


class _Short(reprlib.Repr):
    """A ``repr`` that looks at no more of a value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = VALUE_CHARS_MAX
        self.maxlevel = 4

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write very long ints in decimal.
        return repr(x) if x.bit_length() <= _INT_BITS_SHOWN_MAX else f"<int of {x.bit_length()} bits>"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= VALUE_CHARS_MAX else f"{x[: VALUE_CHARS_MAX // 4]!r}… ({len(x)} bytes)"


_short: Final = _Short()


def _shown(value: Any) -> str:
    return shorten(visible(_short.repr(value)), VALUE_CHARS_MAX)
