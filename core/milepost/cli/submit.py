"""`milepost submit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from milepost.cli import INTERRUPTED
from milepost.cli.options import config_arguments, load, run_dir_option

if TYPE_CHECKING:
    from milepost.cluster.submission import Ended, JobClient
    from milepost.config.plan import Plan


@click.command()
@config_arguments
@run_dir_option
@click.option(
    "--address",
    envvar="RAY_ADDRESS",
    required=True,
    metavar="URL",
    show_envvar=True,
    help="The cluster's dashboard, as in http://HEAD:8265.",
)
@click.option("--submission-id", metavar="NAME", help="Name of the job; default one that Ray makes up.")
@click.option("--no-wait", is_flag=True, help="Print the job's name, and do not follow it.")
@click.option("--python", default="python", show_default=True, help="Interpreter on the cluster that has milepost.")
@click.option(
    "--num-cpus",
    type=click.FloatRange(min=0),
    default=0,
    show_default=True,
    help="CPUs reserved for the controller and its rewards, on any node; 0 reserves none and starts it on the head.",
)
@click.option("--resume", type=click.Choice(["auto", "must", "never"]), help="As of `milepost train`.")
@click.option(
    "--max-restarts", default=0, show_default=True, type=click.IntRange(min=0), help="As of `milepost train`."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the job's log goes to stderr.")
@click.pass_context
def submit(
    ctx: click.Context,
    configs: tuple[str, ...],
    sets: tuple[str, ...],
    block: tuple[str, ...],
    run_dir: str | None,
    address: str,
    submission_id: str | None,
    no_wait: bool,
    python: str,
    num_cpus: float,
    resume: str | None,
    max_restarts: int,
    as_json: bool,
) -> None:
    """Train on a Ray cluster, as one of its jobs.

    The run is planned here first. Run configs and the Python modules beside the last one are sent; model, data and run
    folder are not, and have to be at the same paths on all nodes. The job's log is shown until it ends, and its exit
    code is this command's. Ctrl-C leaves the job running.
    """
    from milepost.cluster.submission import JobClient, absolute_paths, entrypoint, packed
    from milepost.config.plan import make_plan

    loaded = load(configs, sets, block, run_dir=run_dir, resume=resume)
    plan = make_plan(loaded)
    _check_launcher(plan)
    moved = absolute_paths(loaded)
    for warning in plan.warnings:
        click.echo(f"warning: {warning}", err=True)
    if moved:
        click.echo(f"warning: {', '.join(moved)}: files of this machine, expected at the same paths there", err=True)
    flags = ["--run-dir", str(plan.run_dir), "--quiet"]
    flags += [word for name in block for word in ("--block", name)]
    flags += ["--resume", resume] if resume is not None else []
    flags += ["--max-restarts", str(max_restarts)] if max_restarts else []
    client = JobClient(address)
    with packed([Path(config).expanduser() for config in configs]) as (folder, content):
        command = entrypoint(python, content.configs, sets, moved, flags)
        job = client.submit(command, folder, submission_id, num_cpus)
    started = {"submission_id": job, "address": client.address, "run_dir": str(plan.run_dir)}
    if no_wait:
        click.echo(json.dumps(started) if as_json else job)
        return
    sent = ", ".join([*content.configs, *content.modules])
    click.echo(f"job {job} at {client.address}, run folder {plan.run_dir}; sent {sent}", err=True)
    ended = _follow(ctx, client, job, log_to_stderr=as_json)
    if as_json:
        click.echo(json.dumps({**started, "status": ended.status, "exit_code": ended.exit_code}))
    elif ended.exit_code:
        click.echo(f"error: job {job} {ended.status}: {ended.message}", err=True)
    ctx.exit(ended.exit_code)


def _follow(ctx: click.Context, client: JobClient, job: str, *, log_to_stderr: bool) -> Ended:
    try:
        return client.follow(job, lambda text: click.echo(text, nl=False, err=log_to_stderr))
    except KeyboardInterrupt:
        click.echo(f"\nthe job {job} goes on; {client.hint(job)}", err=True)
        ctx.exit(INTERRUPTED)


def _check_launcher(plan: Plan) -> None:
    """Raise ConfigError if the run would not use the cluster."""
    from milepost.errors import ConfigError, Problem

    launcher = plan.config.cluster.launcher
    if launcher != "ray":
        message = f"{launcher!r} trains in the job's own process alone; a cluster is used by `ray`"
        raise ConfigError([Problem("cluster.launcher", message, plan.origins.get("cluster.launcher", ""))])
