"""The application: which commands there are, and what becomes of errors.

Modules that take seconds to import (torch, transformers) are imported inside the commands, so that help is instant.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Annotated

import typer

from speculators.cli.arguments import ListsCommand, MultiValueCommand
from speculators.cli.build_vocab import build_vocab
from speculators.cli.convert import convert
from speculators.cli.doctor import doctor
from speculators.cli.evaluate import evaluate
from speculators.cli.generate_offline_data import generate_offline_data
from speculators.cli.inspect_data import inspect_data
from speculators.cli.launch_vllm import launch_vllm
from speculators.cli.quickstart import quickstart
from speculators.cli.regenerate_responses import regenerate_responses
from speculators.cli.stitch_mtp import stitch_mtp_command
from speculators.cli.tensors import tensors
from speculators.errors import SpeculatorsError
from speculators.files import NO_ROOM

__all__ = ["app", "run"]

app = typer.Typer(
    name="speculators",
    help="Train a draft model for speculative decoding, and measure the acceptance it really gives.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

#: A command that reads its own arguments, ``--help`` included: its flags are generated from configuration classes.
_OWN_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


#: What the system refuses because of the path a user chose.
_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


def _delegate(module: str, arguments: list[str]) -> None:
    """Run ``speculators.cli.<module>.main(arguments)`` and exit with what it returns."""
    command: Callable[[list[str]], int | None] = import_module(f"speculators.cli.{module}").main
    raise typer.Exit(command(arguments) or 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"speculators version: {metadata.version('speculators')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("quickstart")(quickstart)


@app.command("prepare-data", context_settings=_OWN_ARGUMENTS, add_help_option=False)
def _prepare_data(context: typer.Context) -> None:
    """Render conversations into training rows with a loss mask."""
    _delegate("prepare_data", context.args)


app.command("inspect-data", cls=MultiValueCommand)(inspect_data)
app.command("build-vocab", cls=ListsCommand)(build_vocab)
app.command("generate-offline-data", cls=ListsCommand)(generate_offline_data)
app.command("regenerate-responses")(regenerate_responses)


@app.command("train", context_settings=_OWN_ARGUMENTS, add_help_option=False)
def _train(context: typer.Context) -> None:
    """Train a draft model; flags and YAML layout of vLLM's Speculators library."""
    _delegate("train", context.args)


app.command("launch-vllm", cls=MultiValueCommand)(launch_vllm)
app.command("evaluate", cls=MultiValueCommand)(evaluate)
app.command("doctor")(doctor)

app.command("convert")(convert)
app.command("stitch-mtp")(stitch_mtp_command)
app.command("tensors")(tensors)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code.

    A :class:`SpeculatorsError` is a sentence for the user; anything else that escapes is a bug and keeps its traceback,
    except a full disk and a path that the system refuses, which the user can mend and which leave only complete files behind.

    :raises KeyboardInterrupt: on Ctrl-C, unless the command itself comes to an orderly stop.
    """
    try:
        app(args=arguments, prog_name="speculators")
    except SystemExit as exit_:
        interrupt = _interrupt(exit_)
        if interrupt is not None:
            raise interrupt from None
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    except SpeculatorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno in _REFUSALS and error.filename is not None:
            print(f"error: {error.filename}: {error.strerror}; check the path and its permissions", file=sys.stderr)
            return 1
        if error.errno not in NO_ROOM:
            raise
        where = f" for {error.filename}" if error.filename else ""
        print(
            f"error: the disk is full{where}; make room and run the same command again, which goes on from the last "
            "complete files",
            file=sys.stderr,
        )
        return 1
    return 0


def _interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C that typer turned into an exit without a word."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error
