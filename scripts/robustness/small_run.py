"""What the robustness commands share: a tiny policy with problems, a small run of it, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]

REWARD = '''
def score(sample):
    """The share of digits in the response: every response has some, so there is always a spread to learn from."""
    return sum(letter.isdigit() for letter in sample.text) / max(1, len(sample.text))
'''

CONFIG: dict[str, Any] = {
    "run": {"dir": "run", "threads": 1, "device": "cpu"},
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "chat_template": True},
    "rollout": {"num_rollouts": 4, "batch_size": 4, "samples_per_prompt": 4, "max_response_len": 16},
    "reward": {"name": "python", "function": "score:score"},
    "optimizer": {"lr": 1e-3},
}


def make_project(folder: Path, model: Path | None = None) -> None:
    """Put a tiny policy, problems and a reward into a folder; `model` is an earlier one's policy, made if not given.

    `model` has `model/`, `train.jsonl` and `heldout.jsonl`, as examples/quickstart/make.py writes them.
    """
    if model is None:
        model = folder / "policy"
        maker = ROOT / "examples" / "quickstart" / "make.py"
        settings = ["--hidden", "32", "--layers", "2", "--steps", "40", "--threads", "1"]
        subprocess.run([sys.executable, str(maker), "--out", str(model), *settings], check=True, capture_output=True)
    (folder / "model").symlink_to(model / "model")
    (folder / "train.jsonl").symlink_to(model / "train.jsonl")
    held_out = (model / "heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "heldout.jsonl").write_text("".join(held_out[:20]))
    (folder / "score.py").write_text(REWARD)


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write the small run's config, keys of some sections changed; return its path."""
    config = {name: {**CONFIG.get(name, {}), **sections.get(name, {})} for name in {**CONFIG, **sections}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def start(config: Path, run_dir: Path, *flags: str) -> subprocess.Popen[str]:
    """Start `milepost train`, its output going to a file beside the run folder."""
    command = [sys.executable, "-m", "milepost", "train", str(config), "--no-progress", "--run-dir", str(run_dir)]
    with output_of(run_dir).open("a") as output:
        return subprocess.Popen(
            [*command, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=config.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def output_of(run_dir: Path) -> Path:
    """Return the file that the processes of a run folder print to."""
    return run_dir.with_name(f"{run_dir.name}.out")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what differs from run to run: performance and wall-clock times."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith("perf/") and k != "time"} for record in records]
