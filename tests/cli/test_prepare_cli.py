"""`milepost prepare`: fetching from a Hub that this test serves itself, and trying the reward."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result
from milepost.cli import cli

Write = Callable[..., Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a download needs: the list of a repository's files, and the files."""

    repositories: ClassVar[dict[str, Path]] = {}
    served: ClassVar[list[str]] = []
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        for name, folder in self.repositories.items():
            kind, _, repository = name.partition(":")
            prefix = "" if kind == "models" else f"/{kind}"
            listed = [file for file in folder.rglob("*") if file.is_file()]
            if path.startswith(f"/api/{kind}/{repository}/tree/"):
                tree = [
                    {"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size, "oid": oid(f)}
                    for f in listed
                ]
                self.reply(json.dumps(tree).encode(), body)
                return
            if path.startswith(f"/api/{kind}/{repository}/"):
                files = [{"rfilename": str(f.relative_to(folder))} for f in listed]
                self.reply(json.dumps({"id": repository, "sha": COMMIT, "siblings": files}).encode(), body)
                return
            for revision in (COMMIT, "main"):
                start = f"{prefix}/{repository}/resolve/{revision}/"
                if path.startswith(start) and (folder / path.removeprefix(start)).is_file():
                    if body:
                        self.served.append(path.removeprefix(start))
                    self.reply((folder / path.removeprefix(start)).read_bytes(), body)
                    return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def reply(self, content: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(policy: Path, tmp_path: Path) -> Iterator[str]:
    data = tmp_path / "hub-data"
    data.mkdir()
    (data / "train.jsonl").write_bytes((policy / "train.jsonl").read_bytes())
    (data / "train.bin").write_text("not a file of rows")
    Hub.repositories = {"models:toy/model": (policy / "model").resolve(), "datasets:toy/sums": data}
    Hub.served = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def command(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    home = {"HF_HOME": str(path.parent / "hf"), "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-m", "milepost", *arguments],
        capture_output=True,
        text=True,
        cwd=path.parent,
        env={**os.environ, "HF_HUB_OFFLINE": "0", **home, **environment},
        check=False,
    )


def test_names_are_fetched_once_and_then_found(write_config: Write, hub: str) -> None:
    path = write_config(model={"path": "toy/model"}, data={"path": "toy/sums@[:100]"}, eval={"datasets": []})
    done = command(path, "plan", str(path))
    assert done.returncode == 2
    assert "if it is a name on the Hub, fetch it with: milepost prepare RUN.yaml" in done.stderr
    done = command(path, "prepare", str(path), HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    assert "model toy/model: " in done.stdout
    assert "dataset toy/sums: " in done.stdout
    assert {"config.json", "model.safetensors", "tokenizer.json", "train.jsonl"} <= set(Hub.served)
    assert "train.bin" not in Hub.served
    assert done.stdout.count("reward ") == 8
    served = len(Hub.served)
    assert command(path, "prepare", str(path), "--no-score", HF_ENDPOINT=hub).returncode == 0
    assert len(Hub.served) == served
    # what was fetched serves without a network, under its name
    done = command(path, "plan", str(path), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert f"snapshots/{COMMIT}@[:100]" in done.stdout


def test_without_a_network_the_error_is_clear(write_config: Write) -> None:
    path = write_config(model={"path": "toy/model"}, eval={"datasets": []})
    done = command(path, "prepare", str(path), HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "model.path: 'toy/model' is neither a path here nor could it be fetched from the Hub" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_not_there(write_config: Write, hub: str) -> None:
    path = write_config(data={"path": "toy/absent"}, eval={"datasets": []})
    done = command(path, "prepare", str(path), HF_ENDPOINT=hub)
    assert done.returncode == 2
    assert "data.path: 'toy/absent' is neither a path here nor could it be fetched" in done.stderr
    assert "Traceback" not in done.stderr


def prepare(path: Path, *arguments: str) -> Result:
    done = CliRunner().invoke(cli, ["prepare", str(path), *arguments])
    assert done.exit_code == 0, done.output
    return done


def test_the_reward_is_tried_on_responses_and_labels(write_config: Write, workspace: Path) -> None:
    (workspace / "score.py").write_text(
        "def score(sample):\n"
        "    right = sample.text == '\\\\boxed{' + sample.task.label + '}'\n"
        "    return 1.0 if right else 0.01 * len(set(sample.text))\n"
    )
    done = prepare(write_config(eval={"datasets": []}))
    assert done.stdout.count("reward ") == 8
    assert "the labels themselves, written as \\boxed{LABEL}, score 1" in done.stdout


def test_a_reward_that_says_the_same_to_all_is_suspicious(write_config: Write, workspace: Path) -> None:
    (workspace / "score.py").write_text("def score(sample):\n    return 0.0\n")
    done = prepare(write_config(eval={"datasets": []}))
    assert "warning: all 8 responses scored 0, and so did the labels themselves" in done.stderr
    assert "data.label" in done.stderr


def test_a_policy_that_never_succeeds_where_labels_do_is_told_apart(write_config: Write, workspace: Path) -> None:
    (workspace / "score.py").write_text("def score(sample):\n    return float(sample.text == sample.task.label)\n")
    done = prepare(write_config(eval={"datasets": []}))
    assert "warning: all 8 responses of the policy scored 0, though the labels themselves do not" in done.stderr
    assert "written as LABEL, score 1 on average" in done.stdout
