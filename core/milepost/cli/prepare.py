"""`milepost prepare`."""

from __future__ import annotations

import click

from milepost.cli.options import config_arguments, load, run_dir_option

SHOWN = 60
"""Characters of a prompt or response that a line shows."""


@click.command()
@config_arguments
@run_dir_option
@click.option("--no-score", is_flag=True, help="Fetch and convert; do not try the reward.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that share a conversion."
)
def prepare(
    configs: tuple[str, ...],
    sets: tuple[str, ...],
    block: tuple[str, ...],
    run_dir: str | None,
    no_score: bool,
    workers: int,
) -> None:
    """Fetch a run's model and data, convert the model, and try the reward.

    What run configs call by a name on the Hub goes to the Hub's cache; what is there is not fetched again. A model
    that `model.converted` names a folder for is converted into it, unless it was. Then the policy answers eight
    prompts greedily, and the reward scores its answers and the labels themselves.
    """
    from milepost.config.plan import make_plan
    from milepost.config.runnable import check_installed, check_runnable
    from milepost.conversion import convert
    from milepost.fetch import fetch, named_on_hub

    loaded = load(configs, sets, block, run_dir=run_dir)
    for named in named_on_hub(loaded.config, loaded.base_dir):
        click.echo(f"{named.kind} {named.name}: {fetch(named)}")
    plan = make_plan(loaded)
    for warning in plan.warnings:
        click.echo(f"warning: {warning}", err=True)
    if plan.converted is not None:
        check_installed(plan)
        done = convert(plan.model_path, plan.converted, loaded.registry, recipe=plan.model.name, workers=workers)
        click.echo(f"converted {done}")
    if no_score:
        return
    check_runnable(plan)
    from milepost.serving import try_reward

    trial = try_reward(plan)
    for tried in trial.tried:
        click.echo(
            f"reward {tried.reward:g}: {_line(tried.prompt)} -> {_line(tried.response)} (label {_line(tried.label)})"
        )
    if (form := trial.best_form) is not None:
        rewards = trial.label_rewards[form]
        click.echo(f"the labels themselves, written as {form}, score {sum(rewards) / len(rewards):g} on average")
    if (suspicion := trial.warning()) is not None:
        click.echo(f"warning: {suspicion}", err=True)


def _line(value: object) -> str:
    """Return a text on one line, its middle left out where it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
