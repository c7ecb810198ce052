"""The entry point of ``backstay``. It imports only click; a command imports what it needs when it runs.

Data goes to stdout, hints and errors to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping

import click

from backstay.version import __version__

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def wants_color(choice: str | None, environ: Mapping[str, str], is_terminal: bool) -> bool:
    """Return whether to use colours: ``--color``, then NO_COLOR, then FORCE_COLOR, then the terminal decides."""
    if choice in ("always", "never"):
        return choice == "always"
    return not environ.get("NO_COLOR") and (bool(environ.get("FORCE_COLOR")) or is_terminal)


def set_color(context: click.Context, _: click.Parameter, choice: str | None) -> None:
    """Store the answer in click's context, where ``click.echo`` finds it; a command inherits the group's answer."""
    if choice is not None or context.parent is None:
        context.color = wants_color(choice, os.environ, sys.stdout.isatty())


color_option = click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    help="Colour the output; auto obeys NO_COLOR and FORCE_COLOR.",
    is_eager=True,
    expose_value=False,
    callback=set_color,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="backstay", message="%(prog)s %(version)s")
@color_option
def cli() -> None:
    """Durable checkpoints for agents and graph workflows."""


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the observed facts as one JSON object.")
@click.option(
    "--path",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Keep the store in FILE, which must not exist yet. By default the demo deletes its store.",
)
@color_option
def demo(as_json: bool, path: str | None) -> int:
    """Kill an agent, resume it, race two workers, fork and check: all for real, in a few seconds.

    Exits with 0 only if the demo observed everything that it claims.
    """
    from backstay.cli.demo import run

    return run(as_json, path)


def main() -> None:
    """Run the command line and exit with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without "●" shows "?", not a traceback
    try:
        code = cli.main(prog_name="backstay", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = INTERRUPTED
    sys.exit(code)
