"""`milepost train`."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from milepost.cli import INTERRUPTED, silence_stdout
from milepost.cli.options import config_arguments, load, run_dir_option
from milepost.errors import RunError

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that a user can do something about: no space, over a quota or file-size limit, read-only."""

if TYPE_CHECKING:
    from milepost.config.plan import Plan
    from milepost.run import RunSummary


@click.command()
@config_arguments
@run_dir_option
@click.option(
    "--resume",
    type=click.Choice(["auto", "must", "never"]),
    help="Go on from the run folder's last checkpoint: if there is one, or it is an error, or never.",
)
@click.option(
    "--max-restarts",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Resume by itself so many times when a process of the run dies or gets stuck.",
)
@click.option("--quiet", "--no-progress", "quiet", is_flag=True, help="No progress bars.")
@click.pass_context
def train(
    ctx: click.Context,
    configs: tuple[str, ...],
    sets: tuple[str, ...],
    block: tuple[str, ...],
    run_dir: str | None,
    resume: str | None,
    max_restarts: int,
    quiet: bool,
) -> None:
    """Train a policy as a run config says.

    Several CONFIG files are composed from left to right. Ctrl-C finishes the step, saves and says how to go on; a
    second one stops at once.
    """
    from milepost.config.plan import make_plan
    from milepost.config.runnable import check_runnable

    plan = make_plan(load(configs, sets, block, run_dir=run_dir, resume=resume))
    check_runnable(plan)
    for warning in plan.warnings:
        click.echo(f"warning: {warning}", err=True)
    summary = _train(plan, max_restarts, progress=not quiet)
    click.echo(str(summary))
    if summary.interrupted:
        again = " with --resume auto" if plan.config.checkpoint.resume == "never" else ""
        click.echo(f"to go on, run the same command again{again}", err=True)
        ctx.exit(INTERRUPTED)


def _train(plan: Plan, max_restarts: int, *, progress: bool) -> RunSummary:
    """Train, and resume from the last checkpoint after a process was lost, so many times at most.

    Raises RunError also when the disk is full, or stdout closed.
    """
    try:
        return _restarting(plan, max_restarts, progress=progress)
    except BrokenPipeError as error:
        silence_stdout()
        raise RunError(f"nobody reads stdout any more, so the run stopped; {_again(plan)}") from error
    except OSError as error:
        if error.errno not in _DISK:
            raise
        where = f"{error.filename}: " if error.filename else f"{plan.run_dir}: "
        raise RunError(f"{where}{error.strerror}, so the run stopped; make room there. {_again(plan)}") from error


def _again(plan: Plan) -> str:
    return f"What {plan.run_dir} holds is intact: the same command goes on from its last checkpoint"


def _restarting(plan: Plan, max_restarts: int, *, progress: bool) -> RunSummary:
    # Everything before this is quick and imports no torch; from here on the run begins.
    from milepost import loop
    from milepost.cluster.failures import WorkerLostError

    for restart in range(1, max_restarts + 1):
        try:
            return loop.train(plan, progress=progress)
        except WorkerLostError as error:
            click.echo(f"error: {error}\nrestart {restart} of {max_restarts}", err=True)
            checkpoint = plan.config.checkpoint.model_copy(update={"resume": "auto"})
            plan = replace(plan, config=plan.config.model_copy(update={"checkpoint": checkpoint}))
    return loop.train(plan, progress=progress)
