"""What runs leave in their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, of one kind or all; none before there is a file."""
    path = run_dir / "metrics.jsonl"
    data = path.read_bytes() if path.exists() else b""
    records = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    return [record for record in records if kind is None or record["kind"] == kind]


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl without wall-clock times."""
    return [{k: v for k, v in line.items() if not k.startswith("perf/") and k != "time"} for line in lines(run_dir)]


def logged(run_dir: Path, kind: str, index: int) -> bool:
    """Whether metrics.jsonl has the line of this kind and index."""
    return any(line["index"] == index for line in lines(run_dir, kind))
