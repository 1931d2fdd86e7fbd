"""`milepost plugins new`: write a plugin of one's own."""

from __future__ import annotations

from pathlib import Path

import click

from milepost.cli.options import block_option
from milepost.cli.plugin_lookup import load_plugins
from milepost.components import KINDS, Kind


@click.command("new")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder to write; default NAME.")
@click.option(
    "--config",
    type=click.Path(exists=True, path_type=Path),
    help="config.json, or a checkpoint's folder, that a model recipe is made from.",
)
@block_option
def new_plugin(kind: Kind, name: str, out: Path | None, config: Path | None, block: tuple[str, ...]) -> None:
    """Write a distribution with a working plugin, its tests and a README, to be changed into yours.

    NAME is the distribution's, for example my-reward; the component is then my_reward.
    """
    from milepost import scaffold

    folder = out or Path(name)
    written = scaffold.new_plugin(kind, name, folder, registry=load_plugins(block), config=config)
    for file in written:
        click.echo(file)
    more = "".join(f" --block {entry}" for entry in block)
    click.echo(f"\nnext:\n  cd {folder}\n  milepost plugins check .{more}\n  pip install -e .")
