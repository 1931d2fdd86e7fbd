"""milepost beside TRL on the CPU: samples per second of both, and their ratio.

    python run.py --trl-python VENV/bin/python [--shape small] [--alternations 7]

Each side is a process of its own that trains the same model on the same prompts with GRPO: generation with sampling,
a reward, log-probs, loss, gradient, optimizer step, metrics. They take turns, so that a busy machine is busy for both,
and only the time of one side's own turns is counted. Prints samples per second by wall and by processor time (of each
side's main process) and the ratios of each alternation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from turns import Turn

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    prompts: int
    group: int
    new_tokens: int
    steps: tuple[int, int]
    """Steps in a turn of TRL and of milepost."""


SHAPES = {
    "small": Shape(hidden=64, layers=2, prompts=4, group=4, new_tokens=32, steps=(10, 25)),
    "2.5m": Shape(hidden=256, layers=4, prompts=8, group=8, new_tokens=64, steps=(1, 2)),
}


class Contestant:
    """One side's process."""

    def __init__(self, name: str, command: Sequence[str], threads: int, log: Path) -> None:
        self.name, self._log = name, log
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )

    def wait(self) -> dict[str, float]:
        """Return what the process says next. Raises RuntimeError with the end of its output if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
            raise RuntimeError(f"{self.name} ended with exit code {code}; the end of what it printed:\n{tail}")
        message: dict[str, float] = json.loads(line)
        return message

    def turn(self, steps: int) -> Turn:
        """Let it run this many steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"steps": steps}) + "\n")
        self._process.stdin.flush()
        return Turn(**self.wait())  # type: ignore[arg-type]

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def versions(python: str, names: Sequence[str]) -> str:
    """Return the versions of packages in an environment."""
    code = (
        f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {list(names)!r}), sep=', ')"
    )
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def compare(name: str, given: argparse.Namespace) -> None:
    """Run one shape and print its table."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        size = [f"--hidden={shape.hidden}", f"--layers={shape.layers}"]
        made = subprocess.run(
            [sys.executable, str(HERE / "task.py"), folder, *size], check=True, stdout=subprocess.PIPE, text=True
        )
        batch = shape.prompts * shape.group
        print(
            f"\n{name}: {int(made.stdout.split()[-1]):,} parameters, {shape.prompts} prompts x {shape.group} samples, "
            f"{shape.new_tokens} new tokens, {given.threads} thread(s), reward {given.placement}",
            flush=True,
        )
        work = [f"--prompts={shape.prompts}", f"--group={shape.group}", f"--new-tokens={shape.new_tokens}"]
        work.append(f"--threads={given.threads}")
        commands = {
            "trl": [given.trl_python, str(HERE / "trl_side.py"), folder, *work],
            "milepost": [
                sys.executable,
                str(HERE / "milepost_side.py"),
                folder,
                *work,
                f"--placement={given.placement}",
            ],
        }
        sides = []
        for side, command in commands.items():
            log = Path(folder) / f"{side}.log"
            sides.append(Contestant(side, command, given.threads, log))
            closing.callback(sides[-1].stop)
        for side, steps in zip(sides, shape.steps, strict=True):
            side.wait()
            side.turn(max(2, steps // 2))  # caches, memory, and milepost's check of the first rollout
        report(
            [
                [side.turn(steps) for side, steps in zip(sides, shape.steps, strict=True)]
                for _ in range(given.alternations)
            ]
        )
    print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; samples of {batch} a step")


def report(turns: Sequence[Sequence[Turn]]) -> None:
    """Print samples per second of both and the ratios."""

    def per_second(turn: Turn, clock: Callable[[Turn], float]) -> float:
        return turn.samples / clock(turn)

    clocks: dict[str, Callable[[Turn], float]] = {"wall": lambda t: t.wall, "cpu": lambda t: t.cpu}
    print(
        "             trl     milepost  ratio |      trl     milepost  ratio   (samples per second, wall | processor)"
    )
    ratios: dict[str, list[float]] = {clock: [] for clock in clocks}
    for number, (trl, milepost) in enumerate(turns):
        cells = []
        for clock, read in clocks.items():
            a, b = per_second(trl, read), per_second(milepost, read)
            ratios[clock].append(b / a)
            cells.append(f"{a:9.1f} {b:12.1f} {b / a:6.2f}")
        print(f"  {number + 1:3d} " + " | ".join(cells), flush=True)
    lengths = [sum(t.tokens for t in side) / sum(t.samples for t in side) for side in zip(*turns, strict=True)]
    tokens = median((m.tokens / m.wall) / (t.tokens / t.wall) for t, m in turns)
    medians = ", ".join(f"{clock} {median(values):.2f}" for clock, values in ratios.items())
    print(f"  median ratio: {medians}; of tokens per second {tokens:.2f}")
    print(f"  mean response length: trl {lengths[0]:.1f}, milepost {lengths[1]:.1f} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trl-python", required=True, help="Python of the environment that has TRL")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--alternations", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--placement", choices=["process", "inline"], default="process", help="of milepost's reward")
    given = parser.parse_args()
    print(f"Python {platform.python_version()}")
    print("trl side:      " + versions(given.trl_python, ["trl", "torch", "transformers", "accelerate", "datasets"]))
    print("milepost side: " + versions(sys.executable, ["milepost", "torch", "transformers"]))
    for name in SHAPES if given.shape == "all" else [given.shape]:
        compare(name, given)


if __name__ == "__main__":
    main()
