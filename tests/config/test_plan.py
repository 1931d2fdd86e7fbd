from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from milepost.config.loading import load_config
from milepost.config.plan import Plan, make_plan
from milepost.config.refill import refill_bytes, refill_text
from milepost.config.runnable import check_runnable
from milepost.errors import ConfigError, PluginError

CRITIC = ("algorithm.name=toy_critic",)
MEGATRON = (
    "model.path=full",
    "trainer.backend=megatron",
    "cluster.launcher=ray",
    "cluster.gpus_per_node=8",
    "engine.backend=sglang",
)


def plan(*sets: str) -> Plan:
    return make_plan(load_config("run.yaml", sets))


def problems(*sets: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan(*sets)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_derived_fields_are_filled_in_and_marked(project: Path) -> None:
    made = plan()
    config = made.config
    assert (made.batch_size, made.samples_per_prompt, made.global_batch_size, made.steps_per_rollout) == (8, 4, 32, 1)
    derived = {
        "run.dir": str(project / "runs" / "run"),
        "model.recipe": "toy_model",
        "rollout.max_context_len": 2048,
        "data.max_prompt_len": 2047,
        "trainer.global_batch_size": 32,
        "trainer.steps_per_rollout": 1,
        "engine.num_engines": 1,
        "algorithm.aggregation": "sample_mean",
        "advantage.name": "toy_group",
        "optimizer.decay_steps": 10,
    }
    for path, value in derived.items():
        section, _, key = path.partition(".")
        assert getattr(getattr(config, section), key) == value
        assert made.origins[path] == "derived"
    assert made.origins["rollout.batch_size"] == "run.yaml:5"
    assert made.origins["algorithm.eps_clip"] == "default"
    assert config.algorithm.options == {"eps_clip": 0.2, "mode": "hard"}
    assert made.run_dir == project / "runs" / "run"
    assert (made.needs_critic, made.needs_reference, made.needs_teacher) == (False, False, False)
    assert config.reference.path is None
    assert made.warnings == ()


def test_paths_are_absolute(project: Path) -> None:
    shutil.copytree(project / "model", project / "other")
    made = plan("eval.datasets=[{name: a, path: ./train.jsonl}]", "reference.path=other", "algorithm.kl_loss_coef=0.1")
    assert made.config.data.path == str(project / "train.jsonl")
    assert made.config.model.path == str(project / "model")
    assert made.config.reference.path == str(project / "other")
    assert made.config.eval.datasets[0].path == str(project / "train.jsonl")
    assert made.model_path == project / "model"
    assert made.origins["model.path"] == "run.yaml:1"


def test_a_resolved_config_plans_to_itself(project: Path) -> None:
    made = plan(
        *CRITIC,
        "rollout.num_rollouts=null",
        "rollout.num_epochs=2",
        "eval.datasets=[{name: a, path: model/config.json}]",
    )
    (project / "again.yaml").write_text(json.dumps(made.config.model_dump(mode="json")))
    again = make_plan(load_config("again.yaml"))
    assert again.config == made.config
    assert again.num_rollouts == made.num_rollouts == 5


def test_a_critic_brings_its_roles_and_falls_back_to_the_actor(project: Path) -> None:
    made = plan(*CRITIC, "optimizer.lr=1e-5", "critic.clip_grad=0.5", "critic.warmup_rollouts=2")
    critic = made.config.critic
    assert made.needs_critic
    assert (critic.lr, critic.clip_grad, critic.weight_decay, critic.schedule) == (1e-5, 0.5, 0.01, "constant")
    assert critic.init_from == str(project / "model")
    assert made.origins["critic.lr"] == "derived"
    assert made.origins["critic.clip_grad"] == "--set"
    assert made.advantage.options.lam == 0.9
    assert made.origins["advantage.lam"] == "derived"
    assert made.config.algorithm.aggregation == "token_mean"
    # The actor rests for two of the ten rollouts.
    assert made.num_steps == 8
    assert made.config.optimizer.decay_steps == 8


def test_an_estimator_that_reads_values_brings_a_critic(project: Path) -> None:
    assert plan("advantage.name=toy_gae").needs_critic


def test_a_reference_is_there_only_for_a_coefficient_or_an_estimator(project: Path) -> None:
    assert not plan().needs_reference
    with_loss = plan("algorithm.kl_loss_coef=0.1")
    assert with_loss.needs_reference
    assert with_loss.config.reference.path == str(project / "model")
    assert with_loss.origins["reference.path"] == "derived"
    assert plan("advantage.name=toy_kl").needs_reference


def test_epochs_become_rollouts(project: Path) -> None:
    # 3 x 20 rows at 8 prompts are 7.5 rollouts; the last batch runs into the next epoch.
    made = plan("rollout.num_rollouts=null", "rollout.num_epochs=3")
    assert made.num_rollouts == made.config.rollout.num_rollouts == 8
    assert made.origins["rollout.num_rollouts"] == "derived"
    found = problems("rollout.num_epochs=3")
    assert (
        "3 epochs of 20 rows at 8 prompts a rollout are 8 rollouts, but rollout.num_rollouts is 10"
        in (found["rollout.num_epochs"])
    )
    assert "counts all 20 rows" in plan("rollout.num_epochs=4", "data.dedupe=true").warnings[0]


def test_eval_datasets_take_what_they_do_not_say_from_data(project: Path) -> None:
    made = plan(
        "data.prompt_suffix=Solve it.",
        "data.chat_template=true",
        "rollout.max_response_len=64",
        "eval.datasets=[{name: a, path: train.jsonl, prompt_suffix: '?', reward: {name: toy_free}}, "
        "{name: b, path: train.jsonl, chat_template: false, max_response_len: 32}]",
    )
    first, second = made.config.eval.datasets
    assert (first.prompt_suffix, first.chat_template, first.max_response_len) == ("?", True, 64)
    assert (second.prompt_suffix, second.chat_template, second.max_response_len) == ("Solve it.", False, 32)
    assert first.max_prompt_len == second.max_prompt_len == 2047
    assert made.origins["eval.datasets.0.chat_template"] == "derived"
    assert made.origins["eval.datasets.0.prompt_suffix"] == "--set"
    assert made.origins["eval.datasets.1.chat_template"] == "--set"
    assert {name: choice.name for name, choice in made.eval_rewards.items()} == {"a": "toy_free"}


def test_engines_of_several_gpus_divide_them_among_themselves(project: Path) -> None:
    made = plan(*MEGATRON, "trainer.tensor_parallel=2", "trainer.context_parallel=2", "engine.gpus_per_engine=2")
    assert (made.world_size, made.data_parallel, made.config.engine.num_engines) == (8, 2, 4)


def test_several_servers_may_stand_beside_the_inline_launcher(project: Path) -> None:
    assert plan("engine.backend=sglang", "engine.num_engines=2").config.engine.num_engines == 2


@pytest.mark.parametrize(
    ("sets", "needed"),
    [
        ((), 0),  # CPUs: nothing moves
        (("cluster.colocate=false", "transport.name=toy_far", "cluster.gpus_per_node=2"), 0),
        (("cluster.gpus_per_node=1", "trainer.offload=false"), 0),
        # 1,000,000 parameters in bfloat16, and 2 GiB of buckets
        (("cluster.gpus_per_node=1",), 2_000_000 + 2 * 2**30),
    ],
)
def test_what_a_refill_in_mid_rollout_needs(project: Path, sets: tuple[str, ...], needed: int) -> None:
    made = plan("engine.backend=sglang", "cluster.launcher=ray", *sets)
    assert refill_bytes(made) == needed
    assert ("at the next push" in refill_text(made)) == bool(needed)


def test_ranks_on_cpus_are_counted_per_machine(project: Path) -> None:
    made = plan("cluster.launcher=ray", "cluster.cpu_ranks=2", "cluster.nodes=3", "engine.num_engines=2")
    assert (made.world_size, made.data_parallel, made.config.engine.num_engines) == (6, 6, 2)
    check_runnable(made)


def test_engines_of_their_own_leave_the_rest_to_the_trainer(project: Path) -> None:
    made = plan(*MEGATRON, "cluster.colocate=false", "transport.name=toy_far", "engine.num_engines=3")
    assert (made.world_size, made.data_parallel) == (5, 5)


def test_what_can_be_run_is_let_through(project: Path) -> None:
    check_runnable(plan())


@pytest.mark.parametrize(
    ("sets", "path", "part"),
    [
        (("rollout.top_p=0.9",), "rollout.top_p", "leave it at 1.0"),
        (("rollout.top_k=5",), "rollout.top_k", "leave it at 0"),
        (("rollout.min_p=0.1",), "rollout.min_p", "leave it at 0.0"),
        (("rollout.temperature=0",), "rollout.temperature", "temperature above 0"),
        (("rollout.samples_per_prompt=1",), "rollout.samples_per_prompt", "'toy' compares the samples of a prompt"),
        (
            ("rollout.samples_per_prompt=1", "algorithm.name=toy_student", "teacher.path=model"),
            "rollout.samples_per_prompt",
            "advantage 'toy_group' compares",
        ),
        (("rollout.num_rollouts=null",), "rollout.num_rollouts", "give rollout.num_rollouts or num_epochs"),
        (("rollout.max_response_len=2048",), "rollout.max_response_len", "leaves no room for a prompt"),
        (("rollout.max_context_len=4096",), "rollout.max_context_len", "more than the model's 2048 positions"),
        (
            ("eval.datasets=[{name: a, path: train.jsonl, max_response_len: 9000}]",),
            "eval.datasets.0.max_response_len",
            "leaves no room",
        ),
        (
            ("eval.datasets=[{name: a, path: train.jsonl}, {name: a, path: train.jsonl}]",),
            "eval.datasets.1.name",
            "already the name of eval.datasets.0",
        ),
        (("eval.datasets=[{name: a/b, path: train.jsonl}]",), "eval.datasets.0.name", "no slashes"),
        (("algorithm.name=toy_student",), "teacher.path", "learns from a teacher"),
        ((*CRITIC, "advantage.name=toy_group"), "advantage.name", "gives no returns"),
        ((*CRITIC, "advantage.name=toy_kl"), "advantage.name", "do not exist yet when the critic trains"),
        ((*CRITIC, "critic.warmup_rollouts=10"), "critic.warmup_rollouts", "leaves none of the 10 rollouts"),
        (("data.label=null",), "data.label", "'toy_match' compares responses with a label"),
        (("data.system=Be brief.",), "data.system", "only with chat_template: true"),
        (("optimizer.schedule=cosine", "optimizer.warmup_steps=10"), "optimizer.warmup_steps", "of the 10 steps"),
        (("optimizer.schedule=linear", "optimizer.min_lr=1"), "optimizer.min_lr", "above optimizer.lr"),
        (("algorithm.correction={name: tis, low: 2, high: 1}",), "algorithm.correction.low", "below high"),
        (
            ("algorithm.correction={name: tis}", "trainer.old_log_probs=engine"),
            "algorithm.correction",
            "use auto or trainer",
        ),
        (("cluster.gpus_per_node=4",), "cluster.gpus_per_node", "use cluster.launcher: ray"),
        (("cluster.nodes=2",), "cluster.nodes", "use cluster.launcher: ray"),
        (("cluster.cpu_ranks=2",), "cluster.cpu_ranks", "got 1 x 2 CPU ranks; use cluster.launcher: ray"),
        (("engine.num_engines=2",), "engine.num_engines", "launcher inline runs one"),
        (
            ("cluster.launcher=ray", "cluster.gpus_per_node=2", "cluster.cpu_ranks=2"),
            "cluster.cpu_ranks",
            "there is a rank on each of the 2 GPUs",
        ),
        (("cluster.gpus_per_node=1", "run.device=cpu"), "run.device", "contradicts"),
        (("trainer.tensor_parallel=2",), "trainer.tensor_parallel", "the torch backend cannot do"),
        (("trainer.sequence_parallel=true",), "trainer.sequence_parallel", "tensor_parallel above 1"),
        (("engine.gpus_per_engine=2",), "engine.gpus_per_engine", "a local engine runs on one device"),
        (("transport.name=toy_far",), "transport.name", "cannot be colocated"),
        (("cluster.colocate=false",), "transport.name", "needs cluster.colocate: true"),
        (("cluster.colocate=false", "transport.name=ipc"), "transport.name", "needs cluster.colocate: true"),
        (("transport.name=broadcast",), "transport.name", "cannot be colocated; set cluster.colocate: false"),
        (("transport.name=p2p",), "transport.name", "cannot be colocated; set cluster.colocate: false"),
        ((*MEGATRON, "model.path=model"), "trainer.backend", "no Megatron half"),
        ((*MEGATRON, "trainer.tensor_parallel=8"), "trainer.tensor_parallel", "does not divide the model's"),
        (
            (*MEGATRON, "trainer.context_parallel=3"),
            "trainer.tensor_parallel",
            "3 does not divide the 8 training ranks",
        ),
        (
            (*MEGATRON, "trainer.pipeline_parallel=4"),
            "trainer.pipeline_parallel",
            "4 stages do not divide the model's 2 layers",
        ),
        (
            (*MEGATRON, "trainer.pipeline_parallel=2", "trainer.virtual_pipeline_parallel=2"),
            "trainer.virtual_pipeline_parallel",
            "2 stages of 2 pieces do not divide the model's 2 layers",
        ),
        (
            (*MEGATRON, "trainer.virtual_pipeline_parallel=2"),
            "trainer.virtual_pipeline_parallel",
            "2, which needs trainer.pipeline_parallel above 1",
        ),
        ((*MEGATRON, "trainer.expert_parallel=2"), "trainer.expert_parallel", "does not divide 0 experts"),
        ((*MEGATRON, "engine.gpus_per_engine=3"), "engine.gpus_per_engine", "do not fit evenly on the 8 GPUs"),
        (
            (*MEGATRON, "cluster.colocate=false", "transport.name=toy_any", "engine.num_engines=8"),
            "cluster.colocate",
            "none is left",
        ),
        (
            (*MEGATRON, "cluster.nodes=2", "engine.gpus_per_engine=3"),
            "engine.gpus_per_engine",
            "3 does not divide the 8 GPUs of a machine",
        ),
        (
            (*MEGATRON, "cluster.nodes=2", "engine.gpus_per_engine=16"),
            "engine.gpus_per_engine",
            "16 does not divide the 8 GPUs of a machine",
        ),
        (
            ("engine.backend=sglang", "engine.gpus_per_engine=2"),
            "engine.gpus_per_engine",
            "2, but cluster.gpus_per_node is 0",
        ),
        (("cluster.colocate=false", "transport.name=toy_far"), "cluster.colocate", "launcher inline has one device"),
        (("engine.num_engines=2",), "engine.num_engines", "launcher inline runs one local engine"),
        (("plugins.require=[nobody-has-this]",), "plugins.require", "nobody-has-this is not installed"),
        (("plugins.require=['pydantic>=99']",), "plugins.require", "'pydantic>=99' is not met: pydantic 2."),
        (("plugins.require=['>=<']",), "plugins.require", "is not a requirement"),
        (("run.dir=run.yaml",), "run.dir", "is a file"),
        (("algorithm.eps_clip=1.5",), "algorithm", "eps_clip 1.5 must be below steps_per_rollout 1"),
        (("model.recipe=toy_modle",), "model.recipe", "did you mean 'toy_model'"),
        (("rollout.num_rollouts=null", "rollout.num_epochs=1", "data.path=empty.jsonl"), "data.path", "is empty"),
    ],
)
def test_rules(project: Path, sets: tuple[str, ...], path: str, part: str) -> None:
    (project / "empty.jsonl").write_text("\n")
    found = problems(*sets)
    assert part in found[path]


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (("critic.lr=1",), "critic: has no effect"),
        (("reference.path=model",), "reference.path: has no effect"),
        (("teacher.path=model",), "teacher.path: has no effect"),
        (("eval.interval=1",), "eval.interval: has no effect"),
        ((*CRITIC, "trainer.offload=false"), "trainer.offload"),
        (("optimizer.warmup_steps=11",), "the run has only 10 steps"),
        (("trainer.max_tokens_per_gpu=512",), "ride alone in a micro-batch"),
        (("data.max_prompt_len=1500",), "responses to long prompts are cut short"),
    ],
)
def test_warnings(project: Path, sets: tuple[str, ...], part: str) -> None:
    warnings = plan(*sets).warnings
    assert len(warnings) == 1
    assert part in warnings[0]
    assert "--set" in warnings[0] or warnings[0].startswith("critic:")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is not JSON"),
        ("[]", "names no architecture"),
        ('{"architectures": []}', "names no architecture"),
        ('{"architectures": ["ToyForCausalLM"], "hidden_size": 63}', "hidden_size 63 is odd"),
        ('{"architectures": ["ToyForCausalLM"]}', "lacks 'hidden_size'"),
    ],
)
def test_unusable_model_config(project: Path, text: str, part: str) -> None:
    (project / "model" / "config.json").write_text(text)
    assert part in problems()["model.path"]


def test_problems_of_planning_come_together(project: Path) -> None:
    found = problems("rollout.top_p=0.5", "model.path=nowhere", "rollout.batch_size=5", "trainer.global_batch_size=8")
    assert set(found) == {"rollout.top_p", "model.path", "trainer.global_batch_size"}
    assert f"{project}/nowhere does not exist" in found["model.path"]


def test_a_path_meant_from_the_working_directory_is_recognised(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / "mine.jsonl").write_text("{}\n")
    monkeypatch.chdir(project / "elsewhere")
    with pytest.raises(ConfigError) as caught:
        make_plan(load_config("../run.yaml", ["data.path=mine.jsonl"]))
    message = caught.value.problems[0].message
    assert f"{project}/mine.jsonl does not exist" in message
    assert f"{project}/elsewhere/mine.jsonl exists: give that absolute path" in message


def test_built_ins_are_the_defaults(project: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (project / "model" / "config.json").write_text(json.dumps(config))
    (project / "plain.yaml").write_text(
        "model: {path: model}\n"
        "data: {path: train.jsonl}\n"
        "rollout: {num_rollouts: 1, batch_size: 2, samples_per_prompt: 2}\n"
        "reward: {name: deepscaler}\n"
    )
    made = make_plan(load_config("plain.yaml"))
    chosen = [getattr(made, kind).name for kind in ("algorithm", "advantage", "reward", "model", "transport")]
    assert chosen == ["grpo", "group", "deepscaler", "qwen3", "ipc"]
    assert made.origins["transport.name"] == made.origins["advantage.name"] == "derived"
    assert made.origins["algorithm.name"] == made.origins["algorithm.eps_clip"] == "default"
    # Embedding 512 x 64; per layer q 64 x 64, k and v 64 x 32, o 64 x 64, three 64 x 128, norms 64 + 64 + 16 + 16.
    assert made.layout.num_parameters == 512 * 64 + 2 * (4096 + 2 * 2048 + 4096 + 3 * 8192 + 160) + 64


def test_a_broken_check_is_the_plugins_fault(project: Path) -> None:
    with pytest.raises(PluginError, match=r"the check of 'toy_broken' from local:toy_parts.py .* failed"):
        plan("algorithm.name=toy_broken")


def test_planning_imports_neither_torch_nor_numpy(project: Path) -> None:
    program = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "ray", "transformers", "sglang", "megatron", "safetensors"}:
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Refuse())
from milepost.cli import cli
cli(["plan", "run.yaml"], standalone_mode=False)
cli(["config", "show", "run.yaml"], standalone_mode=False)
cli(["config", "schema"], standalone_mode=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "8 prompts x 4 samples = 32 rollouts a step" in done.stdout
