"""What every metric means. A metric that the kernel logs has its line here; the docs' table is made from it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric's meaning."""

    meaning: str
    """One sentence."""
    unit: str
    """What the number counts: `seconds`, `nats`, `fraction`; empty for a number without a unit."""


CATALOGUE: dict[str, Entry] = {
    "rollout/raw_reward": Entry("Mean reward of the rollout's samples, as scored, before any normalisation.", "reward"),
    "rollout/log_probs": Entry(
        "Mean log-prob of the trainable tokens, by the engine that sampled them.", "nats per token"
    ),
    "rollout/response_len": Entry("Mean number of tokens after the prompt.", "tokens"),
    "rollout/truncated": Entry(
        "Samples cut off by the length limit; a high share caps the reward, raise rollout.max_response_len.", "fraction"
    ),
    "rollout/zero_variance_groups": Entry(
        "Groups whose rewards are all equal, which teach a group-relative advantage nothing.", "fraction"
    ),
    "train/loss": Entry("The loss that was minimised: policy term, entropy bonus and KL term together.", ""),
    "train/pg_loss": Entry("Policy term of the loss, after clipping and correction.", ""),
    "train/grad_norm": Entry("L2 norm of the whole gradient, before clipping.", ""),
    "train/lr": Entry("Learning rate of the step.", ""),
    "train/ppo_kl": Entry(
        "Mean of log-prob(old) - log-prob(new) over trainable tokens: how far the policy moved since the rollout.",
        "nats per token",
    ),
    "train/pg_clipfrac": Entry("Trainable tokens whose ratio was clipped.", "fraction"),
    "train/entropy": Entry("Mean entropy of the policy at trainable tokens.", "nats per token"),
    "train/entropy_loss": Entry("Mean entropy of the policy at trainable tokens, weighted as the loss is.", "nats"),
    "train/kl_loss": Entry("KL term against the reference, before its coefficient.", "nats per token"),
    "train/value_loss": Entry("The critic's loss: squared distance of clipped values from returns.", "reward squared"),
    "train/log_prob_diff": Entry(
        "Mean absolute difference between engine and trainer log-probs of the same tokens; it should be numerics only.",
        "nats per token",
    ),
    "train/tis": Entry("Mean importance factor that corrects for engine and trainer disagreeing.", ""),
    "perf/rollout_time": Entry("Generating and scoring the rollout.", "seconds"),
    "perf/tokens_per_gpu_per_second": Entry("Sampled tokens, by GPU (or process) and second.", "tokens per second"),
    "perf/train_wait_time": Entry("The trainer waiting for the rollout, memory changing hands included.", "seconds"),
    "perf/actor_train_time": Entry("The actor's forward passes and optimizer steps.", "seconds"),
    "perf/critic_train_time": Entry("The critic's forward passes and optimizer steps.", "seconds"),
    "perf/update_weights_time": Entry("Pushing the new weights to all engines.", "seconds"),
    "eval/NAME/accuracy": Entry("Mean reward on the held-out set NAME, over all of its samples.", "reward"),
    "eval/NAME/pass@k": Entry(
        "Probability that at least one of k responses is correct: unbiased estimate, mean over prompts.", "fraction"
    ),
    "eval/NAME/response_len": Entry("Mean number of tokens after the prompt, on the held-out set NAME.", "tokens"),
    "eval/NAME/truncated": Entry("Samples of the held-out set NAME that the length limit cut off.", "fraction"),
}
"""Entry of each metric; in a name, NAME stands for any one part and a final `@k` for any number."""

_SECTIONS = {
    "rollout": "Every rollout",
    "train": "Every optimizer step",
    "perf": "Timing, every rollout",
    "eval": "Every evaluation",
}


def _pattern(name: str) -> re.Pattern[str]:
    expression = re.escape(name).replace("NAME", "[^/]+")
    return re.compile(re.sub("@k$", r"@\\d+", expression))


_PATTERNS = {name: _pattern(name) for name in CATALOGUE}


def describe(metric: str) -> Entry | None:
    """Return the entry of a metric as it is logged (`eval/aime24/pass@8`), or None if the catalogue lacks it."""
    for name, pattern in _PATTERNS.items():
        if pattern.fullmatch(metric):
            return CATALOGUE[name]
    return None


def render_markdown() -> str:
    """Return the catalogue as Markdown: one table per section, in the catalogue's order."""
    blocks = []
    for section, title in _SECTIONS.items():
        rows = [
            f"| `{name}` | {entry.meaning} | {entry.unit} |"
            for name, entry in CATALOGUE.items()
            if name.startswith(f"{section}/")
        ]
        blocks.append("\n".join([f"## {title}", "", "| metric | meaning | unit |", "|---|---|---|", *rows]))
    return "\n\n".join(blocks) + "\n"
