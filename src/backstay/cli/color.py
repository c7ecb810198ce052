"""Whether to colour: ``--color`` before NO_COLOR before FORCE_COLOR before "is it a terminal".

click looks at the terminal only, so the answer is put into its context, where every ``click.echo`` finds it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def wants_color(choice: str | None, environ: Mapping[str, str], is_terminal: bool) -> bool:
    """Return whether to colour; an empty variable counts as not set."""
    if choice in ("always", "never"):
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or is_terminal


def color_option(command: F) -> F:
    """Add ``--color`` to a command. Without it, a command keeps what the one around it decided."""
    return click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        help="Colour the output; auto obeys NO_COLOR and FORCE_COLOR.",
        is_eager=True,
        expose_value=False,
        callback=_apply,
    )(command)


def _apply(context: click.Context, _: click.Parameter, choice: str | None) -> None:
    if choice is not None or context.parent is None:
        context.color = wants_color(choice, os.environ, sys.stdout.isatty())
