"""PPO and its relatives through whole runs: the critic's turn, its checkpoint, distillation, corrections."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from milepost import loop
from milepost.checkpoint import load_tensors
from milepost.config.loading import load_config
from milepost.config.plan import make_plan
from milepost.errors import CheckpointError
from milepost.run import RunSummary
from milepost.tracking.catalogue import describe
from milepost.training.torch_trainer import TorchTrainer
from runs import lines, numbers
from safetensors.torch import load_file, save_file

Write = Callable[..., Path]
pytestmark = pytest.mark.takes(50)
PPO = {"algorithm": {"name": "ppo"}, "eval": {"datasets": []}}
ROOT = Path(__file__).parents[2]


FIRST_TOKEN = """
def score(sample):
    return float(sample.tokens[sample.trainable][0] % 2)
"""


def train(path: Path, *sets: str) -> RunSummary:
    return loop.train(make_plan(load_config([path], sets)), progress=False)


def saved(run_dir: Path, rollout: int, name: str) -> dict[str, torch.Tensor]:
    return load_tensors(run_dir / "checkpoints" / f"rollout-{rollout:06d}" / "trainer" / f"{name}.safetensors")


def test_critic_and_actor_take_their_own_steps_and_all_metrics_are_in_the_catalogue(write_config: Write) -> None:
    path = write_config(**PPO, trainer={"steps_per_rollout": 2}, critic={"lr": 3e-3}, rollout={"num_rollouts": 2})
    run_dir = train(path).run_dir
    kinds = [(line["kind"], line["index"]) for line in lines(run_dir) if line["kind"] in ("critic", "step")]
    assert kinds == [
        *(("critic", 0), ("critic", 1), ("step", 0), ("step", 1)),
        *(("critic", 2), ("critic", 3), ("step", 2), ("step", 3)),
    ]
    assert {line["critic/lr"] for line in lines(run_dir, "critic")} == {3e-3}
    assert {line["train/lr"] for line in lines(run_dir, "step")} == {1e-3}
    names = {name for line in lines(run_dir) for name in line if "/" in name}
    assert [name for name in sorted(names) if describe(name) is None] == []
    assert {
        *("critic/explained_variance", "critic/value_loss", "critic/value_clipfrac", "train/effective_sample_size"),
        *("train/ratio_max", "train/pg_clipfrac", "train/ppo_kl", "train/entropy", "train/log_prob_diff"),
        "rollout/zero_variance_groups",
    } <= names
    first, second, *_ = lines(run_dir, "step")
    assert first["train/effective_sample_size"] == first["train/ratio_mean"] == 1.0  # on policy
    assert 0.0 < second["train/effective_sample_size"] < 1.0


def test_the_critic_learns_to_predict_rewards(write_config: Write, workspace: Path) -> None:
    # A reward that the first of four sampled tokens decides: three quarters of its variance can be foreseen.
    (workspace / "score.py").write_text(
        "def score(sample):\n    return float(sample.tokens[sample.trainable][0] % 2)\n"
    )
    path = write_config(
        **PPO,
        rollout={"num_rollouts": 30, "batch_size": 32, "samples_per_prompt": 1, "max_response_len": 4},
        optimizer={"lr": 0.0},
        critic={"lr": 3e-3, "value_clip": 1.0},
        trainer={"steps_per_rollout": 4},
        checkpoint={"save_interval": None},
    )
    explained = [line["critic/explained_variance"] for line in lines(train(path).run_dir, "critic")][::4]
    assert sum(explained[:3]) / 3 < 0.1
    assert sum(explained[-3:]) / 3 > 0.2


def test_warm_up_trains_the_critic_alone(write_config: Write) -> None:
    path = write_config(**PPO, critic={"warmup_rollouts": 2}, rollout={"num_rollouts": 3}, checkpoint={"keep": 9})
    run_dir = train(path).run_dir
    assert [line["rollout"] for line in lines(run_dir, "critic")] == [0, 1, 2]
    assert [line["rollout"] for line in lines(run_dir, "step")] == [2]
    assert lines(run_dir, "step")[0]["train/old_log_prob_diff"] == 0.0  # both computed in the actor's first turn
    start, warm, after = (saved(run_dir, rollout, "actor") for rollout in (0, 1, 2))
    assert all(torch.equal(start[name], warm[name]) for name in start)
    assert any(not torch.equal(start[name], after[name]) for name in start)
    critic = [saved(run_dir, rollout, "critic") for rollout in (0, 1)]
    assert any(not torch.equal(critic[0][name], critic[1][name]) for name in critic[0])


def test_the_critic_decays_over_all_of_its_own_steps(write_config: Write) -> None:
    path = write_config(
        **PPO,
        optimizer={"lr": 1e-3, "schedule": "linear"},
        critic={"warmup_rollouts": 2, "lr": 4e-3, "min_lr": 2e-3},
        rollout={"num_rollouts": 4},
    )
    run_dir = train(path).run_dir
    assert [line["critic/lr"] for line in lines(run_dir, "critic")] == pytest.approx([4e-3, 3.5e-3, 3e-3, 2.5e-3])
    assert [line["train/lr"] for line in lines(run_dir, "step")] == pytest.approx([1e-3, 0.5e-3])


def test_both_resume_and_neither_gets_the_others_weights(write_config: Write) -> None:
    path = write_config(**PPO, rollout={"num_rollouts": 4}, checkpoint={"keep": 9}, critic={"lr": 2e-3})
    whole = train(path, "run.dir=whole").run_dir
    train(path, "run.dir=halves", "rollout.num_rollouts=2")
    halves = train(path, "run.dir=halves").run_dir
    assert numbers(halves) == numbers(whole)
    for name in ("actor", "critic", "actor-optimizer", "critic-optimizer"):
        a, b = saved(whole, 3, name), saved(halves, 3, name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    actor, critic = saved(halves, 3, "actor"), saved(halves, 3, "critic")
    shared = actor.keys() & critic.keys()
    assert {"value_head.weight", "value_head.bias"} == critic.keys() - actor.keys()
    assert [name for name in sorted(shared) if torch.equal(actor[name], critic[name])] == []


def test_a_checkpoint_without_a_critic_is_not_resumed_with_one(write_config: Write) -> None:
    train(write_config(rollout={"num_rollouts": 1}, eval={"datasets": []}))
    with pytest.raises(CheckpointError, match="critic"):
        train(write_config(**PPO, rollout={"num_rollouts": 2}))


def test_init_from_another_run_starts_actor_and_critic_each_from_their_own(write_config: Write) -> None:
    path = write_config(**PPO, rollout={"num_rollouts": 1})
    first = train(path, "run.dir=first").run_dir
    source = first / "checkpoints" / "rollout-000000"
    second = train(path, "run.dir=second", f"checkpoint.init_from={source}", "optimizer.lr=0", "critic.lr=0").run_dir
    for name in ("actor", "critic"):
        a, b = saved(first, 0, name), saved(second, 0, name)
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_critic_init_from_is_the_critics_alone(write_config: Write, workspace: Path) -> None:
    # the same architecture with other weights
    (workspace / "other").mkdir()
    for file in (workspace / "model").iterdir():
        (workspace / "other" / file.name).write_bytes(file.read_bytes())
    weights = load_file(workspace / "other" / "model.safetensors")
    halved = {name: weight * 0.5 for name, weight in weights.items()}
    save_file(halved, workspace / "other" / "model.safetensors", {"format": "pt"})
    path = write_config(**PPO, rollout={"num_rollouts": 1}, critic={"init_from": "other"})
    run_dir = train(path, "optimizer.lr=0", "critic.lr=0").run_dir
    actor, critic = saved(run_dir, 0, "actor"), saved(run_dir, 0, "critic")
    name = "model.embed_tokens.weight"
    assert torch.equal(actor[name], weights[name])
    assert torch.equal(critic[name], halved[name])


def test_without_offload_nothing_leaves_and_the_numbers_are_the_same(
    write_config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(**PPO, rollout={"num_rollouts": 2})
    offloaded = train(path, "run.dir=offloaded").run_dir
    calls: list[tuple[str, Any]] = []
    offload = TorchTrainer.offload

    def noting(self: TorchTrainer, role: Any, parts: Any) -> None:
        calls.append((role, parts))
        offload(self, role, parts)

    monkeypatch.setattr(TorchTrainer, "offload", noting)
    plan = make_plan(load_config([path], ["run.dir=kept", "trainer.offload=false"]))
    assert any(warning.startswith("trainer.offload") for warning in plan.warnings)
    kept = loop.train(plan, progress=False).run_dir
    assert calls == []
    assert numbers(kept) == numbers(offloaded)


KILLER = '''
"""The default critic loss, in the midst of which the process is killed once."""
import os
import signal
from pathlib import Path

import milepost
from milepost.components import AlgorithmTraits, Component

MARK = Path(__file__).with_name("killed.mark")


class Killer:
    calls = 0

    def policy_loss(self, inputs):
        from milepost.training.inputs import TokenLoss

        return TokenLoss(-(inputs.log_probs - inputs.old_log_probs).exp() * inputs.advantages)

    def value_loss(self, inputs):
        from milepost.functional.values import clipped_value_loss
        from milepost.training.inputs import TokenLoss

        Killer.calls += 1
        if Killer.calls == 6 and not MARK.exists():  # rollout 2, second step of two, after the first was applied
            MARK.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = clipped_value_loss(inputs.values, inputs.old_values, inputs.returns, inputs.value_clip)
        return TokenLoss(loss)


@milepost.hookimpl
def milepost_algorithms():
    traits = AlgorithmTraits(advantage="gae", critic=True)
    return [Component("killer", milepost.NoOptions, traits, lambda options: Killer(), "Dies once.")]
'''


def test_killed_in_the_middle_of_a_critic_step_it_goes_on_with_the_same_numbers(
    write_config: Write, workspace: Path
) -> None:
    (workspace / "killer.py").write_text(KILLER)
    path = write_config(
        algorithm={"name": "killer"},
        plugins={"modules": ["killer"]},
        trainer={"steps_per_rollout": 2},
        critic={"lr": 2e-3, "warmup_rollouts": 1},
        rollout={"num_rollouts": 4},
        checkpoint={"save_interval": 2},
    )

    def start(run_dir: str) -> tuple[int, str]:
        return Command("train", path, "--no-progress", "--run-dir", run_dir, cwd=workspace).finish()

    code, output = start("killed")
    assert code == -signal.SIGKILL, output
    assert [line["rollout"] for line in lines(workspace / "killed", "critic")] == [0, 0, 1, 1]
    assert lines(workspace / "killed", "rollout")[-1]["rollout"] == 2
    code, output = start("killed")
    assert code == 0, output
    assert "resuming after rollout 1" in output
    code, output = start("undisturbed")
    assert code == 0, output
    assert numbers(workspace / "killed") == numbers(workspace / "undisturbed")


@pytest.mark.parametrize("algorithm", ["dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"])
def test_every_algorithm_runs_by_its_name_alone(write_config: Write, algorithm: str) -> None:
    path = write_config(
        algorithm={"name": algorithm},
        rollout={"num_rollouts": 1},
        trainer={"steps_per_rollout": 2},
        eval={"datasets": []},
    )
    first, second = lines(train(path).run_dir, "step")
    assert first["train/ratio_max"] == first["train/ratio_min"] == 1.0
    assert second["train/ratio_max"] > 1.0
    assert second["train/grad_norm"] > 0.0


def test_the_kl_penalty_of_reinforce_pp_brings_a_reference_and_moves_advantages(write_config: Write) -> None:
    def abs_advantage(*sets: str) -> list[float]:
        path = write_config(algorithm={"name": "reinforce_pp"}, rollout={"num_rollouts": 3}, eval={"datasets": []})
        run_dir = train(path, "advantage.normalize=false", *sets).run_dir
        return [line["train/advantage_abs"] for line in lines(run_dir, "step")]

    without = abs_advantage("run.dir=a", "advantage.beta=0")
    with_penalty = abs_advantage("run.dir=b", "advantage.beta=0.5")
    assert with_penalty[0] == pytest.approx(without[0], rel=1e-4)  # the policy is still the reference
    assert with_penalty[2] != pytest.approx(without[2], rel=1e-4)


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "cispo"])
def test_corrections_work_with_any_algorithm(write_config: Write, algorithm: str) -> None:
    """With engine log-probs equal to the trainer's, bounds around 1 change nothing and bounds beside 1 everything."""

    def first_step(directory: str, correction: dict[str, Any] | None) -> dict[str, Any]:
        path = write_config(
            algorithm={"name": algorithm, "correction": correction},
            rollout={"num_rollouts": 1},
            eval={"datasets": []},
        )
        return lines(train(path, f"run.dir={directory}").run_dir, "step")[0]

    plain = first_step("plain", None)
    around = first_step("around", {"name": "tis", "low": 0.5, "high": 2.0})
    assert around["train/correction_factor"] == pytest.approx(1.0, abs=1e-4)
    assert around["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-3)
    halved = first_step("halved", {"name": "tis", "low": 0.0, "high": 0.5})
    assert halved["train/correction_clipfrac"] == 1.0
    assert halved["train/grad_norm"] == pytest.approx(0.5 * plain["train/grad_norm"], rel=1e-4)
    masked = first_step("masked", {"name": "icepop", "low": 0.0, "high": 0.5})
    assert (masked["train/correction_factor"], masked["train/grad_norm"]) == (0.0, 0.0)


def test_overlong_shaping_takes_its_penalty_off_training_rewards_alone(write_config: Write) -> None:
    changes = {"rollout": {"num_rollouts": 1}, "track": {"samples_per_rollout": 99}}
    plain = train(write_config(**changes), "run.dir=plain").run_dir
    shaped = train(
        write_config(**changes, reward={"overlong": {"buffer": 16, "penalty": 0.5}}), "run.dir=shaped"
    ).run_dir

    def samples(run_dir: Path, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
        return [sample for sample in found if sample["kind"] == kind]

    for before, after in zip(samples(plain, "rollout"), samples(shaped, "rollout"), strict=True):
        penalty = -0.5 * after["response_len"] / 16  # the buffer is the whole length limit of 16
        score = before["rewards"]["reward"]
        assert after["rewards"] == pytest.approx({"reward": score + penalty, "unshaped": score, "overlong": penalty})
    first, second = lines(plain, "rollout")[0], lines(shaped, "rollout")[0]
    assert first["rollout/raw_reward"] == second["rollout/raw_reward"]
    assert -0.5 <= second["rollout/reward/overlong"] < 0.0
    before_training = [lines(run_dir, "eval")[0]["eval/heldout/accuracy"] for run_dir in (plain, shaped)]
    assert before_training[0] == before_training[1]


def test_with_a_teacher_a_constant_reward_does_not_stop_the_run(write_config: Write, workspace: Path) -> None:
    (workspace / "score.py").write_text("def score(sample):\n    return 0.0\n")
    path = write_config(
        algorithm={"name": "distillation"},
        teacher={"path": "model"},
        rollout={"num_rollouts": 3, "constant_reward_limit": 2},
        eval={"datasets": []},
    )
    run_dir = train(path).run_dir
    assert len(lines(run_dir, "step")) == 3
    assert lines(run_dir, "step")[0]["train/teacher_kl"] == pytest.approx(0.0, abs=1e-6)  # it teaches itself


def test_distillation_brings_the_kl_down_tenfold(write_config: Write, workspace: Path) -> None:
    teacher = workspace / "teacher"
    maker = [sys.executable, str(ROOT / "examples" / "quickstart" / "make.py"), "--out", str(teacher)]
    settings = ["--hidden", "32", "--layers", "2", "--steps", "150", "--threads", "1"]
    subprocess.run([*maker, *settings], check=True, capture_output=True)
    path = write_config(
        algorithm={"name": "distillation"},
        teacher={"path": "teacher/model"},
        rollout={"num_rollouts": 40, "batch_size": 256, "samples_per_prompt": 1, "max_response_len": 8},
        trainer={"steps_per_rollout": 4},
        optimizer={"lr": 5e-3, "weight_decay": 0.0, "schedule": "linear"},
        checkpoint={"save_interval": None},
        eval={"datasets": []},
    )
    kl = [line["train/teacher_kl"] for line in lines(train(path).run_dir, "step")]
    start, end = sum(kl[:4]) / 4, sum(kl[-8:]) / 8
    assert start > 0.1
    assert end < start / 10
