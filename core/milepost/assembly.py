"""From a plan to the parts of a run: engine, rewards, data, trainer and transport, each built by its own room."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from milepost.components import AdvantageEstimator, ModelTraits, Transport
from milepost.config.plan import Plan
from milepost.config.schema import EvalDataset
from milepost.data import PromptSource, load_dataset
from milepost.errors import ConfigError, Problem
from milepost.recipe import Recipe
from milepost.rollout.engine import Engine, SamplingParams
from milepost.rollout.evaluation import HeldOut
from milepost.rollout.generation import Generate, RolloutGenerator, generate_response, zero_variance
from milepost.rollout.local.engine import LocalEngine
from milepost.rollout.rewards import RewardPool
from milepost.samples import Sample
from milepost.tokenizer import Tokenizer, load_tokenizer
from milepost.training.torch_trainer import TorchTrainer
from milepost.training.trainer import Role, Trainer
from milepost.weights.transport import EngineInfo, Sender

TRAINING_REWARD = ""
"""Name of the run's own reward pool among those of the held-out sets."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run works with."""

    engine: Engine
    trainer: Trainer
    sender: Sender
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
    """Scores groups with a reward pool."""

    def __init__(self, pool: RewardPool) -> None:
        self.pool = pool

    def begin(self, expected: int) -> None:
        """Begin to count failures anew; the error budget is a share of `expected` samples."""
        self.pool.reset_stats(expected)

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set `rewards` on each sample."""
        for sample, scored in zip(samples, await self.pool.score(samples), strict=True):
            sample.rewards = dict(scored.rewards)


@asynccontextmanager
async def assemble(plan: Plan) -> AsyncIterator[Parts]:
    """Build the parts, start those that run, and stop them on the way out."""
    config = plan.config
    device = choose_device(config.run.device)
    dtype = choose_dtype(config.model.dtype, device)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)

    tokenizer = load_tokenizer(plan.model_path, config.model.trust_remote_code)
    dataset = load_dataset(config.data.path, config.data, tokenizer, dedupe=config.data.dedupe)
    prompts = PromptSource(dataset, plan.batch_size, config.data.shuffle, config.run.seed)
    recipe: Recipe = plan.model.build()
    trainer = TorchTrainer(plan, recipe=recipe, algorithm=plan.algorithm.build(), device=device, dtype=dtype)
    engine = local_engine(plan, recipe, tokenizer, dtype, device)
    generate = load_generate(plan)

    with ExitStack() as closing:
        closing.callback(trainer.close)
        pools = {name: closing.enter_context(pool) for name, pool in reward_pools(plan).items()}
        scorers = {name: Scorer(pool) for name, pool in pools.items()}
        held_out = tuple(load_held_out(plan, dataset, tokenizer, scorers) for dataset in config.eval.datasets)
        await engine.start()
        try:
            for pool in pools.values():
                await pool.start()
            yield Parts(
                engine=engine,
                trainer=trainer,
                sender=open_transport(plan, trainer, engine),
                estimator=plan.advantage.build(),
                generator=RolloutGenerator(
                    engine=engine,
                    scorer=scorers[TRAINING_REWARD],
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
        finally:
            await engine.stop()


def choose_device(name: str) -> torch.device:
    """Return the device to compute on. Raises ConfigError if a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        message = "cuda was given, but torch finds no GPU; use auto or cpu, or install a torch that was built for CUDA"
        raise ConfigError([Problem("run.device", message)])
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def local_engine(
    plan: Plan, recipe: Recipe, tokenizer: Tokenizer, dtype: torch.dtype, device: torch.device
) -> LocalEngine:
    """Make the in-process engine. Raises ConfigError for a checkpoint that the recipe cannot decode."""
    text = (plan.model_path / "config.json").read_text(encoding="utf-8")
    try:
        decoder = recipe.hf.decoder(json.loads(text), dtype, device)
    except ValueError as error:
        raise ConfigError([Problem("model.path", str(error))]) from error
    return LocalEngine(
        decoder=decoder,
        decode=tokenizer.decode,
        end_token_ids=tokenizer.end_token_ids,
        max_positions=plan.config.rollout.max_context_len or plan.layout.max_positions,
        max_running_requests=plan.config.engine.max_running_requests,
        **plan.config.engine.options,
    )


def open_transport(plan: Plan, trainer: Trainer, engine: LocalEngine) -> Sender:
    """Open the transport between the trainer and the engine, and return this process's sender."""
    transport: Transport = plan.transport.build()
    address = transport.open(trainer.world, [EngineInfo(0, engine.endpoint)])
    return transport.sender(replace(address, verify=plan.config.transport.verify), rank=0)


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
