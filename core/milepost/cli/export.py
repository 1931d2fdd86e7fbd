"""`milepost export`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.IntRange(min=0), metavar="N", help="Rollout of the checkpoint; default last.")
@click.option("--model", type=click.Path(path_type=Path), metavar="DIR", help="The starting model, if it was moved.")
@click.option("--force", is_flag=True, help="Replace OUT if it is a model folder.")
def export(run_dir: Path, out: Path, checkpoint: int | None, model: Path | None, force: bool) -> None:
    """Write a run's policy as a Hugging Face folder.

    Weights are those of a checkpoint, bit for bit; config and tokenizer are the starting model's.
    """
    from milepost.export import export as write

    exported = write(run_dir.absolute(), out.absolute(), checkpoint=checkpoint, model=model, force=force)
    click.echo(str(exported))
