"""The memory estimate by hand, beside what an H200 measured, and the layouts that it leads to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from milepost.components import ModelLayout
from milepost.config.estimates import estimate
from milepost.config.loading import load_config
from milepost.config.memory import (
    Cut,
    Load,
    cost,
    head_workspace,
    kept_activations,
    layer_activations,
    layers_in_flight,
    rank_memory,
    stage_memory,
    stage_parameters,
    suggest,
)
from milepost.config.plan import Plan, make_plan
from milepost.config.render import plan_data, plan_text
from milepost.weights.layouts import dense_layout

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
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
LAYOUT = dense_layout(QWEN3_4B)
GIB = 2**30

RUN = """\
model: {path: model}
data: {path: train.jsonl}
rollout: {num_rollouts: 10, batch_size: 32, samples_per_prompt: 8, max_response_len: 8192}
reward: {name: deepscaler}
algorithm: {name: grpo, kl_loss_coef: 0.001}
trainer: {backend: megatron}
engine: {backend: sglang}
cluster: {launcher: ray, gpus_per_node: 8}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of Qwen3-4B on 8 GPUs; of the model there is the config.json alone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*sets: str) -> Plan:
    return make_plan(load_config("run.yaml", sets))


@pytest.mark.parametrize(
    ("recompute", "tokens", "measured"),
    # One H200, one rank, `benchmarks/megatron_step.py`: torch's peak in GB, as docs/performance.md has it.
    [("none", 8192, 111.5), ("none", 4096, 94.0), ("selective", 8192, 94.3)],
)
def test_estimate_is_what_an_h200_measured(recompute: Any, tokens: int, measured: float) -> None:
    memory = rank_memory(LAYOUT, Cut(recompute=recompute), Load(tokens, width=2))
    assert memory.total / 1e9 == pytest.approx(measured, rel=0.03)


def test_one_layer_by_hand() -> None:
    # 4 x 2560 of norms and matrices; 4096 of queries four times, their 6144 with keys and values, 1024 of rotated keys
    # (once in each of qkv: 4096 + 2048); 3 x 9728 of the feed-forward; 2 bytes each, and 4 bytes for each of 32 heads.
    numbers = 4 * 2560 + (4096 + 2 * 1024) + 4096 + (4096 + 1024) + 4096 + 3 * 9728
    assert layer_activations(LAYOUT, Cut(), 2) == 2 * numbers + 4 * 32
    # Tensor parallelism divides all but what the norms and matrices read, which a split sequence divides too.
    divided = 2 * (numbers - 4 * 2560) + 4 * 32
    assert layer_activations(LAYOUT, Cut(tensor=2), 2) == 2 * 4 * 2560 + divided // 2
    assert layer_activations(LAYOUT, Cut(tensor=2, sequence=True), 2) == (2 * 4 * 2560 + divided) // 2
    assert kept_activations(LAYOUT, Cut(recompute="full"), 2) == 2 * 2560
    assert kept_activations(LAYOUT, Cut(recompute="selective"), 2) == 2 * (numbers - 3 * 9728) + 4 * 32


def test_parameters_of_stages_by_hand() -> None:
    embedding = 151936 * 2560
    layers = 4_022_468_096 - embedding - 2560
    assert stage_parameters(LAYOUT, Cut(), 0) == 4_022_468_096
    # A tied embedding is on both ends of the pipeline, the last norm on its last stage.
    cut = Cut(pipeline=4, tensor=2)
    assert stage_parameters(LAYOUT, cut, 0) == layers // 8 + embedding // 2
    assert stage_parameters(LAYOUT, cut, 1) == layers // 8
    assert stage_parameters(LAYOUT, cut, 3) == layers // 8 + embedding // 2 + 2560
    # Of 1000 parameters, 2 layers share 1000 - 2 x 100 x 4 - 4 = 196; 40 of a layer's 98 are experts'.
    experts = ModelLayout(2, 4, 2, 2, 2, 100, 1000, False, 64, num_experts=4, expert_parameters=80)
    assert stage_parameters(experts, Cut(expert=2), 0) == 2 * (58 + 20) + 2 * 128 * 4 + 4


def test_optimizer_is_spread_over_data_and_context_parallel_ranks() -> None:
    alone = stage_memory(LAYOUT, Cut(), Load(8192, 2), 0)
    assert (alone.weights, alone.gradients, alone.optimizer) == tuple(4_022_468_096 * n for n in (2, 4, 12))
    assert stage_memory(LAYOUT, Cut(data=4, context=2), Load(8192, 2), 0).optimizer == alone.optimizer // 8
    # In float32 the weights are their own masters, and without Adam there are no moments and nothing is spread.
    assert stage_memory(LAYOUT, Cut(), Load(8192, 4), 0).optimizer == 8 * 4_022_468_096
    assert stage_memory(LAYOUT, Cut(data=8), Load(8192, 2, adam=False), 0).optimizer == 4 * 4_022_468_096
    assert stage_memory(LAYOUT, Cut(), Load(8192, 2, trained_roles=2), 0).weights == 2 * alone.weights


def test_layers_in_flight_by_hand() -> None:
    assert layers_in_flight(LAYOUT, Cut(), 0) == 36
    # 9 layers a stage; the first has 4 micro-batches in flight, the last one.
    assert [layers_in_flight(LAYOUT, Cut(pipeline=4), stage) for stage in range(4)] == [36, 27, 18, 9]
    # Pieces of 3 layers: 2 x 3 + 2 x 4 + 1 of them on the first stage.
    assert layers_in_flight(LAYOUT, Cut(pipeline=4, virtual=3), 0) == 3 * 15


def test_head_by_hand() -> None:
    weight = 151936 * 2560
    # Two chunks of 2^28 logits in 16 bits; the head's gradient in float32; states before and after the last norm.
    assert head_workspace(LAYOUT, Cut(), Load(8192, 2)) == 4 * weight + 4 * 2**28 + 2 * 8192 * 2560 * 2
    # A small vocabulary: the gradient in 16 bits beside that in float32 is more than its logits.
    small = replace(LAYOUT, vocab_size=1000)
    assert head_workspace(small, Cut(), Load(64, 2)) == 4 * 1024 * 2560 + 2 * 1024 * 2560 + 2 * 64 * 2560 * 2


def test_suggested_layouts() -> None:
    def found(gib: float, ranks: int = 8, tokens: int = 16384, **changes: Any) -> Cut | None:
        load = Load(tokens, 2)
        return suggest(LAYOUT, Cut(data=ranks, **changes), load, gpus_per_node=8, gpu_memory=gib * GIB)

    # 95 GiB fit into 140 as they are; into 80 with matrices over two GPUs; into 24 over four, with recomputation.
    assert found(140) == Cut(data=8)
    assert found(80) == Cut(data=4, tensor=2, sequence=True)
    tight = found(24)
    assert tight is not None
    assert (tight.tensor, tight.pipeline, tight.recompute) == (4, 1, "selective")
    assert rank_memory(LAYOUT, tight, Load(16384, 2)).total < 24 * GIB
    # One rank cannot share anything: it recomputes, or there is nothing to suggest.
    assert found(80, ranks=1, tokens=8192) == Cut(recompute="full")
    assert found(60, ranks=1) is None
    # More ranks than heads divide go to the pipeline; of the cheapest that fit, none costs more than what was asked.
    assert cost(Cut(tensor=2)) < cost(Cut(pipeline=2)) < cost(Cut(recompute="selective")) < cost(Cut(recompute="full"))


def test_plan_of_qwen3_4b_on_8_gpus(project: Path) -> None:
    rows = {line[:14].strip(): line[15:] for line in plan_text(plan()).splitlines() if line[:1].islower()}
    assert rows["parallelism"] == "8 data-parallel, optimizer over 8"
    assert rows["tokens"] == "at most 8192 of a micro-batch on each rank"
    assert rows["memory"].startswith(
        "about 63 GiB a rank in bfloat16 at the peak of a step: weights 7.49 GiB + gradients"
    )
    assert "activations 32.4 GiB (recompute: none)" in rows["memory"]
    # On the host: the optimizer's share and weights of the actor, weights of the reference.
    assert rows["host memory"].startswith("about 165 GiB a machine, 20.6 GiB for each of 8 ranks")
    text = plan_text(plan("trainer.tensor_parallel=2", "trainer.context_parallel=2", "trainer.sequence_parallel=true"))
    assert "2 tensor-parallel with its sequence split x 2 context-parallel x 2 data-parallel, optimizer over 4" in text
    assert "at most 8192 of a micro-batch on each rank, 16384 over its context-parallel ranks" in text
    assert "with recompute selective about" in text


def test_plan_warns_and_says_what_fits(project: Path) -> None:
    tight = plan("cluster.gpu_memory_gib=48")
    assert tight.warnings[-1] == (
        "cluster.gpu_memory_gib: 48, but a training step takes about 63 GiB on each GPU; "
        "trainer.tensor_parallel: 2, trainer.sequence_parallel: true takes about 36 GiB (--set)"
    )
    assert "no layout of these ranks fits" in plan("cluster.gpu_memory_gib=4").warnings[-1]
    assert not [text for text in plan("cluster.gpu_memory_gib=80").warnings if "gpu_memory" in text]
    # Without offload the critic's weights, gradients and optimizer are there at the same time.
    both = estimate(plan("algorithm.name=ppo", "trainer.offload=false"))
    alone = estimate(plan("algorithm.name=ppo"))
    assert both.weights == alone.weights
    assert both.peak is not None and alone.peak is not None
    assert both.peak - alone.peak == alone.weights + alone.gradients + alone.optimizer
    assert plan_data(tight)["estimates"]["peak"] == estimate(tight).peak
