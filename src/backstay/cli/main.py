"""Where ``backstay`` begins. Only click is imported here: a command brings what it needs when it is called.

Data goes to stdout, hints and errors to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import sys

import click

from backstay.cli.color import color_option
from backstay.version import __version__

INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


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
    help="Keep the store in FILE, which must not exist yet; without it, it is removed at the end.",
)
@color_option
def demo(as_json: bool, path: str | None) -> int:
    """Kill an agent, continue it, race two workers, fork and verify: all for real, in a few seconds.

    Exits with 0 only if everything it claims was observed.
    """
    from backstay.cli.demo import run

    return run(as_json, path)


def main() -> None:
    """Run the command line and leave with its exit code."""
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
