"""The command line; `COMMANDS` lists what there is.

Commands are imported when they are called, so that `milepost --help` answers at once.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import click

from milepost import __version__
from milepost.errors import ConfigError, MilepostError

__all__ = ["cli", "main"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("milepost.cli.train:train", "Train a policy as a run config says."),
    "submit": ("milepost.cli.submit:submit", "Train on a Ray cluster, as one of its jobs."),
    "eval": ("milepost.cli.eval:evaluate", "Evaluate on the held-out sets without training."),
    "report": ("milepost.cli.report:report", "Show runs as one HTML page: curves, timing, samples, config."),
    "export": ("milepost.cli.export:export", "Write a run's policy as a Hugging Face folder."),
    "convert": ("milepost.cli.convert:convert", "Write a Hugging Face folder in Megatron's format, or back."),
    "logs": ("milepost.cli.logs:logs", "Show the logs of a run's processes."),
    "prepare": ("milepost.cli.prepare:prepare", "Fetch a run's model and data, and try its reward."),
    "plan": ("milepost.cli.plan:plan", "Show the resolved run, and start nothing."),
    "config": ("milepost.cli.config:config", "Show a composed run config, or the schema of all."),
    "doctor": ("milepost.cli.doctor:doctor", "Check versions, GPUs and the machine; say what to do."),
    "plugins": ("milepost.cli.plugins:plugins", "See which plugins are installed and what they provide."),
}
"""Name to (module:attribute, one line of help)."""


class LazyGroup(click.Group):
    """Imports a command when it is called; reports errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; an unknown one is answered with the nearest name."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}."
            ctx.fail(f"no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors that milepost raises on purpose become a message and an exit code."""
        try:
            return super().invoke(ctx)
        except MilepostError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"error: {_tidy(error)}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


def _tidy(error: MilepostError) -> str:
    """Return an error's message, what belongs to one problem indented below its first line."""
    if not isinstance(error, ConfigError):
        return _indented(str(error) or type(error).__name__, "  ")
    head = str(error).partition("\n")[0]
    problems = []
    for problem in error.problems:
        # The origin stands on the first line also where the message goes on, with a plugin's traceback for example.
        first, newline, rest = problem.message.partition("\n")
        shown = str(replace(problem, message=first))
        problems.append(_indented(f"  {shown}{newline}{rest}", "      "))
    return "\n".join([head, *problems])


def _indented(text: str, margin: str) -> str:
    first, *rest = text.splitlines()
    return "\n".join([first, *(margin + line for line in rest)])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="milepost")
@click.option("--debug", is_flag=True, envvar="MILEPOST_DEBUG", help="Show tracebacks of errors.")
def cli(debug: bool) -> None:
    """Reinforcement-learning post-training for language models."""


def main() -> None:
    """Run the command line; the console script."""
    try:
        cli(prog_name="milepost")
    except KeyboardInterrupt:
        # Ctrl-C before a command had begun.
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        silence_stdout()
        sys.exit(1)


def silence_stdout() -> None:
    """Point stdout elsewhere when its reader (`| head`) has gone, so that the interpreter's last flush is silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
