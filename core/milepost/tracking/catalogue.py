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
    "rollout/reward_min": Entry("Lowest reward of a sample, as scored.", "reward"),
    "rollout/reward_max": Entry("Highest reward of a sample, as scored.", "reward"),
    "rollout/reward/overlong": Entry("Mean penalty for responses near the length limit (`reward.overlong`).", "reward"),
    "rollout/reward/NAME": Entry("Mean of the reward's further score NAME, which is not trained on.", "reward"),
    "rollout/log_probs": Entry(
        "Mean log-prob of the sampled tokens, by the engine that sampled them.", "nats per token"
    ),
    "rollout/response_len": Entry("Mean number of tokens sampled for a response.", "tokens"),
    "rollout/response_len_max": Entry("Most tokens sampled for a response.", "tokens"),
    "rollout/truncated": Entry(
        "Samples cut off by the length limit; a high share caps the reward, so raise rollout.max_response_len.",
        "fraction",
    ),
    "rollout/zero_variance_groups": Entry(
        "Groups whose rewards are all equal, from which a group-relative advantage learns nothing.", "fraction"
    ),
    "rollout/dropped_groups": Entry("Groups that the filter dropped and others replaced.", "groups"),
    "rollout/reward_failures": Entry("Samples whose reward failed and that got `reward.on_error`.", "samples"),
    "rollout/reward_restarts": Entry("Reward workers that were killed or died, and were replaced.", "workers"),
    "train/loss": Entry("The loss that was minimised: policy term, entropy bonus and KL term together.", ""),
    "train/pg_loss": Entry("Policy term of the loss, after clipping and correction.", ""),
    "train/kl_loss": Entry("KL term against the reference, weighted as the loss is, before its coefficient.", "nats"),
    "train/entropy_loss": Entry("Entropy, weighted as the loss is, before its coefficient.", "nats"),
    "train/entropy": Entry("Mean entropy of the policy at trainable tokens.", "nats per token"),
    "train/grad_norm": Entry("L2 norm of the whole gradient, before clipping.", ""),
    "train/lr": Entry("Learning rate of the step.", ""),
    "train/skipped": Entry("1 where loss or gradient was not finite, so that the step was not applied; else 0.", ""),
    "train/ppo_kl": Entry(
        "Mean of log-prob(old) - log-prob(new) over trainable tokens: how far the policy moved since the rollout.",
        "nats per token",
    ),
    "train/pg_clipfrac": Entry("Trainable tokens whose ratio was clipped.", "fraction"),
    "train/pg_dual_clipfrac": Entry("Trainable tokens at which the dual clip held the loss.", "fraction"),
    "train/ratio_max": Entry("Largest probability ratio new / old of a trainable token.", ""),
    "train/ratio_min": Entry("Smallest probability ratio new / old of a trainable token.", ""),
    "train/ratio_mean": Entry("Mean probability ratio new / old of trainable tokens.", ""),
    "train/effective_sample_size": Entry(
        "(sum of ratios)^2 / (n x sum of squared ratios) over the step's n trainable tokens: how many of them still "
        "count; 1 on policy, towards 0 as a few tokens outweigh all others.",
        "fraction",
    ),
    "train/teacher_kl": Entry("Mean estimate of the KL divergence of the student from its teacher.", "nats per token"),
    "train/log_prob_diff": Entry(
        "Mean absolute difference between the engine's and the trainer's log-probs; it should be numerics only.",
        "nats per token",
    ),
    "train/log_prob_diff_max": Entry("Largest difference between the engine's and the trainer's log-probs.", "nats"),
    "train/old_log_prob_diff": Entry(
        "Largest difference between a token's log-prob in the step and when the rollout was made; 0 on policy.", "nats"
    ),
    "train/correction_factor": Entry("Mean TIS or IcePop factor of trainable tokens.", ""),
    "train/correction_clipfrac": Entry("Trainable tokens whose TIS or IcePop factor was out of bounds.", "fraction"),
    "train/advantage_mean": Entry("Mean advantage over the rollout's trainable tokens.", ""),
    "train/advantage_abs": Entry("Mean size of the advantage over the rollout's trainable tokens.", ""),
    "train/return_mean": Entry("Mean return over the rollout's trainable tokens.", "reward"),
    "critic/loss": Entry("The loss that the critic minimised.", "reward squared"),
    "critic/value_loss": Entry("Squared distance of (clipped) values from returns.", "reward squared"),
    "critic/value_clipfrac": Entry("Trainable tokens whose value moved farther than critic.value_clip.", "fraction"),
    "critic/explained_variance": Entry(
        "1 - var(returns - values) / var(returns) over the rollout, before the critic's steps: 1 is a perfect critic, "
        "0 one that knows the mean alone, negative worse than that.",
        "",
    ),
    "critic/values": Entry("Mean value at trainable tokens.", "reward"),
    "critic/returns": Entry("Mean return at trainable tokens.", "reward"),
    "critic/grad_norm": Entry("L2 norm of the critic's whole gradient, before clipping.", ""),
    "critic/lr": Entry("The critic's learning rate.", ""),
    "critic/skipped": Entry("1 where the critic's loss or gradient was not finite; else 0.", ""),
    "perf/rollout_time": Entry("Generating and scoring the rollout.", "seconds"),
    "perf/reward_time": Entry("Time inside rewards, added up over workers; it overlaps generation.", "seconds"),
    "perf/tokens_per_gpu_per_second": Entry("Sampled tokens, by rank and second of rollout time.", "tokens per second"),
    "perf/train_wait_time": Entry("The trainer waiting: engines generating and falling asleep.", "seconds"),
    "perf/actor_train_time": Entry("The actor's forward passes and optimizer steps.", "seconds"),
    "perf/critic_train_time": Entry("The critic's forward passes and optimizer steps.", "seconds"),
    "perf/save_time": Entry("Writing the checkpoint.", "seconds"),
    "perf/eval_time": Entry("Evaluating held-out sets, after the rollout before this one.", "seconds"),
    "perf/update_weights_time": Entry(
        "Handing over to the engines: offloading, waking, pushing the new weights.", "seconds"
    ),
    "perf/sleep_time": Entry("Engines releasing weights, KV cache and graphs.", "seconds"),
    "perf/offload_time": Entry("Optimizer state, gradients and frozen roles leaving the device.", "seconds"),
    "perf/wake_time": Entry("Engines taking the memory of their weights back.", "seconds"),
    "perf/push_time": Entry("Pushing the weights, from the call to the last engine's commit.", "seconds"),
    "perf/serve_time": Entry("The actor's weights leaving, KV cache and graphs coming back.", "seconds"),
    "perf/memory_NAME": Entry(
        "Memory in use at the end of a phase (NAME: generate, sleep, actor and so on) on the fullest device: of a GPU "
        "by all processes, engines included; without GPUs by one rank's process (its resident set).",
        "gigabytes",
    ),
    "perf/update_weights_gb_per_second": Entry("Rate of the push alone.", "gigabytes per second"),
    "perf/iteration_time": Entry("One whole iteration, from hand-over to hand-over.", "seconds"),
    "eval/NAME/accuracy": Entry("Mean reward on the held-out set NAME, over all of its samples.", "reward"),
    "eval/NAME/pass@k": Entry(
        "Probability that at least one of k responses is correct: unbiased estimate, mean over prompts.", "fraction"
    ),
    "eval/NAME/response_len": Entry("Mean number of tokens sampled for a response, on the set NAME.", "tokens"),
    "eval/NAME/truncated": Entry("Samples of the set NAME that the length limit cut off.", "fraction"),
}
"""Entry of each metric; in a name, NAME stands for any one part and a final `@k` for any number."""

_SECTIONS = {
    "rollout": "Every rollout",
    "train": "Every optimizer step",
    "critic": "Every optimizer step of the critic",
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
