"""The command: registers the verbs, turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys

import typer

from oelm import __version__
from oelm.cli import verbs
from oelm.cli.output import fail
from oelm.errors import MachineError, OelmError


app = typer.Typer(
    name="oelm",
    help="Freeze attention's Query/Key projections orthogonally, and find out fairly what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"oelm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    if debug:
        os.environ["OELM_DEBUG"] = "1"


verbs.register(app)


def main() -> None:
    """Run the command line; every OelmError ends as one line on stderr and its exit code."""
    try:
        app()
    except OelmError as error:
        if os.environ.get("OELM_DEBUG"):
            raise
        fail(str(error), error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        fail("interrupted; the same command continues where it stopped", 130)
    except Exception as error:
        if os.environ.get("OELM_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno:  # the machine refused, and no room of ours had a better word
            fail(_refused(error), MachineError.exit_code)
        fail(_report_bug(error), 1)


def _refused(error: OSError) -> str:
    path = str(error.filename or "")
    shown = f"{path[:80]}…" if len(path) > 80 else path
    return f"{shown}{': ' if shown else ''}{error.strerror or error}; check the path, its permissions and the disk"


def _report_bug(error: Exception) -> str:
    """Keep the traceback of a fault of ours in a file; the line to show."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="oelm-crash-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    said = str(error) or "no message"
    return f"a fault of oelm itself ({type(error).__name__}: {said}): kept in {file.name}; please report it"
