"""`milepost eval`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from milepost.cli.options import config_arguments, load, run_dir_option


@click.command(name="eval")
@config_arguments
@run_dir_option
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), metavar="RUN_DIR", help="Evaluate a run's policy, not model.path."
)
@click.option("--rollout", type=click.IntRange(min=0), metavar="N", help="Rollout of the checkpoint; default last.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--quiet", "--no-progress", "quiet", is_flag=True, help="No progress bars.")
def evaluate(
    configs: tuple[str, ...],
    sets: tuple[str, ...],
    block: tuple[str, ...],
    run_dir: str | None,
    checkpoint: Path | None,
    rollout: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Evaluate on the held-out sets without training.

    Each set has its own sampling and, if named, its own reward. The figures go to RUN_DIR/eval/results.json too, every
    sample to RUN_DIR/eval/samples.jsonl.
    """
    from milepost.config.plan import make_plan
    from milepost.config.runnable import check_runnable

    if rollout is not None and checkpoint is None:
        raise click.UsageError("--rollout names a checkpoint of a run; give the run with --checkpoint RUN_DIR")
    if checkpoint is not None:
        from milepost.export import find_checkpoint

        checkpoint = find_checkpoint(checkpoint.absolute(), rollout)
    plan = make_plan(load(configs, sets, block, run_dir=run_dir, init_from=checkpoint))
    check_runnable(plan)
    for warning in plan.warnings:
        click.echo(f"warning: {warning}", err=True)
    from milepost import serving
    from milepost.rollout.evaluation import evaluation_table

    results = serving.evaluate(plan, progress=not quiet)
    policy = str(checkpoint or plan.config.checkpoint.init_from or plan.model_path)
    text = json.dumps({"policy": policy, "results": results}, indent=2)
    (plan.run_dir / "eval" / "results.json").write_text(text + "\n", encoding="utf-8")
    click.echo(text if as_json else evaluation_table(results))
