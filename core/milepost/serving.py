"""The policy as it is, served without being trained: evaluation alone, and a first look at a run before it starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from milepost.assembly import Parts, assemble
from milepost.config.plan import Plan
from milepost.errors import ConfigError, Problem, RunError
from milepost.rollout.engine import SamplingParams
from milepost.rollout.evaluation import evaluate_held_out
from milepost.rollout.generation import EVALUATION, all_of, generate_group
from milepost.samples import Sample, Status
from milepost.tokenizer import load_tokenizer
from milepost.tracking.records import LineFile
from milepost.tracking.tracker import sample_line
from milepost.training.trainer import Part

WEIGHTS: tuple[Part, ...] = ("weights",)
EVERYTHING: tuple[Part, ...] = ("weights", "gradients", "optimizer")
LABEL_FORMS = ("{}", "\\boxed{{{}}}", "<think></think>\\boxed{{{}}}")
"""Ways to write a label as a response that a reward might accept."""
NUM_TRIED = 8
"""Prompts that a trial scores."""


@asynccontextmanager
async def serving(plan: Plan) -> AsyncIterator[Parts]:
    """Assemble the plan's parts and hand the starting weights (`checkpoint.init_from`'s if given) to the engines."""
    async with assemble(plan) as parts:
        for role in parts.roles:
            parts.trainer.offload(role, EVERYTHING)
        await parts.engine.wake(("weights",))
        parts.trainer.onload("actor", WEIGHTS)
        parts.push(0)
        if parts.engine.version != 0:
            raise RunError(f"the engine serves version {parts.engine.version} after a push of version 0")
        parts.trainer.offload("actor", WEIGHTS)
        await parts.engine.wake(("kv_cache", "graphs"))
        yield parts


def evaluate(plan: Plan, *, progress: bool = True) -> dict[str, dict[str, float]]:
    """Evaluate the plan's held-out sets without training; return the metrics of each.

    Every sample goes to `eval/samples.jsonl` in the run folder. Draws are the same as in a training run's evaluations.
    Raises ConfigError if there is nothing to evaluate.
    """
    if not plan.config.eval.datasets:
        message = "is empty: there is nothing to evaluate; add a set, for example {name: test, path: test.jsonl}"
        raise ConfigError([Problem("eval.datasets", message)])
    return asyncio.run(_evaluate(replace(plan, run_dir=plan.run_dir / "eval"), progress))


async def _evaluate(plan: Plan, progress: bool) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    async with serving(plan) as parts:
        file = LineFile(plan.run_dir / "samples.jsonl")
        file.truncate(0)
        try:
            for position, held_out in enumerate(parts.held_out):
                held_out.scorer.begin(len(held_out.tasks) * held_out.samples_per_prompt)
                with tqdm(total=len(held_out.tasks), desc=held_out.name, unit="prompt", disable=not progress) as bar:
                    metrics, samples = await evaluate_held_out(
                        parts.engine,
                        held_out,
                        generate=parts.generator.generate,
                        seed=plan.config.run.seed,
                        position=position,
                        on_task=bar.update,
                    )
                results[held_out.name] = metrics
                for sample in samples:
                    file.append(sample_line(f"eval/{held_out.name}", -1, sample))
        finally:
            file.close()
    return results


@dataclass(frozen=True, slots=True)
class Tried:
    """One prompt of a trial."""

    prompt: str
    response: str
    label: Any
    reward: float


@dataclass(frozen=True, slots=True)
class Trial:
    """What a run's reward says of the policy's greedy responses, and of the labels themselves."""

    tried: tuple[Tried, ...]
    label_rewards: Mapping[str, tuple[float, ...]]
    """Form of writing the label (`\\boxed{LABEL}`) to the reward of each prompt's label; empty without labels."""

    @property
    def best_form(self) -> str | None:
        """The form of the label that the reward likes best, None without labels."""
        forms = self.label_rewards
        return max(forms, key=lambda form: sum(forms[form])) if forms else None

    def warning(self) -> str | None:
        """Say what is suspicious, if anything is."""
        rewards = {tried.reward for tried in self.tried}
        labels = {reward for values in self.label_rewards.values() for reward in values}
        count = len(self.tried)
        if len(rewards | labels) == 1:
            also = ", and so did the labels themselves, however written" if labels else ""
            return (
                f"all {count} responses scored {rewards.pop():g}{also}: the label may not be where data.label says, or "
                "the reward may expect another form of answer"
            )
        if len(rewards) == 1:
            return (
                f"all {count} responses of the policy scored {rewards.pop():g}, though the labels themselves do not: "
                "there is something to learn only where samples of a prompt differ"
            )
        return None


def try_reward(plan: Plan) -> Trial:
    """Let the policy answer the first training prompts greedily, and score its responses and the labels themselves."""
    return asyncio.run(_try_reward(plan))


async def _try_reward(plan: Plan) -> Trial:
    tokenizer = load_tokenizer(plan.model_path, plan.config.model.trust_remote_code)
    rollout = plan.config.rollout
    params = SamplingParams(rollout.max_response_len, 0.0, stop=rollout.stop, stop_token_ids=rollout.stop_token_ids)
    async with serving(plan) as parts:
        scorer = parts.generator.scorer
        tasks = parts.prompts.take(min(NUM_TRIED, len(parts.prompts.dataset)))
        scorer.begin(len(tasks) * (1 + len(LABEL_FORMS)))
        groups = await all_of(
            generate_group(
                parts.engine,
                task,
                generate=parts.generator.generate,
                scorer=scorer,
                params=params,
                group=number,
                num_rollouts=1,
                key=(plan.config.run.seed, EVALUATION, number),
            )
            for number, task in enumerate(tasks)
        )
        answered = [group[0] for group in groups]
        label_rewards = {}
        if all(task.label is not None for task in tasks):
            for form in LABEL_FORMS:
                written = [_label_sample(sample, form, tokenizer.encode) for sample in answered]
                await scorer.score(written)
                label_rewards[form.format("LABEL")] = tuple(sample.reward for sample in written)
        tried = tuple(Tried(s.task.prompt, s.text, s.task.label, s.reward) for s in answered)
    return Trial(tried, label_rewards)


def _label_sample(sample: Sample, form: str, encode: Any) -> Sample:
    """Return a sample as if the policy had answered with the label."""
    label = sample.task.label
    text = form.format(label if isinstance(label, str | int | float) else json.dumps(label, ensure_ascii=False))
    prompt, response = np.asarray(sample.task.tokens, np.int32), np.asarray(encode(text), np.int32)
    tokens = np.concatenate([prompt, response])
    trainable = np.arange(len(tokens)) >= len(prompt)
    return replace(
        sample,
        tokens=tokens,
        trainable=trainable,
        log_probs=np.where(trainable, 0.0, np.nan).astype(np.float32),
        versions=np.where(trainable, 0, -1).astype(np.int32),
        status=Status.COMPLETED,
        text=text,
        rewards={},
        token_rewards=None,
        metadata={},
        extras={},
    )
