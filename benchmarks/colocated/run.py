"""The colocated loop on one device: GRPO with SGLang and Megatron, weights handed over by `ipc`.

    python benchmarks/colocated/run.py [--shape small 4b] [--rollouts 10] [--launcher ray] [--out RESULTS.jsonl]
    python benchmarks/colocated/run.py --shape sums --model FOLDER     # of SmolLM2-135M-Instruct, say
    python benchmarks/colocated/run.py --shape 4b --layout apart tp2 dp2 pp2     # two GPUs
    python benchmarks/colocated/run.py --shape tiny --device cpu       # the mechanics, anywhere

Each shape is one ordinary `milepost train` on a run config made here; its figures are read from the run's
metrics.jsonl, medians over all rollouts but the first, which builds kernels and pins host memory.

    small   Qwen3, 0.2B, random weights: 32 prompts x 8 samples x 512 tokens. The reward is the share of even token ids,
            one half at first. It rises only if what was trained is what generates.
    4b      Qwen3-4B's dimensions, random weights: 16 x 8 x 2,048. For speed and memory.
    sums    a checkpoint of your own on sums of small numbers: 32 x 8 x 512. The held-out accuracy rises.
    tiny    two small layers, 4 x 4 x 32.

Layouts: `one` GPU; two of them as `tp2`, a tensor-parallel trainer with one engine on both; `dp2`, a data-parallel one
with two engines; `pp2`, PPO on two pipeline stages with two engines; `apart`, trainer and engine with one each, weights
sent by `broadcast` (or `--transport p2p`). On a CPU a rank stands for a GPU, and engines have one each. With `--verify`
every push is verified bit for bit, which costs it its speed. Layouts of two GPUs were run on a CPU alone so far.

The rollout's tokens per second stand beside those of SGLang's own offline engine given the same requests, arguments and
log-probs (`offline.py`, behind the run). Overhead is the share of an iteration that neither generates nor trains.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from milepost.rollout.sglang.server import server_environment

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
EVENTS = ("sleep", "offload", "wake", "push", "serve")

REWARDS = '''
"""Rewards of the benchmark."""

import re


def even(sample):
    ids = sample.tokens[sample.trainable]
    return float((ids % 2 == 0).mean()) if len(ids) else 0.0


def last_number(sample):
    found = re.findall(r"-?[0-9]+", sample.text)
    return float(bool(found) and found[-1] == sample.task.label)
'''


@dataclass(frozen=True, slots=True)
class Shape:
    """What is run."""

    model: Mapping[str, int] | None
    """Dimensions of a Qwen3 to make; None trains the checkpoint that was given."""
    prompts: int
    samples: int
    response: int
    micro_tokens: int
    lr: float
    reward: str = "even"
    heldout: int = 200
    """Held-out problems, one response each; 0 evaluates nothing."""


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "one": {},
    "tp2": {"trainer": {"tensor_parallel": 2}, "engine": {"gpus_per_engine": 2}},
    "dp2": {"engine": {"num_engines": 2}},
    "pp2": {"trainer": {"pipeline_parallel": 2}, "engine": {"num_engines": 2}, "algorithm": {"name": "ppo"}},
    "apart": {"engine": {"num_engines": 1}, "cluster": {"colocate": False}},
}
"""What a layout says beside the rest."""

SHAPES = {
    "small": Shape(
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        prompts=32,
        samples=8,
        response=512,
        micro_tokens=16384,
        lr=5e-4,
    ),
    "4b": Shape(
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        prompts=16,
        samples=8,
        response=2048,
        micro_tokens=8704,  # four samples
        lr=1e-6,
        heldout=0,
    ),
    "sums": Shape(None, prompts=32, samples=8, response=512, micro_tokens=16384, lr=1e-5, reward="last_number"),
    "tiny": Shape(
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
        prompts=4,
        samples=4,
        response=32,
        micro_tokens=1024,
        lr=1e-2,
    ),
}


def make_model(folder: Path, dimensions: Mapping[str, int], device: str) -> None:
    """Write a Qwen3 of these dimensions with random weights in bfloat16, and the quickstart's tokenizer."""
    import torch
    from milepost.weights.conversion import all_layers
    from milepost_qwen3.recipe import Qwen3Recipe
    from safetensors.torch import save_file

    sys.path.insert(0, str(EXAMPLES / "quickstart"))
    from make import make_tokenizer  # type: ignore[import-not-found]

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **dimensions,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    make_tokenizer().save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for rule in all_layers(Qwen3Recipe().megatron.describe(config).conversions, dimensions["num_hidden_layers"]):
        for part in rule.parts:
            weight = torch.ones(part.shape, dtype=torch.bfloat16, device=device)
            if len(part.shape) > 1:
                weight.normal_(std=0.02, generator=generator)
            tensors[part.name] = weight.cpu()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_problems(path: Path, count: int, seed: int) -> None:
    """Write sums that a small chat model solves now and then."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            terms = [rng.randint(2, 30) for _ in range(3)]
            text = f"What is {terms[0]} + {terms[1]} + {terms[2]}? Think, and end with the number alone."
            line = {"prompt": [{"role": "user", "content": text}], "label": str(sum(terms))}
            file.write(json.dumps(line) + "\n")


def engine_options(device: str, requests: int) -> dict[str, Any]:
    """Return options of SGLang with which it starts quickly and needs no kernels that are built elsewhere."""
    if device == "cpu":
        return {}
    return {
        "attention_backend": "triton",
        "grammar_backend": "none",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": requests,
        "mem_fraction_static": 0.8,
    }


def run_config(shape: Shape, model: Path, options: argparse.Namespace, launcher: str, layout: str) -> dict[str, Any]:
    """Return the run config of a shape; paths are relative to its folder."""
    on_gpu = options.device == "cuda"
    requests = min(256, shape.prompts * shape.samples)
    heldout = {"name": "heldout", "path": "heldout.jsonl", "temperature": 1.0}
    gpus = 1 if layout == "one" else 2
    ranks = 1 if layout == "apart" else gpus
    transport = {"name": "ipc", "bucket_mb": options.bucket_mb} if layout != "apart" else {"name": options.transport}
    config: dict[str, dict[str, Any]] = {
        "run": {"dir": "run", "device": options.device, **({} if on_gpu else {"threads": 1})},
        "model": {"path": str(model)},
        "data": {"path": "train.jsonl", "chat_template": True},
        "rollout": {
            "num_rollouts": options.rollouts,
            "batch_size": shape.prompts,
            "samples_per_prompt": shape.samples,
            "max_response_len": shape.response,
            "max_context_len": shape.response + 256,
        },
        "reward": {"name": "python", "function": f"rewards:{shape.reward}"},
        "algorithm": {"name": "grpo"},
        "optimizer": {"lr": shape.lr, "weight_decay": 0.0},
        "trainer": {
            "backend": "megatron",
            "steps_per_rollout": 1,
            "max_tokens_per_gpu": shape.micro_tokens,
            "offload": not options.keep_on_device,
        },
        "engine": {
            "backend": "sglang",
            "max_running_requests": requests,
            "options": engine_options(options.device, requests),
        },
        "transport": {**transport, "verify": options.verify},
        "cluster": {"launcher": launcher, **({"gpus_per_node": gpus} if on_gpu else {"cpu_ranks": ranks})},
        "checkpoint": {"save_last": False},
        "eval": {"interval": options.rollouts, "datasets": [heldout] if shape.heldout else []},
    }
    for section, values in LAYOUTS[layout].items():
        config[section] |= values
    if not on_gpu:
        config["engine"].pop("gpus_per_engine", None)
    return config


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def summarise(lines: list[dict[str, Any]], weights: int, shape: Shape) -> dict[str, Any]:
    """Return the figures of a run from its metrics; `weights` are the model's bytes."""
    rollouts: dict[int, dict[str, float]] = {}
    for line in lines:
        if line["kind"] in ("perf", "rollout"):
            rollouts.setdefault(line["index"], {}).update(line)

    def median(name: str) -> float:
        found = [metrics[name] for index, metrics in rollouts.items() if index > 0 and name in metrics]
        return statistics.median(found) if found else 0.0  # engines apart neither sleep nor wake

    events = {name: median(f"perf/{name}_time") for name in EVENTS}
    busy = [
        sum(found.get(f"perf/{name}_time", 0.0) for name in ("rollout", "critic_train", "actor_train"))
        / found["perf/iteration_time"]
        for index, found in rollouts.items()
        if index > 0 and "perf/iteration_time" in found
    ]
    accuracy = [line["eval/heldout/accuracy"] for line in lines if line["kind"] == "eval"]
    return {
        "tokens_per_second": median("perf/tokens_per_gpu_per_second"),
        "rollout_s": median("perf/rollout_time"),
        "train_s": median("perf/actor_train_time"),
        "iteration_s": median("perf/iteration_time"),
        **{f"{name}_s": value for name, value in events.items()},
        "push_gb_per_second": weights / events["push"] / 1e9,
        "overhead": 1 - statistics.median(busy),
        "reward": [found["rollout/raw_reward"] for _, found in sorted(rollouts.items())],
        "heldout": accuracy,
        "heldout_standard_error": math.sqrt(0.25 / shape.heldout) if shape.heldout else None,  # at most
        "memory_gb": {name: value for name, value in rollouts[max(rollouts)].items() if "memory" in name},
    }


def measure(name: str, launcher: str, layout: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a shape, then SGLang alone on its requests."""
    shape = SHAPES[name]
    folder.mkdir()
    model = Path(options.model).resolve() if shape.model is None else folder / "model"
    if shape.model is not None:
        make_model(model, shape.model, options.device)
    write_problems(folder / "train.jsonl", 4096, seed=1)
    write_problems(folder / "heldout.jsonl", shape.heldout, seed=2)
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(run_config(shape, model, options, launcher, layout)), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "milepost", "train", str(config), "--no-progress"], check=True)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    result: dict[str, Any] = {"shape": name, "launcher": launcher, "layout": layout}
    result |= summarise(read(folder / "run"), weights, shape)
    if options.offline and layout == "one":
        command = [sys.executable, str(HERE / "offline.py"), str(config)]
        environment = server_environment(options.device)
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        alone = json.loads(answer.stdout.splitlines()[-1])
        result |= {"offline": alone, "of_offline": result["tokens_per_second"] / alone["tokens_per_second"]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["small", "4b"], choices=sorted(SHAPES))
    parser.add_argument("--launcher", nargs="+", default=["ray"], choices=("inline", "ray"))
    parser.add_argument("--layout", nargs="+", default=["one"], choices=sorted(LAYOUTS))
    parser.add_argument("--transport", default="broadcast", choices=("broadcast", "p2p"), help="of the layout `apart`")
    parser.add_argument("--verify", action="store_true", help="transport.verify: true")
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--model", help="checkpoint of the shape `sums`")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--bucket-mb", type=int, default=4096, help="option of the transport")
    parser.add_argument("--keep-on-device", action="store_true", help="trainer.offload: false")
    parser.add_argument("--no-offline", dest="offline", action="store_false", help="leave SGLang alone out")
    parser.add_argument(
        "--work", type=Path, help="folder to work in and leave the run folders in; else a temporary one"
    )
    parser.add_argument("--out", type=Path, help="append a JSON line for each run")
    options = parser.parse_args()
    if "sums" in options.shape and not options.model:
        parser.error("the shape `sums` needs --model FOLDER")
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for name, launcher, layout in product(options.shape, options.launcher, options.layout):
            result = measure(name, launcher, layout, options, work / f"{name}-{launcher}-{layout}")
            print(json.dumps(result), flush=True)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
