"""One optimizer step of the Megatron trainer on one GPU: time, model FLOPs utilisation, memory, and what milepost adds.

    python benchmarks/megatron_step.py [--recompute none selective full] [--micro-tokens 8192 4096] [--out RESULT.json]
    python benchmarks/megatron_step.py --recompute none --micro-tokens 8192 --kernels all none all-head all-norms

Qwen3-4B's shape with random weights in bfloat16, 16,384 packed tokens in sequences of 4,096, GRPO's loss with entropy,
one optimizer step; median of 20 steps after 5 of warm-up. Utilisation counts forward and backward once, without
recomputation, over 990 TFLOP/s. The bare loop is the same model, rows and optimizer with the sum of log-probs as loss,
without milepost's loss, metrics and step. Prints a table, a line of JSON for each row, and in the last line all of it.

`--kernels` says which of `milepost.training.kernels` are used, one row for each: `all`, `none`, names with `+` between
them, or `all-NAME` for all but one. `@cudnn` behind it makes samples of one length attend through cuDNN where that
serves, `@ragged` makes every other sequence shorter and longer by a quarter. All rows have the same model, and the
learning rate is 0, so that loss and gradient norm of a row say whether its kernels compute the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from milepost.components import AlgorithmTraits, Component, NoOptions
from milepost.config.plan import Choice, Plan
from milepost.config.schema import RunConfig
from milepost.functional.aggregation import token_weights
from milepost.training.inputs import PolicyInputs, TokenLoss
from milepost.training.kernels import only
from milepost.training.megatron import parallel
from milepost.training.megatron.trainer import MegatronTrainer
from milepost.training.schedule import StepSchedule, make_schedule
from milepost.training.trainer import Batch, Part
from milepost.weights.layouts import dense_layout, dense_train_flops
from milepost_qwen3.recipe import Qwen3Recipe
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

PEAK = 990e12
CONFIGS = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
}
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


class Clip:
    """The PPO clip."""

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return TokenLoss(-torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages))


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write random weights in bfloat16, as the recipe's own rules name them."""
    from milepost.weights.conversion import all_layers

    description = Qwen3Recipe().megatron.describe(config)
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {}
    for rule in all_layers(description.conversions, config["num_hidden_layers"]):
        for part in rule.parts:
            norm = len(part.shape) == 1
            weight = (
                torch.ones(part.shape) if norm else torch.randn(part.shape, device="cuda", generator=generator) * 0.02
            )
            tensors[part.name] = weight.bfloat16().cpu()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def make_plan(path: Path, config: dict[str, Any], recompute: str, sequences: int) -> Plan:
    component: Component[Any] = Component("none", NoOptions, AlgorithmTraits(), lambda _: None, "Nothing.")
    choice = Choice(component, NoOptions(), "none")
    given = {
        "model": {"path": str(path)},
        "data": {"path": "none.jsonl"},
        "reward": {"name": "none"},
        "trainer": {"backend": "megatron", "recompute": recompute},
        "optimizer": {"lr": 0.0},
    }
    return Plan(
        config=RunConfig.model_validate(given),
        origins={},
        run_dir=path,
        base_dir=path,
        algorithm=choice,
        advantage=choice,
        reward=choice,
        model=choice,
        transport=choice,
        layout=dense_layout(config),
        model_path=path,
        num_rollouts=100,
        batch_size=sequences,
        samples_per_prompt=1,
        global_batch_size=sequences,
        steps_per_rollout=1,
        world_size=1,
        data_parallel=1,
        needs_critic=False,
        needs_reference=False,
        needs_teacher=False,
    )


def make_batch(lengths: Sequence[int], vocab_size: int) -> Batch:
    """Sequences of which all but the first 256 tokens were sampled."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor(lengths)
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= 256 for length in lengths])
    weights = token_weights(mask, counts, torch.arange(len(lengths)), aggregation="sample_mean")
    return Batch(
        counts,
        {
            "tokens": torch.randint(0, vocab_size, (total,), generator=generator).to(torch.int32),
            "mask": mask,
            "advantages": torch.randn(total, generator=generator),
            "old_log_probs": torch.full((total,), -12.0),
            "weights": weights,
        },
    )


def seconds(run: Callable[[], object], count: int, warm_up: int) -> float:
    times = []
    for index in range(warm_up + count):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if index >= warm_up:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def bare_step(trainer: MegatronTrainer, step: StepSchedule, batch: Batch) -> Callable[[], None]:
    """The same rows through the same model and optimizer, with nothing of milepost's loss, metrics and checks."""
    role = trainer._trained["actor"]
    rows = trainer._rows(step, batch)

    def run() -> None:
        def loss(model: Any, hidden: Any, row: Any) -> Any:
            return -model.read(hidden, row, role.head, ("log_probs", "entropy"))["log_probs"].sum()

        role.accumulate(rows, loss)
        role.apply(role.gradient_norm())

    return run


@contextmanager
def used(text: str) -> Iterator[None]:
    """Use the kernels that a row names."""
    names, _, attention = text.partition("@")
    with ExitStack() as stack:
        stack.enter_context(only(names))
        if attention == "cudnn":
            first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
            stack.enter_context(sdpa_kernel(first, set_priority=True))
        yield


def measure(
    path: Path, config: dict[str, Any], recompute: str, micro_tokens: int, arguments: Any
) -> Iterator[dict[str, Any]]:
    """Yield one row for each choice of kernels, all with the same model."""
    torch.cuda.empty_cache()
    plan = make_plan(path, config, recompute, arguments.tokens // arguments.length)
    trainer = MegatronTrainer(
        plan, recipe=Qwen3Recipe(), algorithm=Clip(), device=torch.device("cuda"), dtype=torch.bfloat16
    )
    try:
        for kernels in arguments.kernels:
            row = {"recompute": recompute, "micro_tokens": micro_tokens, "kernels": kernels}
            yield row | measure_row(trainer, plan, config["vocab_size"], micro_tokens, kernels, arguments)
        if arguments.offload:
            yield {"offload": True, **measure_offload(trainer)}
    finally:
        trainer.close()
        parallel.destroy()
        gc.collect()


def measure_row(
    trainer: MegatronTrainer, plan: Plan, vocab_size: int, micro_tokens: int, kernels: str, arguments: Any
) -> dict[str, Any]:
    """Time a step with the kernels that a row names; without seconds where it ran out of memory."""
    sequences, length = plan.global_batch_size, arguments.length
    spread = length // 4 if kernels.endswith("@ragged") else 0
    lengths = [length + (spread if index % 2 else -spread) for index in range(sequences)]
    batch = make_batch(lengths, vocab_size)
    step = make_schedule(
        lengths,
        range(sequences),
        data_parallel=1,
        global_batch_size=sequences,
        steps_per_rollout=1,
        token_budget=micro_tokens,
    ).steps[0]
    flops = sum(dense_train_flops(plan.layout, length) for length in lengths)
    torch.cuda.reset_peak_memory_stats()
    try:
        with used(kernels):
            took = seconds(lambda: trainer.step("actor", step, batch), arguments.steps, arguments.warm_up)
            peak = torch.cuda.max_memory_allocated()
            metrics = trainer.step("actor", step, batch).metrics
            result: dict[str, Any] = {"seconds": took, "mfu": flops / took / PEAK, "peak_gb": peak / 1e9}
            result |= {name: metrics[name] for name in ("loss", "grad_norm")}
            if arguments.bare:
                bare = seconds(bare_step(trainer, step, batch), arguments.steps, arguments.warm_up)
                result["overhead"] = took / bare - 1
    except torch.OutOfMemoryError:
        return {"seconds": None}
    return result


def measure_offload(trainer: MegatronTrainer) -> dict[str, float]:
    """Give everything back and take it again: what stays, and how fast it moved the second time."""
    role = trainer._trained["actor"]
    parts: tuple[Part, ...] = ("weights", "gradients", "optimizer")
    for _ in range(2):
        trainer.offload("actor", parts)
        left = torch.cuda.memory_allocated() / 1e9
        away = [copy.gigabytes_per_second for copy in (role._weights, role._optimizer_state) if copy is not None]
        trainer.onload("actor", parts)
        role.wait_for_optimizer()
        back = [copy.gigabytes_per_second for copy in (role._weights, role._optimizer_state) if copy is not None]
    return {"offloaded_gb_left": left, "offload_gb_s": min(away), "onload_gb_s": min(back)}


def table_row(row: dict[str, Any]) -> str:
    """A measured row to read."""
    if "offload" in row:
        return (
            "offloaded: {offloaded_gb_left:.2f} GB left, {offload_gb_s:.0f} GB/s away, {onload_gb_s:.0f} back".format(
                **row
            )
        )
    head = f"{row['recompute']:10} {row['micro_tokens']:6} "
    if row["seconds"] is None:
        return f"{head}out of memory  {row['kernels']}"
    over = f"{row['overhead']:9.1%}" if "overhead" in row else " " * 9
    return f"{head}{row['seconds']:8.3f} {row['mfu']:6.3f} {over} {row['peak_gb']:8.1f}  {row['kernels']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="4b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--recompute", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--micro-tokens", nargs="+", type=int, default=[16384, 8192, 4096])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--kernels", nargs="+", default=["all"], help="which of milepost's GPU kernels, see above")
    parser.add_argument("--no-bare", dest="bare", action="store_false", help="leave the bare loop out")
    parser.add_argument("--offload", action="store_true", help="also measure giving memory back and taking it again")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    arguments = parser.parse_args()
    config = {**COMMON, **CONFIGS[arguments.model]}
    for kernels in arguments.kernels:
        try:
            with used(kernels):
                pass
        except ValueError as error:
            parser.error(f"--kernels {error}")
    rows = []
    print(
        f"{'recompute':10} {'micro':>6} {'seconds':>8} {'MFU':>6} {'over bare':>9} {'peak GB':>8}  kernels", flush=True
    )
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        write_checkpoint(path, config)
        for recompute in arguments.recompute:
            for micro_tokens in arguments.micro_tokens:
                for row in measure(path, config, recompute, micro_tokens, arguments):
                    rows.append(row)
                    print(table_row(row), flush=True)
                    print(json.dumps(row), flush=True)
    result = {
        "model": arguments.model,
        "tokens": arguments.tokens,
        "length": arguments.length,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows,
    }
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
