"""Bad run configs, made from the real examples: each must get one clear message, exit code 2 and no traceback.

    python scripts/robustness/configs.py                      # 200 configs, 10 of them in processes of their own
    python scripts/robustness/configs.py --count 0            # every mutation there is

What is wrong is generated from the run config's own schema and from the options of the installed plugins: a key that is
misspelt or unknown, a value of another type, out of range, not finite or huge, a name or file that does not exist, a
required value left out, at every level; and what YAML itself can have wrong. A seed picks a spread over all kinds.

A config passes if `milepost plan` exits with 2, writes nothing to stdout and exactly one problem to stderr, whose path
is the mutated one (with the file it stands in), and which offers the right name where one was misspelt. Exits 1 if one
does not.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from milepost import registry
from milepost.cli import cli
from milepost.registry import Registry
from mutations import Mutation, broken_files, mutate

ROOT = Path(__file__).resolve().parents[2]
NAME = "mutated.yaml"

EXAMPLES = (("quickstart",), ("quickstart", "ppo"), ("quickstart", "gspo"), ("quickstart", "rloo"))
"""Compositions of examples/*.yaml that are mutated."""

MODEL_CONFIG = """\
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
"max_position_embeddings": 256, "tie_word_embeddings": true, "rms_norm_eps": 1e-6}
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one bad config."""

    mutation: Mutation
    complaints: tuple[str, ...]
    output: str


def prepare(folder: Path) -> None:
    """Make a project: the examples, and beside them the files they name (a checkpoint's description is enough)."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("quickstart", "__pycache__"))
    (folder / "quickstart" / "model").mkdir(parents=True)
    (folder / "quickstart" / "model" / "config.json").write_text(MODEL_CONFIG)
    for name in ("train", "heldout"):
        (folder / "quickstart" / f"{name}.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n' * 600)


def compose(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the document of some examples laid over each other."""
    result: dict[str, Any] = {}
    for name in names:
        for section, values in yaml.safe_load((folder / "examples" / f"{name}.yaml").read_text()).items():
            result[section] = {**result.get(section, {}), **values}
    return result


def all_mutations(folder: Path) -> list[Mutation]:
    """Return every mutation of every example, each once."""
    known = Registry.load()
    found: dict[tuple[str, str, str], Mutation] = {}
    for names in EXAMPLES:
        document = compose(folder, names)
        for mutation in [*mutate(document, known), *broken_files(yaml.safe_dump(document, sort_keys=False))]:
            found.setdefault((mutation.kind, mutation.path, mutation.what), mutation)
    return list(found.values())


def choose(mutations: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """Return `count` mutations spread evenly over the kinds (0: all)."""
    draw = random.Random(seed)
    kinds: dict[str, list[Mutation]] = {}
    for mutation in draw.sample(mutations, len(mutations)):
        kinds.setdefault(mutation.kind, []).append(mutation)
    chosen: list[Mutation] = []
    while any(kinds.values()) and (count == 0 or len(chosen) < count):
        chosen += [waiting.pop() for waiting in kinds.values() if waiting]
    return chosen[: count or None]


def place(folder: Path, mutation: Mutation) -> Path:
    """Put a bad config beside the examples; return its path."""
    path = folder / "examples" / NAME
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if mutation.content is None:
        path.mkdir()
    else:
        path.write_bytes(mutation.content)
    return path


def judge(mutation: Mutation, code: object, stdout: str, stderr: str, error: BaseException | None) -> Verdict:
    """Say what is wrong with an answer to a bad config."""
    complaints = []
    if error is not None and not isinstance(error, SystemExit):
        complaints.append(f"it raised {type(error).__name__}")
    if code != 2:
        complaints.append(f"exit code {code}")
    if stdout:
        complaints.append("something on stdout")
    if re.search(r"Traceback|pydantic|<class |object at 0x", stderr):
        complaints.append("internals are shown")
    lines = stderr.splitlines()
    if not lines or lines[0] != "error: 1 problem in the run config":
        complaints.append(f"not one problem ({lines[0] if lines else 'no message'})")
    elif not lines[1].startswith(f"  {mutation.path}: " if mutation.path else "  "):
        complaints.append(f"the message does not begin with {mutation.path}")
    elif NAME not in stderr:
        complaints.append("the file is not named")
    if mutation.offers is not None and not re.search(rf"did you mean .*\b{re.escape(mutation.offers)}\b", stderr):
        complaints.append(f"{mutation.offers} is not offered")
    if any(len(line) > 1000 for line in lines):
        complaints.append("a line of more than 1000 characters")
    return Verdict(mutation, tuple(complaints), stderr)


def check_in_process(folder: Path, mutation: Mutation) -> Verdict:
    """Plan with a bad config in this process."""
    path = place(folder, mutation)
    try:
        result = CliRunner().invoke(cli, ["plan", str(path)], prog_name="milepost")
    finally:
        registry.use(None)
    return judge(mutation, result.exit_code, result.stdout, result.stderr, result.exception)


def check_in_subprocess(folder: Path, mutation: Mutation) -> Verdict:
    """Train with a bad config in a process of its own."""
    path = place(folder, mutation)
    command = [sys.executable, "-m", "milepost", "train", str(path), "--run-dir", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    verdict = judge(mutation, done.returncode, done.stdout, done.stderr, None)
    if (folder / "run").exists():
        shutil.rmtree(folder / "run")
        return Verdict(mutation, (*verdict.complaints, "a run folder was made"), verdict.output)
    return verdict


def main() -> None:
    """Check mutated configs; print counts and every miss."""
    parser = argparse.ArgumentParser(description="Bad run configs: one clear message each, exit code 2, no traceback.")
    parser.add_argument("--count", type=int, default=200, help="configs to check; 0 for all (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    parser.add_argument("--subprocesses", type=int, default=10, help="of these in processes of their own (default 10)")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        possible = all_mutations(folder)
        chosen = choose(possible, arguments.count, arguments.seed)
        verdicts = [check_in_process(folder, mutation) for mutation in chosen]
        alone = random.Random(arguments.seed).sample(chosen, min(arguments.subprocesses, len(chosen)))
        verdicts += [check_in_subprocess(folder, mutation) for mutation in alone]
    misses = [verdict for verdict in verdicts if verdict.complaints]
    for verdict in misses:
        mutation = verdict.mutation
        print(f"MISS {mutation.kind}: {mutation.path or 'the file'}: {mutation.what}: {'; '.join(verdict.complaints)}")
        print("    " + "\n    ".join(line[:300] for line in verdict.output.splitlines()[:8]))
    counts = Counter(mutation.kind for mutation in chosen)
    bad = Counter(verdict.mutation.kind for verdict in misses)
    print(f"{'kind':16}{'checked':>8}{'missed':>8}")
    for kind in sorted(counts):
        print(f"{kind:16}{counts[kind]:>8}{bad[kind]:>8}")
    print(
        f"{len(chosen)} of {len(possible)} mutations in this process, {len(alone)} in a process of its own too, "
        f"in {time.perf_counter() - began:.0f} s: {len(misses)} misses"
    )
    sys.exit(1 if misses else 0)


if __name__ == "__main__":
    main()
