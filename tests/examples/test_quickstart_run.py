"""The quickstart's run config trains, from the command line, on a model that was hardly made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_run_config_trains_and_ends_with_its_line(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    made, run = tmp_path / "made", tmp_path / "run"
    small = ["--hidden", "16", "--layers", "1", "--steps", "3", "--batch", "4", "--threads", "1"]
    maker = [sys.executable, str(ROOT / "examples/quickstart/make.py"), "--out", str(made), *small]
    subprocess.run(maker, check=True, env=environment, capture_output=True)

    sets = {
        "model.path": made / "model",
        "data.path": made / "train.jsonl",
        "eval.datasets": f"[{{name: heldout, path: {made / 'heldout.jsonl'}, limit: 40}}]",
        "rollout.num_rollouts": 2,
        "rollout.batch_size": 4,
    }
    flags = [flag for key, value in sets.items() for flag in ("--set", f"{key}={value}")]
    milepost = [sys.executable, "-c", "from milepost.cli import main; main()"]
    command = [*milepost, "train", str(ROOT / "examples/quickstart.yaml"), "--run-dir", str(run), "--quiet", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(rf"heldout accuracy 0\.\d+ -> 0\.\d+; 2 rollouts; run folder {re.escape(str(run))}", last)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_rollouts"] == 2
    kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("rollout") == kinds.count("step") == kinds.count("eval") == 2
