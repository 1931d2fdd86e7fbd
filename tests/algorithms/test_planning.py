"""What planning makes of the algorithms, and what it refuses, with the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from milepost.config.loading import load_config
from milepost.config.plan import Plan, make_plan
from milepost.errors import ConfigError

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
RUN = """\
model: {path: model}
data: {path: train.jsonl}
rollout: {num_rollouts: 10, batch_size: 8, samples_per_prompt: 4, max_response_len: 64}
reward: {name: math}
"""


def model(folder: Path, **changes: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3 | changes))


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def plan(*sets: str) -> Plan:
    return make_plan(load_config("run.yaml", sets))


def problems(*sets: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan(*sets)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_ppo_alone_is_a_complete_switch(project: Path) -> None:
    made = plan("algorithm.name=ppo", "optimizer.lr=3e-6", "optimizer.warmup_steps=2", "optimizer.clip_grad=0.5")
    assert (made.needs_critic, made.needs_reference, made.needs_teacher) == (True, False, False)
    assert made.advantage.name == "gae"
    assert made.advantage.options.model_dump() == {"gamma": 1.0, "lam": 1.0, "normalize": True, "kl_coef": 0.0}
    assert made.config.trainer.offload
    critic = made.config.critic
    assert critic.init_from == str(project / "model")
    assert (critic.lr, critic.warmup_steps, critic.clip_grad, critic.schedule) == (3e-6, 2, 0.5, "constant")
    assert (critic.decay_steps, critic.min_lr, critic.value_clip, critic.warmup_rollouts) == (10, 0.0, 0.2, 0)
    assert made.origins["critic.lr"] == made.origins["critic.decay_steps"] == "derived"
    assert made.warnings == ()
    # one response to a prompt is enough: nothing compares within a group
    assert plan("algorithm.name=ppo", "rollout.samples_per_prompt=1").samples_per_prompt == 1


def test_what_the_critic_is_given_stands(project: Path) -> None:
    model(project / "other")
    given = ("critic.init_from=other", "critic.lr=1e-5", "critic.warmup_rollouts=4", "critic.schedule=cosine")
    made = plan("algorithm.name=ppo", "trainer.steps_per_rollout=2", "trainer.global_batch_size=16", *given)
    assert made.config.critic.init_from == str(project / "other")
    assert (made.config.critic.lr, made.config.critic.schedule) == (1e-5, "cosine")
    # the actor rests for four rollouts, the critic never
    assert (made.num_steps, made.config.optimizer.decay_steps, made.config.critic.decay_steps) == (12, 12, 20)
    fixed = plan("algorithm.name=ppo", "optimizer.decay_steps=7")
    assert fixed.config.critic.decay_steps == 7


@pytest.mark.parametrize(
    ("sets", "path", "parts"),
    [
        (("advantage.kl_coef=0.1",), "advantage", ("before the reference's log-probs exist", "kl_loss_coef")),
        (("advantage.name=reinforce_pp",), "advantage.name", ("do not exist yet", "kl_loss_coef")),
        (("advantage.name=group",), "advantage.name", ("gives no returns", "gae")),
        (("critic.warmup_rollouts=10",), "critic.warmup_rollouts", ("leaves none of the 10 rollouts",)),
        (("critic.init_from=nowhere",), "critic.init_from", ("does not exist",)),
        (("critic.init_from=llama",), "critic.init_from", ("LlamaForCausalLM", "same family")),
        (("critic.init_from=broken",), "critic.init_from", ("cannot read", "give a checkpoint of its kind")),
        (("critic.schedule=linear", "critic.warmup_steps=10"), "critic.warmup_steps", ("of the 10 steps",)),
        (("critic.schedule=linear", "critic.lr=1e-5", "critic.min_lr=1e-4"), "critic.min_lr", ("above critic.lr",)),
        (("optimizer.min_lr=1e-6", "critic.schedule=linear", "critic.lr=1e-7"), "optimizer.min_lr", ("critic.lr",)),
        (("critic.value_clip=0",), "critic.value_clip", ("greater than 0",)),
        (("trainer.global_batch_size=7",), "trainer.global_batch_size", ("7",)),
        (("algorithm.kl_loss_coef=0.1", "reference.path=vocabulary"), "reference.path", ("256", "128", "tokenizer")),
    ],
)
def test_rules_of_ppo(project: Path, sets: tuple[str, ...], path: str, parts: tuple[str, ...]) -> None:
    model(project / "llama", architectures=["LlamaForCausalLM"])
    model(project / "broken", num_hidden_layers="two")
    model(project / "vocabulary", vocab_size=256)
    found = problems("algorithm.name=ppo", *sets)
    assert path in found, found
    assert all(part in found[path] for part in parts), found[path]


def test_a_loss_level_kl_goes_with_a_critic(project: Path) -> None:
    made = plan("algorithm.name=ppo", "algorithm.kl_loss_coef=0.05")
    assert (made.needs_critic, made.needs_reference) == (True, True)
    assert made.config.reference.path == str(project / "model")


def test_a_critic_without_offload_warns_and_settings_without_a_critic_too() -> None:
    (warning,) = plan("algorithm.name=ppo", "trainer.offload=false").warnings
    assert warning.startswith("trainer.offload")
    assert "must fit at once" in warning
    (warning,) = plan("critic.lr=1e-5").warnings
    assert "critic: has no effect" in warning


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_group_algorithms_want_groups(name: str) -> None:
    found = problems(f"algorithm.name={name}", "rollout.samples_per_prompt=1")
    assert "wants 2 or more" in found["rollout.samples_per_prompt"]


def test_defaults_of_the_family() -> None:
    assert plan("algorithm.name=dr_grpo").advantage.options.normalize_std is False
    assert plan("algorithm.name=dr_grpo").config.algorithm.aggregation == "constant"
    dapo = plan("algorithm.name=dapo", "rollout.filter=zero_variance", "reward.overlong={buffer: 16}")
    assert dapo.config.algorithm.options == {"eps_clip": 0.2, "eps_clip_high": 0.28, "dual_clip": None}
    assert dapo.config.algorithm.aggregation == "token_mean"
    gspo = plan("algorithm.name=gspo").config.algorithm.options
    assert gspo == {"eps_clip": 3e-4, "eps_clip_high": 4e-4}
    assert plan("algorithm.name=rloo").advantage.name == "rloo"


def test_reinforce_pp_needs_a_reference_for_its_penalty_alone() -> None:
    assert plan("algorithm.name=reinforce_pp").needs_reference
    assert not plan("algorithm.name=reinforce_pp", "advantage.beta=0").needs_reference
    baseline = plan("algorithm.name=reinforce_pp", "advantage.name=reinforce_pp_baseline")
    assert (baseline.advantage.name, baseline.needs_reference) == ("reinforce_pp_baseline", True)


def test_distillation_needs_a_teacher_of_the_same_vocabulary(project: Path) -> None:
    assert "learns from a teacher" in problems("algorithm.name=distillation")["teacher.path"]
    model(project / "teacher", hidden_size=128, num_hidden_layers=4)
    made = plan("algorithm.name=distillation", "teacher.path=teacher", "rollout.samples_per_prompt=1")
    assert (made.needs_teacher, made.needs_critic, made.needs_reference) == (True, False, False)
    model(project / "stranger", vocab_size=256)
    found = problems("algorithm.name=distillation", "teacher.path=stranger")
    assert "only be compared under one tokenizer" in found["teacher.path"]


@pytest.mark.parametrize(
    ("sets", "path", "part"),
    [
        (("reward.overlong={buffer: 65}",), "reward.overlong.buffer", "more than rollout.max_response_len 64"),
        (("reward.overlong={}",), "reward.overlong.buffer", "required"),
        (
            ("eval.datasets=[{name: a, path: train.jsonl, reward: {name: math, overlong: {buffer: 8}}}]",),
            "eval.datasets.0.reward.overlong",
            "remove it here",
        ),
    ],
)
def test_rules_of_overlong_shaping(sets: tuple[str, ...], path: str, part: str) -> None:
    assert part in problems(*sets)[path]


@pytest.mark.parametrize(
    "module",
    [
        *("milepost_ppo", "milepost_gae", "milepost_dr_grpo", "milepost_dapo", "milepost_gspo", "milepost_cispo"),
        *("milepost_rloo", "milepost_reinforce_pp", "milepost_distillation", "milepost_raw"),
    ],
)
def test_an_entry_point_is_light(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'transformers', 'ray') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
