"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from milepost.config.loading import Loaded

F = TypeVar("F", bound=Callable[..., Any])

block_option = click.option(
    "--block",
    multiple=True,
    metavar="NAME",
    help="Do not import this plugin: NAME or DISTRIBUTION:NAME. May be repeated.",
)


def config_arguments(command: F) -> F:
    """Add `CONFIG...`, `--set` and `--block`."""
    command = block_option(command)
    command = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change one value, for example optimizer.lr=2e-6. May be repeated.",
    )(command)
    return click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")(command)


def run_dir_option(command: F) -> F:
    """Add `--run-dir`."""
    return click.option("--run-dir", metavar="DIR", help="Run folder, from the working directory.")(command)


def load(
    configs: tuple[str, ...],
    sets: tuple[str, ...],
    block: tuple[str, ...],
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    init_from: Path | None = None,
) -> Loaded:
    """Load run configs as the command line gave them, and make their plugins this process's."""
    from milepost.config.loading import Flag, load_config
    from milepost.registry import use

    flags = []
    if run_dir is not None:
        # A path typed at a prompt is meant from where it is typed, not from the run config's folder.
        flags.append(Flag("run.dir", str(Path(run_dir).expanduser().absolute()), "--run-dir"))
    if resume is not None:
        flags.append(Flag("checkpoint.resume", resume, "--resume"))
    if init_from is not None:
        flags.append(Flag("checkpoint.init_from", str(init_from), "--checkpoint"))
    loaded = load_config(configs, sets, block=block, flags=flags)
    use(loaded.registry)
    return loaded
