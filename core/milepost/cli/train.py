"""`milepost train`."""

from __future__ import annotations

import click

from milepost.cli import INTERRUPTED
from milepost.cli.options import config_arguments, load, run_dir_option


@click.command()
@config_arguments
@run_dir_option
@click.option(
    "--resume",
    type=click.Choice(["auto", "must", "never"]),
    help="Go on from the run folder's last checkpoint: if there is one, or it is an error, or never.",
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
    # Everything above is quick and imports no torch; from here on the run begins.
    from milepost import loop

    summary = loop.train(plan, progress=not quiet)
    click.echo(str(summary))
    if summary.interrupted:
        again = " with --resume auto" if plan.config.checkpoint.resume == "never" else ""
        click.echo(f"to go on, run the same command again{again}", err=True)
        ctx.exit(INTERRUPTED)
