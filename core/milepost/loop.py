"""The loop, top to bottom: the page to read first.

One iteration: engines generate and rewards score; engines sleep; critic and actor train; the state is saved; the
trainer makes room; the new weights go to the engines; held-out sets are evaluated. Engines that do not share their
devices with the trainer (`cluster.colocate: false`) neither sleep nor are made room for. A resumed run enters right
behind the save, so that everything after it is done once, no matter where the run was killed.
"""

from __future__ import annotations

import asyncio

from milepost.cluster.phases import Phase
from milepost.config.plan import Plan
from milepost.errors import RunError
from milepost.rollout.evaluation import evaluate_held_out, evaluation_table
from milepost.rollout.generation import Rollout, rollout_metrics
from milepost.run import Run, RunSummary
from milepost.training.trainer import Part, Role
from milepost.training.turn import Turn, advantage_metrics, critic_metrics, train_actor, train_critic

WEIGHTS: tuple[Part, ...] = ("weights",)
TRAINING_STATE: tuple[Part, ...] = ("gradients", "optimizer")
EVERYTHING = WEIGHTS + TRAINING_STATE


def train(plan: Plan, *, progress: bool = True) -> RunSummary:
    """Train as planned, from the run folder's last checkpoint if there is one; return what came of it.

    Raises CheckpointError if the run must not or cannot resume, RunError if it has to stop.
    """
    return asyncio.run(_train(plan, progress=progress))


async def _train(plan: Plan, *, progress: bool) -> RunSummary:
    async with Run.open(plan, progress=progress) as run:
        done = run.restore()
        if not run.is_finished(done):
            await hand_over(run, done)
            for index in range(done + 1, plan.num_rollouts):
                rollout = await generate(run, index)
                if rollout is None:
                    break
                learn(run, index, rollout)
                if run.save_is_due(index):
                    run.save()
                if run.interrupted:
                    break
                await hand_over(run, index)
        if run.interrupted:
            run.save()
        return run.summarise()


async def generate(run: Run, index: int) -> Rollout | None:
    """Generate, score and filter the groups of one rollout; None if the user interrupted it."""
    run.generator.scorer.begin(run.plan.batch_size * run.plan.samples_per_prompt)
    with run.phases(Phase.GENERATE), run.tracker.bar(run.plan.batch_size, f"rollout {index}", "group") as bar:
        rollout = await run.until_interrupted(run.generator(index, on_group=bar.update))
    if rollout is None:
        return None
    run.log_rollout(index, rollout, rollout_metrics(rollout))
    run.watch_rewards(rollout)
    if run.plan.colocated:
        with run.phases(Phase.SLEEP):
            await run.engine.sleep(("weights", "kv_cache", "graphs"))
    else:
        await run.engine.sleep(())  # nothing is released, but an engine that is being replaced finishes that first
    return rollout


def learn(run: Run, index: int, rollout: Rollout) -> None:
    """Turn a rollout into optimizer steps: the critic's first, then the actor's."""
    plan, trainer = run.plan, run.trainer
    turn = Turn.begin(plan, rollout.samples, run.sample_cost)
    turn.estimate(run.estimator)
    if plan.needs_critic:
        with run.phases(Phase.CRITIC):
            make_room(run, "actor", EVERYTHING)  # still there where engines have devices of their own
            trainer.onload("critic", EVERYTHING)
            results = train_critic(trainer, turn, run.estimator)
            make_room(run, "critic", EVERYTHING)
        run.log_steps("critic", index, results, critic_metrics(turn.batch))
        run.watch_steps(turn, index, results)
    if index >= plan.critic_warmup:
        with run.phases(Phase.ACTOR):
            trainer.onload("actor", EVERYTHING)
            results = train_actor(trainer, turn, run.estimator, first=index == plan.critic_warmup)
        run.log_steps("actor", index, results, advantage_metrics(turn.batch))
        run.watch_steps(turn, index, results)
    run.finished_training(index)


def make_room(run: Run, role: Role, parts: tuple[Part, ...]) -> None:
    """Move parts of a role to host memory, unless `trainer.offload: false` keeps everything on the device."""
    if run.plan.config.trainer.offload:
        run.trainer.offload(role, parts)


async def hand_over(run: Run, index: int) -> None:
    """Give the engines the weights as they are after rollout `index` (-1: before the first), and evaluate if due."""
    trainer, engine, phases = run.trainer, run.engine, run.phases
    if run.plan.colocated:
        with phases(Phase.OFFLOAD):
            for role in run.roles:
                make_room(run, role, TRAINING_STATE if role == "actor" else EVERYTHING)
        with phases(Phase.WAKE):
            await engine.wake(("weights",))
    with phases(Phase.PUSH):
        trainer.onload("actor", WEIGHTS)
        report = run.push(index + 1)
        if engine.version != index + 1:
            raise RunError(f"the engine serves version {engine.version} after a push of version {index + 1}")
    if run.plan.colocated:
        with phases(Phase.SERVE):
            make_room(run, "actor", WEIGHTS)
            await engine.wake(("kv_cache", "graphs"))
    run.log_push(index, report)
    if run.evaluation_is_due(index):
        with phases(Phase.EVALUATE):
            await evaluate(run, index)


async def evaluate(run: Run, index: int) -> None:
    """Generate and score the held-out sets with the weights the engines serve."""
    results = {}
    for position, held_out in enumerate(run.held_out):
        held_out.scorer.begin(len(held_out.tasks) * held_out.samples_per_prompt)
        with run.tracker.bar(len(held_out.tasks), f"eval {held_out.name}", "prompt") as bar:
            scored = await run.until_interrupted(
                evaluate_held_out(
                    run.engine,
                    held_out,
                    generate=run.generator.generate,
                    seed=run.plan.config.run.seed,
                    position=position,
                    on_task=bar.update,
                )
            )
        if scored is None:
            return
        run.log_evaluation(index, held_out.name, *scored)
        results[held_out.name] = scored[0]
    if len(results) > 1:
        run.tracker.say(evaluation_table(results))
