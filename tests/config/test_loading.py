from __future__ import annotations

from pathlib import Path

import pytest
from milepost.config.loading import Flag, load_config
from milepost.errors import ConfigError


def problems_of(*paths: str, sets: tuple[str, ...] = ()) -> dict[str, str]:
    """Return path to `message (origin)` of what is wrong with run configs."""
    with pytest.raises(ConfigError) as caught:
        load_config(paths, sets)
    return {problem.path: f"{problem.message} ({problem.origin})" for problem in caught.value.problems}


def test_values_and_origins_of_one_file(project: Path) -> None:
    loaded = load_config("run.yaml")
    assert loaded.config.rollout.batch_size == 8
    assert loaded.base_dir == project
    assert loaded.name == "run"
    expected = {
        "model.path": "run.yaml:1",
        "data.path": "run.yaml:2",
        "rollout.num_rollouts": "run.yaml:4",
        "rollout.samples_per_prompt": "run.yaml:6",
        "rollout.temperature": "default",
        "reward.name": "run.yaml:7",
        "reward.timeout": "default",
        "plugins.modules": "run.yaml:10",
        "optimizer.lr": "default",
        "trainer.global_batch_size": "default",
    }
    assert {path: loaded.origins[path] for path in expected} == expected


def test_files_compose_left_to_right_and_flags_come_last(project: Path) -> None:
    (project / "mine.yaml").write_text("rollout: {batch_size: 16}\noptimizer:\n  betas: [0.8, 0.9]\n")
    loaded = load_config(["run.yaml", "mine.yaml"], ["optimizer.lr=2e-6", "rollout.batch_size=32"])
    assert loaded.config.rollout.batch_size == 32
    assert loaded.config.rollout.samples_per_prompt == 4
    assert loaded.config.optimizer.betas == (0.8, 0.9)
    assert loaded.config.optimizer.lr == 2e-6
    assert loaded.origins["rollout.batch_size"] == "--set"
    assert loaded.origins["optimizer.betas"] == "mine.yaml:3"
    assert loaded.origins["rollout.samples_per_prompt"] == "run.yaml:6"
    assert loaded.name == "mine"


def test_relative_paths_begin_at_the_last_file(project: Path) -> None:
    (project / "sub").mkdir()
    (project / "sub" / "mine.yaml").write_text("plugins: {modules: [toy_parts]}\n")
    (project / "toy_parts.py").rename(project / "sub" / "toy_parts.py")
    assert load_config(["run.yaml", "sub/mine.yaml"]).base_dir == project / "sub"


def test_another_name_drops_the_options_of_the_former(project: Path) -> None:
    (project / "base.yaml").write_text(
        (project / "run.yaml").read_text().replace("{name: toy}", "{name: toy, eps_clip: 0.3, kl_loss_coef: 0.1}")
    )
    (project / "mine.yaml").write_text("algorithm: {name: toy_critic, mode: soft}\n")
    loaded = load_config(["base.yaml", "mine.yaml"])
    assert loaded.config.algorithm.options == {"mode": "soft"}
    assert loaded.config.algorithm.kl_loss_coef == 0.1
    assert loaded.choices["algorithm"].options.eps_clip == 0.2
    assert loaded.notes == (
        "algorithm.eps_clip (base.yaml:8) belonged to 'toy' and was dropped: mine.yaml:1 chose 'toy_critic'",
    )


def test_the_same_name_keeps_options_and_so_do_flags_among_themselves(project: Path) -> None:
    (project / "mine.yaml").write_text("algorithm: {name: toy, mode: soft}\n")
    loaded = load_config(["run.yaml", "mine.yaml"], ["algorithm.eps_clip=0.3"])
    assert loaded.config.algorithm.options == {"mode": "soft", "eps_clip": 0.3}
    loaded = load_config(["run.yaml"], ["algorithm.eps_clip=0.3", "algorithm.name=toy_critic"])
    assert loaded.config.algorithm.options == {"eps_clip": 0.3}
    assert loaded.notes == ()


def test_an_option_is_never_dropped_where_no_name_was_given(project: Path) -> None:
    (project / "base.yaml").write_text((project / "run.yaml").read_text() + "advantage: {normalize_std: false}\n")
    loaded = load_config("base.yaml", ["advantage.name=toy_group"])
    assert loaded.choices["advantage"].options.normalize_std is False


def test_the_default_algorithm_is_known_by_name(project: Path) -> None:
    (project / "base.yaml").write_text((project / "run.yaml").read_text().replace("{name: toy}", "{eps_clip: 0.3}"))
    loaded = load_config("base.yaml", ["algorithm.name=toy"])
    assert loaded.config.algorithm.options == {}
    assert "belonged to 'grpo'" in loaded.notes[0]


def test_advantage_follows_the_algorithm_with_its_options(project: Path) -> None:
    loaded = load_config("run.yaml", ["algorithm.name=toy_critic"])
    choice = loaded.choices["advantage"]
    assert (choice.name, choice.options.lam, choice.options.gamma) == ("toy_gae", 0.9, 1.0)
    assert loaded.derived == {"advantage.name", "advantage.lam"}
    loaded = load_config("run.yaml", ["algorithm.name=toy_critic", "advantage.lam=0.5"])
    assert loaded.choices["advantage"].options.lam == 0.5
    assert loaded.derived == {"advantage.name"}
    # The algorithm's options are for its own estimator alone.
    loaded = load_config("run.yaml", ["algorithm.name=toy_critic", "advantage.name=toy_group"])
    assert loaded.choices["advantage"].options.normalize_std is True


def test_options_of_an_estimator_nobody_named_say_whose_they_are(project: Path) -> None:
    found = problems_of("run.yaml", sets=("advantage.normalise_std=false",))
    assert found == {
        "advantage.normalise_std": "unknown key; did you mean 'normalize_std'? "
        "(estimator 'toy_group' is the default of algorithm 'toy') (--set)"
    }


def test_block_flags_add_to_the_config(project: Path) -> None:
    loaded = load_config("run.yaml", ["plugins.block=[one]"], block=["grpo"])
    assert loaded.config.plugins.block == ("one", "grpo")
    assert loaded.origins["plugins.block"] == "--block"
    assert "grpo" not in loaded.registry.names("algorithm")


def test_other_flags_have_their_own_origin(project: Path) -> None:
    loaded = load_config("run.yaml", flags=[Flag("checkpoint.resume", "must", "--resume")])
    assert loaded.config.checkpoint.resume == "must"
    assert loaded.origins["checkpoint.resume"] == "--resume"


def test_eval_rewards_are_chosen_too(project: Path) -> None:
    loaded = load_config(
        "run.yaml", ["eval.datasets=[{name: a, path: train.jsonl, reward: {name: toy_function, function: 'm:f'}}]"]
    )
    assert loaded.choices["eval.datasets.0.reward"].options.function == "m:f"
    found = problems_of(
        "run.yaml", sets=("eval.datasets=[{name: a, path: train.jsonl, reward: {name: toy_function}}]",)
    )
    assert found["eval.datasets.0.reward.function"].startswith("required, but not given: `module:name`")


def test_problems_of_all_sections_come_together(project: Path) -> None:
    (project / "bad.yaml").write_text(
        "modle: {}\n"
        "data: {path: nowhere.jsonl}\n"
        "rollout:\n"
        "  batch_size: 0\n"
        "  temprature: 1\n"
        "algorithm: {name: toyy}\n"
        "optimizer: {lr: fast, betas: [0.9, 2]}\n"
        "trainer: {backend: megatorn}\n"
        "reward: {name: toy_function, functoin: 'a:b'}\n"
    )
    found = problems_of("run.yaml", "bad.yaml")
    assert found["modle"] == "unknown section; did you mean 'model'? (bad.yaml:1)"
    assert found["data.path"].startswith("'nowhere.jsonl' was given, expected a JSONL or parquet file, ")
    assert f"{project}/nowhere.jsonl does not exist" in found["data.path"]
    assert found["rollout.batch_size"] == "must be greater than 0, got 0 (bad.yaml:4)"
    assert found["rollout.temprature"] == "unknown key; did you mean 'temperature'? (bad.yaml:5)"
    assert "did you mean 'toy'" in found["algorithm.name"]
    assert found["optimizer.lr"] == "expected a number, got 'fast' (bad.yaml:7)"
    assert found["optimizer.betas.1"] == "must be at most 1, got 2 (bad.yaml:7)"
    assert found["trainer.backend"] == (
        "expected 'torch' or 'megatron', got 'megatorn'; did you mean 'megatron'? (bad.yaml:8)"
    )
    assert found["reward.functoin"] == (
        "unknown key; did you mean 'function'? (options of reward 'toy_function') (bad.yaml:9)"
    )
    assert found["reward.function"] == "required, but not given: `module:name` (bad.yaml:9)"
    assert len(found) == 10


def test_kernel_keys_are_suggested_beside_the_options(project: Path) -> None:
    found = problems_of("run.yaml", sets=("algorithm.kl_loss_coeff=1", "algorithm.epsclip=1"))
    assert "did you mean 'kl_loss_coef'" in found["algorithm.kl_loss_coeff"]
    assert "did you mean 'eps_clip'" in found["algorithm.epsclip"]


def test_a_key_of_another_section_is_pointed_to(project: Path) -> None:
    found = problems_of("run.yaml", sets=("rollout.global_batch_size=4",))
    assert found["rollout.global_batch_size"] == "unknown key here; did you mean trainer.global_batch_size? (--set)"


def test_truth_values_are_no_numbers(project: Path) -> None:
    found = problems_of("run.yaml", sets=("run.seed=true", "optimizer.betas=[0.9, false]", "algorithm.eps_clip=true"))
    assert set(found) == {"run.seed", "optimizer.betas.1", "algorithm.eps_clip"}
    assert all("expected a number, got true or false" in message for message in found.values())


def test_what_is_missing_is_missing_in_all_files(project: Path) -> None:
    (project / "a.yaml").write_text("model: {dtype: float32}\n")
    (project / "b.yaml").write_text("plugins: {modules: [toy_parts]}\nalgorithm: {name: toy}\n")
    found = problems_of("a.yaml", "b.yaml", sets=("model.recipe=toy_model", "transport.name=toy_near"))
    assert found["reward.name"].endswith("(a.yaml, b.yaml)")
    assert found["model.path"].endswith("(a.yaml:1)")
    assert set(found) == {"model.path", "data.path", "reward.name"}


def test_tilde_of_nobody_is_a_plain_name(project: Path) -> None:
    with pytest.raises(ConfigError, match="/~nobody-of-this-name/x does not exist"):
        load_config("run.yaml", ["data.path=~nobody-of-this-name/x", "run.seed=-1"])


def test_no_config_at_all() -> None:
    with pytest.raises(ConfigError, match="no run config given"):
        load_config([])


def test_null_section_is_an_empty_one(project: Path) -> None:
    with (project / "run.yaml").open("a") as file:
        file.write("critic:\n  # lr: 1\n")
    assert load_config("run.yaml", ["trainer=null"]).config.critic.lr is None
