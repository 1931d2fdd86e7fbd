"""A run as a job: what is packed, what is said when it cannot be sent, and one job on a real cluster."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import Command
from milepost.cluster import submission
from milepost.cluster.submission import JobClient, absolute_paths, entrypoint, pack
from milepost.config.loading import load_config
from milepost.errors import ClusterError
from ray_cluster import ray_environment, started
from runs import lines

pytestmark = pytest.mark.takes(35)

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    with started(dashboard=True) as address:
        yield f"http://{address}"


def written(folder: Path, **texts: str) -> Path:
    """Write files by their names in the folder."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_run_configs_and_modules_are_packed_and_nothing_else(tmp_path: Path) -> None:
    here = written(
        tmp_path / "here",
        **{
            "run.yaml": "last",
            "score.py": "a = 1",
            "tools/__init__.py": "",
            "tools/words.txt": "one",
            "tools/__pycache__/x.pyc": "no",
            "tools/.secret": "no",
            ".hidden.py": "no",
            "train.jsonl": "no",
            "runs/a/metrics.jsonl": "no",
            "notes/draft.py": "no: not a package",
        },
    )
    there = written(tmp_path / "there", **{"run.yaml": "first", "base.yaml": "second", "other.py": "no"})
    out = tmp_path / "out"
    out.mkdir()
    content = pack([there / "run.yaml", there / "base.yaml", here / "run.yaml"], out)
    assert content.configs == ("config-0/run.yaml", "base.yaml", "run.yaml")
    assert content.modules == ("score.py", "tools/")
    assert [(out / name).read_text() for name in content.configs] == ["first", "second", "last"]
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {*content.configs, "score.py", "tools/__init__.py", "tools/words.txt"}


def test_modules_that_are_too_large_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = written(
        tmp_path, **{"run.yaml": "", "small.py": "1", "big/__init__.py": "", "big/data.bin": "x" * 2 * 2**20}
    )
    monkeypatch.setattr(submission, "MAX_BYTES", 2**20)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ClusterError, match=r"are 2 MiB, the largest big with 2 MiB; Ray takes 1 MiB"):
        pack([here / "run.yaml"], out)
    assert not list(out.iterdir())


def test_relative_paths_become_absolute_and_the_command_says_so(write_config: Write, workspace: Path) -> None:
    (workspace / "more.jsonl").write_text((workspace / "train.jsonl").read_text())
    mixture = [{"path": "more.jsonl", "weight": 2}, "train.jsonl@[0:4]"]
    path = write_config(data={"path": mixture}, reference={"path": str(workspace / "model")})
    loaded = load_config(path)
    moved = absolute_paths(loaded)
    assert moved == {
        "model.path": f"{workspace}/model",  # reference.path was absolute already
        "data.path": [{"path": f"{workspace}/more.jsonl", "weight": 2}, f"{workspace}/train.jsonl@[0:4]"],
        "eval.datasets.0.path": f"{workspace}/heldout.jsonl",
    }
    command = entrypoint("python3", ["run.yaml"], ["run.seed=3"], {"model.path": "/a b/model"}, ["--quiet"])
    assert command == ("python3 -m milepost train run.yaml --set run.seed=3 --set 'model.path=\"/a b/model\"' --quiet")
    # The same run, wherever its config lies.
    elsewhere = workspace / "elsewhere" / "run.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(path.read_text())
    again = load_config(elsewhere, [f"{key}={json.dumps(value)}" for key, value in moved.items()])
    assert absolute_paths(again) == {}
    assert again.config.eval.datasets[0].name == "heldout"


def test_an_address_that_takes_no_jobs_is_one_message() -> None:
    with pytest.raises(ClusterError, match=r"'10.0.0.1:6379' was given as address; expected .* http://HEAD:8265"):
        JobClient("10.0.0.1:6379")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"http://127.0.0.1:{port} does not answer; expected the dashboard"):
            JobClient(f"http://127.0.0.1:{port}")


def test_a_cluster_that_is_just_starting_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["No available agent to submit job, please try again later.", "No available agent", "No space left"]
    asked: list[str] = []

    def submit_job(entrypoint: str, **_: object) -> str:
        asked.append(entrypoint)
        if answers:
            raise RuntimeError(f"Request failed with status code 500: {answers.pop(0)}")
        return "job-7"

    client = JobClient.__new__(JobClient)
    client.address, client._client = "http://10.0.0.1:8265", SimpleNamespace(submit_job=submit_job)
    monkeypatch.setattr(submission, "POLL_SECONDS", 0)
    with pytest.raises(ClusterError, match=r"10.0.0.1:8265 refused: .*No space left"):
        client.submit("train", tmp_path)
    assert asked == ["train"] * 3
    assert client.submit("train", tmp_path) == "job-7"
    answers.append("No available agent to submit job")
    monkeypatch.setattr(submission, "AGENT_SECONDS", -1)
    with pytest.raises(ClusterError, match=r"has no agent that takes jobs; .* --dashboard-agent-listen-port=PORT"):
        client.submit("train", tmp_path)


def test_missing_parts_of_ray_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "find_spec", lambda name: None if name == "aiohttp" else SimpleNamespace())
    with pytest.raises(ClusterError, match=r"needs aiohttp, not installed here; pip install 'ray\[default\]'"):
        JobClient("http://127.0.0.1:8265")


def test_a_run_is_planned_before_anything_is_sent(write_config: Write, workspace: Path) -> None:
    path = write_config()
    nobody = ("--address", "http://127.0.0.1:1")
    inline = Command("submit", path, *nobody, cwd=workspace)
    wrong = Command("submit", path, *nobody, "--set", "optimizer.lr=much", cwd=workspace)
    code, output = inline.finish()
    assert (code, "cluster.launcher: 'inline' trains in the job's own process alone" in output) == (2, True), output
    code, output = wrong.finish()
    assert code == 2
    assert "optimizer.lr" in output
    assert "does not answer" not in output


def test_a_job_trains_and_its_exit_code_is_the_commands(write_config: Write, workspace: Path, dashboard: str) -> None:
    path = write_config(
        cluster={"launcher": "ray"}, rollout={"num_rollouts": 1, "batch_size": 2}, eval={"datasets": []}
    )
    sleeper = workspace / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    # RAY_ADDRESS names another cluster: the flag counts.
    environment = {**ray_environment("http://127.0.0.1:1"), "RAY_AUTH_MODE": "token"}
    submit = ("submit", path, "--address", dashboard)

    whole = Command(
        *submit, "--python", sys.executable, "--submission-id", "one", cwd=workspace, environment=environment
    )
    left = Command(*submit, "--python", sleeper, "--submission-id", "two", cwd=workspace, environment=environment)
    failing = Command(*submit, "--python", "false", "--json", cwd=workspace, environment=environment)
    secret = "not-the-token-of-this-cluster-000"
    refused = Command(*submit, cwd=workspace, environment=environment | {"RAY_AUTH_TOKEN": secret})

    code, output = refused.finish()
    assert code == 2, output
    assert "asks for a token, and the one that is set is not it" in output
    assert secret not in output

    left.wait_until(lambda: "Running entrypoint for job two" in left.stdout)
    left.send_signal(signal.SIGINT)
    code, output = left.finish()
    assert code == 130, output
    assert f"the job two goes on; follow it with: ray job logs --address {dashboard} --follow two" in output
    taken = Command(*submit, "--submission-id", "two", cwd=workspace, environment=environment)
    code, output = taken.finish()
    assert (code, "has a job 'two' already; choose another" in output) == (2, True), output

    code, output = failing.finish()
    assert code == 1, output
    ended = json.loads(failing.stdout)
    assert (ended["status"], ended["exit_code"]) == ("FAILED", 1)

    code, output = whole.finish()
    assert code == 0, output
    assert "model.path, data.path: files of this machine, expected at the same paths there" in whole.stderr
    assert "step 0: {'train/entropy'" in whole.stdout
    assert "ray: cluster at" in whole.stdout  # joined, not started
    assert [line["index"] for line in lines(workspace / "run", "step")] == [0]
