"""From a plan to the parts of a run: engine, rewards, data, trainer and transport, each built by its own room."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

from milepost.cluster.compute import launch
from milepost.cluster.memory import Memory
from milepost.components import AdvantageEstimator, ModelTraits
from milepost.config.plan import Plan
from milepost.config.schema import EvalDataset, Overlong
from milepost.data import PromptSource, load_dataset
from milepost.errors import ConfigError, Problem
from milepost.functional.overlong import overlong_penalty
from milepost.rollout.engine import Engine, SamplingParams
from milepost.rollout.evaluation import HeldOut
from milepost.rollout.generation import Generate, RolloutGenerator, generate_response, zero_variance
from milepost.rollout.rewards import RewardPool
from milepost.samples import UNSHAPED, Sample
from milepost.tokenizer import Tokenizer, load_tokenizer
from milepost.training.trainer import Role, Trainer
from milepost.weights.transport import PushReport

TRAINING_REWARD = ""
"""Name of the run's own reward pool among those of the held-out sets."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run works with."""

    engine: Engine
    trainer: Trainer
    push: Callable[[int], PushReport]
    """Carries the actor's weights to the engine as the given version."""
    memory: Callable[[], Sequence[Memory]]
    """Reads the memory of every rank's device."""
    estimator: AdvantageEstimator
    generator: RolloutGenerator
    held_out: tuple[HeldOut, ...]
    prompts: PromptSource
    roles: tuple[Role, ...]
    """Roles the trainer holds."""
    sample_cost: Callable[[int], float]
    """Floating-point operations of training on one sample of some length."""
    rewards: RewardPool
    """Scores the training samples."""


class Scorer:
    """Scores groups with a reward pool, and takes the overlong penalty off where there is one.

    Args:
        pool: scores.
        overlong: the penalty, of training rewards alone.
        max_response_len: the length at which it is whole.
    """

    def __init__(self, pool: RewardPool, overlong: Overlong | None = None, max_response_len: int = 0) -> None:
        self.pool = pool
        self.overlong = overlong
        self.max_response_len = max_response_len

    def begin(self, expected: int) -> None:
        """Begin to count failures anew; the error budget is a share of `expected` samples."""
        self.pool.reset_stats(expected)

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set `rewards` on each sample."""
        for sample, scored in zip(samples, await self.pool.score(samples), strict=True):
            sample.rewards = dict(scored.rewards)
            if self.overlong is not None:
                self._shape(sample, self.overlong)

    def _shape(self, sample: Sample, overlong: Overlong) -> None:
        """Add the penalty of a sample's length to its reward, and keep both apart too."""
        penalty = overlong_penalty(sample.num_trainable, self.max_response_len, overlong.buffer, overlong.penalty)
        score = sample.reward
        sample.rewards |= {"reward": score + penalty, UNSHAPED: score, "overlong": penalty}


@asynccontextmanager
async def assemble(plan: Plan) -> AsyncIterator[Parts]:
    """Build the parts, start those that run, and stop them on the way out."""
    config = plan.config
    tokenizer = load_tokenizer(plan.model_path, config.model.trust_remote_code)
    dataset = load_dataset(config.data.path, config.data, tokenizer, dedupe=config.data.dedupe)
    prompts = PromptSource(dataset, plan.batch_size, config.data.shuffle, config.run.seed)
    generate = load_generate(plan)

    async with AsyncExitStack() as closing:
        compute = await closing.enter_async_context(launch(plan, tokenizer))
        pools = {name: closing.enter_context(pool) for name, pool in reward_pools(plan).items()}
        scorers = {name: Scorer(pool) for name, pool in pools.items()}
        held_out = tuple(load_held_out(plan, dataset, tokenizer, scorers) for dataset in config.eval.datasets)
        overlong = config.reward.overlong
        training_scorer = Scorer(pools[TRAINING_REWARD], overlong, config.rollout.max_response_len)
        for pool in pools.values():
            await pool.start()
        yield Parts(
            engine=compute.engine,
            trainer=compute.trainer,
            push=compute.push,
            memory=compute.memory,
            estimator=plan.advantage.build(),
            generator=RolloutGenerator(
                engine=compute.engine,
                scorer=training_scorer,
                next_tasks=prompts.take,
                params=training_params(plan),
                seed=config.run.seed,
                batch_size=plan.batch_size,
                samples_per_prompt=plan.samples_per_prompt,
                generate=generate,
                drop=zero_variance if config.rollout.filter == "zero_variance" else None,
                max_rounds=config.rollout.max_filter_rounds,
            ),
            held_out=held_out,
            prompts=prompts,
            roles=roles(plan),
            sample_cost=partial(_traits(plan).train_flops, plan.layout),
            rewards=pools[TRAINING_REWARD],
        )


def training_params(plan: Plan) -> SamplingParams:
    """Return how training responses are sampled."""
    rollout = plan.config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_response_len,
        temperature=rollout.temperature,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
    )


def reward_pools(plan: Plan) -> dict[str, RewardPool]:
    """Make the run's reward pool, and one for each held-out set that has a reward of its own."""
    sections = {TRAINING_REWARD: plan.config.reward}
    sections |= {dataset.name: dataset.reward for dataset in plan.config.eval.datasets if dataset.reward is not None}
    return {
        name: RewardPool(
            section,
            base_dir=plan.base_dir,
            log_dir=plan.run_dir / "logs" / name if name else plan.run_dir / "logs",
            plugins_block=plan.config.plugins.block,
            plugin_modules=plan.config.plugins.modules,
        )
        for name, section in sections.items()
    }


def load_held_out(plan: Plan, dataset: EvalDataset, tokenizer: Tokenizer, scorers: Mapping[str, Scorer]) -> HeldOut:
    """Read one held-out set."""
    rollout = plan.config.rollout
    tasks = load_dataset(dataset.path, dataset, tokenizer, limit=dataset.limit).tasks
    params = SamplingParams(
        max_new_tokens=dataset.max_response_len or rollout.max_response_len,
        temperature=dataset.temperature,
        top_p=dataset.top_p,
        top_k=dataset.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
    )
    scorer = scorers.get(dataset.name, scorers[TRAINING_REWARD])
    return HeldOut(dataset.name, tuple(tasks), params, dataset.samples_per_prompt, scorer)


def load_generate(plan: Plan) -> Generate:
    """Return the run's generate function. Raises ConfigError if `rollout.generate` names none."""
    text = plan.config.rollout.generate
    if text is None:
        return generate_response
    module, _, name = text.partition(":")
    if str(plan.base_dir) not in sys.path:
        sys.path.insert(0, str(plan.base_dir))
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = f"{text!r} cannot be imported: {error}; expected module:function, beside the run config or installed"
        raise ConfigError([Problem("rollout.generate", message, plan.origins.get("rollout.generate", ""))]) from error
    if not inspect.iscoroutinefunction(function):
        message = f"{text!r} is not an async function; expected `async def {name}(task, engine) -> list[Sample]`"
        raise ConfigError([Problem("rollout.generate", message, plan.origins.get("rollout.generate", ""))])
    return cast("Generate", function)


def roles(plan: Plan) -> tuple[Role, ...]:
    """Return the roles that the plan needs."""
    needed: dict[Role, bool] = {
        "actor": True,
        "critic": plan.needs_critic,
        "reference": plan.needs_reference,
        "teacher": plan.needs_teacher,
    }
    return tuple(role for role, wanted in needed.items() if wanted)


def _traits(plan: Plan) -> ModelTraits:
    return cast("ModelTraits", plan.model.component.traits)
