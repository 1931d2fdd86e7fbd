"""`milepost convert`."""

from __future__ import annotations

from pathlib import Path

import click

from milepost.cli.options import block_option


@click.command()
@click.argument("source", metavar="FOLDER")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes to share layers.")
@click.option("--recipe", metavar="NAME", help="Model recipe; default the one that serves the architecture.")
@click.option(
    "--module", "modules", multiple=True, metavar="NAME", help="Hook module NAME.py in this folder. May be repeated."
)
@click.option("--force", is_flag=True, help="Convert again what is up to date; replace OUT if it is a model folder.")
@click.option("--no-progress", is_flag=True, help="Show no bar.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@block_option
def convert(
    source: str,
    out: Path,
    workers: int,
    recipe: str | None,
    modules: tuple[str, ...],
    force: bool,
    no_progress: bool,
    as_json: bool,
    block: tuple[str, ...],
) -> None:
    """Write a Hugging Face folder in Megatron's format, or back.

    FOLDER is a Hugging Face folder (or the name of one that was fetched from the Hub), and OUT is made of it in
    torch_dist; or it is what this command made, and OUT is a Hugging Face folder again, bit for bit. What is up to date
    is left alone.
    """
    from milepost.config.files import resolve_model
    from milepost.conversion import as_json as to_json
    from milepost.conversion import convert as write
    from milepost.registry import Registry

    registry = Registry.load(block=block, modules=modules)
    done = write(
        resolve_model(source, Path.cwd()),
        out.absolute(),
        registry,
        recipe=recipe,
        workers=workers,
        force=force,
        progress=not (no_progress or as_json),
    )
    click.echo(to_json(done) if as_json else str(done))
