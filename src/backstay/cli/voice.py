"""How the demo speaks: headings, lines and claims. A claim that did not hold is remembered; that decides the exit code.

Quiet, it says nothing and only remembers. Colour is click's matter: it strips it where it is not wanted.
"""

from __future__ import annotations

from typing import Any

import click

INDENT = "   "


class Voice:
    """Speaks on stdout, or is quiet."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._headings = 0
        self.failed: list[str] = []

    def title(self, text: str) -> None:
        """Say what this is."""
        self._say(click.style(text, bold=True))

    def heading(self, text: str) -> None:
        """Begin the next numbered part."""
        self._headings += 1
        self.gap()
        self._say(click.style(f"{self._headings}. {text}", fg="cyan", bold=True))

    def line(self, text: str, **style: Any) -> None:
        """Say something, styled as ``click.style`` does; several lines are indented alike."""
        for one in text.splitlines():
            self._say(INDENT + click.style(one, **style))

    def gap(self) -> None:
        """Leave a line empty."""
        self._say("")

    def claim(self, held: bool, text: str) -> None:
        """Say that something is so, if it is."""
        if not held:
            self.failed.append(text)
        mark = click.style("✓", fg="green") if held else click.style("✗ not so:", fg="red", bold=True)
        self._say(f"{INDENT}{mark} {text}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            click.echo(text)
