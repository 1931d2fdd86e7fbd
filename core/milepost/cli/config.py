"""`milepost config`."""

from __future__ import annotations

import json

import click

from milepost.cli.options import block_option, config_arguments, load


@click.group()
def config() -> None:
    """Show a composed run config, or the schema of all."""


@config.command("show")
@config_arguments
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(configs: tuple[str, ...], sets: tuple[str, ...], block: tuple[str, ...], as_json: bool) -> None:
    """Show run configs composed into one, as YAML with the origin of every value.

    The output is a run config itself. Nothing is derived and no file that it names is looked for; `milepost plan`
    does that.
    """
    from milepost.config.render import config_data, config_lines

    loaded = load(configs, sets, block)
    if as_json:
        click.echo(json.dumps({"config": config_data(loaded.config), "origins": dict(loaded.origins)}, indent=2))
    else:
        click.echo("\n".join(config_lines(loaded.config, loaded.origins)))


@config.command("schema")
@block_option
def schema(block: tuple[str, ...]) -> None:
    """Print the JSON Schema of a run config, with the options of the installed plugins.

    Editors check and complete run configs with it.
    """
    from milepost.config.json_schema import run_config_schema
    from milepost.registry import Registry

    click.echo(json.dumps(run_config_schema(Registry.load(block=block)), indent=2))
