"""`milepost plan`."""

from __future__ import annotations

import json

import click

from milepost.cli.options import config_arguments, load, run_dir_option


@click.command()
@config_arguments
@run_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    configs: tuple[str, ...], sets: tuple[str, ...], block: tuple[str, ...], run_dir: str | None, as_json: bool
) -> None:
    """Show the resolved run, and start nothing.

    Every value stands with its origin: the file and line or flag that gave it, `default`, or `derived`. What follows
    from the values (batch, roles, placement, memory) comes after them.
    """
    from milepost.config.plan import make_plan
    from milepost.config.render import plan_data, plan_text

    made = make_plan(load(configs, sets, block, run_dir=run_dir))
    click.echo(json.dumps(plan_data(made), indent=2) if as_json else plan_text(made))
