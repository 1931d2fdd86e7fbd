"""What a rank of the Megatron trainer holds in GPU memory, and which layout makes it fit; plain arithmetic, no torch.

Counted is what torch allocates at the worst moment of an optimizer step, when the last micro-batch's loss has been
computed and everything that its backward pass needs is still there. CUDA's own context (about half a GiB) and what the
allocator cannot use come on top. Sizes are per rank, in bytes; w is the width of the compute dtype.

    weights     w N          N: parameters of the rank's pipeline stage, divided by tensor parallelism
    gradients   4 N          always float32
    optimizer   12 N / R     float32 weights and Adam's two moments, spread over R = data x context parallel ranks;
                8 N / R      where w is 4: the weights are their own masters
    activations              `layer_activations` x layers x micro-batches in flight

The activations of a layer are the tensors that its backward pass reads, each counted once. A test compares them with
what torch saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from milepost.components import ModelLayout
from milepost.config.schema import TrainerSection

Recompute = Literal["none", "selective", "full"]

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this (`milepost.weights.dense`)."""
CHUNK_ELEMENTS = 1 << 27
"""Logits that exist at once (`milepost.training.logprobs`); twice as many where they stay in 16 bits."""
RECOMPUTE_COST: dict[Recompute, float] = {"none": 1.0, "selective": 1.14, "full": 1.33}
"""Time of a step by what is recomputed; `selective` as measured on an H200, `full` a forward pass more."""
MICRO_BATCHES = 8
"""Micro-batches of a step that the cost of a pipeline is reckoned with."""
SPARE = 0.92
"""Share of a GPU's memory that a suggested layout may fill."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is spread over ranks, and what it keeps for the backward pass."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    sequence: bool = False
    recompute: Recompute = "none"

    @classmethod
    def of(cls, trainer: TrainerSection, data_parallel: int) -> Cut:
        """Take it from a run config."""
        return cls(
            tensor=trainer.tensor_parallel,
            pipeline=trainer.pipeline_parallel,
            virtual=trainer.virtual_pipeline_parallel,
            context=trainer.context_parallel,
            expert=trainer.expert_parallel,
            data=data_parallel,
            sequence=trainer.sequence_parallel and trainer.tensor_parallel > 1,
            recompute=trainer.recompute,
        )

    def settings(self, other: Cut) -> str:
        """Return as settings of a run config where this differs from another."""
        names = {
            "tensor": "tensor_parallel",
            "pipeline": "pipeline_parallel",
            "virtual": "virtual_pipeline_parallel",
            "sequence": "sequence_parallel",
            "recompute": "recompute",
        }
        changed = {
            key: getattr(self, name) for name, key in names.items() if getattr(self, name) != getattr(other, name)
        }
        return ", ".join(f"trainer.{key}: {str(value).lower()}" for key, value in changed.items())


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank is to hold at once, beside how the model is cut."""

    tokens: int
    """Of a micro-batch on one GPU."""
    width: int
    """Bytes of a number of the compute dtype."""
    adam: bool = True
    """Whether the optimizer is Adam, which keeps two moments."""
    trained_roles: int = 1
    """Roles whose weights, gradients and optimizer are on the GPU together: 2 for a critic without offload."""
    frozen_roles: int = 0
    """Reference and teacher; one of them is on the GPU while it is asked."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank of a pipeline stage."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept by the forward passes of all micro-batches in flight."""
    workspace: int
    """The head's logits and its gradient, or what one layer's backward pass makes, whichever is more."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


def layer_parameters(layout: ModelLayout) -> tuple[int, int]:
    """Return the parameters of one layer: those of experts apart from all others."""
    embeddings = layout.vocab_size * layout.hidden_size * (1 if layout.tied_embeddings else 2)
    whole = (layout.num_parameters - embeddings - layout.hidden_size) // layout.num_layers
    experts = layout.expert_parameters // layout.num_layers
    return whole - experts, experts


def padded_vocabulary(layout: ModelLayout, cut: Cut) -> int:
    """Return a rank's rows of the embedding and of the head."""
    return -(-layout.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // cut.tensor


def stage_parameters(layout: ModelLayout, cut: Cut, stage: int) -> int:
    """Return the parameters of a rank of a pipeline stage; norms count as if tensor parallelism divided them.

    Each expert is whole on one rank.
    """
    dense, experts = layer_parameters(layout)
    layers = layout.num_layers // cut.pipeline
    total = layers * (dense // cut.tensor + experts // cut.expert)
    vocabulary = padded_vocabulary(layout, cut) * layout.hidden_size
    if stage == 0:
        total += vocabulary
    if stage == cut.pipeline - 1:
        total += layout.hidden_size
        if cut.pipeline > 1 or not layout.tied_embeddings:
            # A tied embedding is on both ends of a pipeline.
            total += vocabulary
    return total


def feed_forward(layout: ModelLayout) -> int:
    """Return the columns of the feed-forward that a token passes, derived where the recipe does not say."""
    if layout.feed_forward:
        return layout.feed_forward
    attention = 2 * layout.hidden_size * layout.head_dim * (layout.num_heads + layout.num_kv_heads)
    return max(0, layer_parameters(layout)[0] - attention) // (3 * layout.hidden_size)


def layer_activations(layout: ModelLayout, cut: Cut, width: int) -> int:
    """Return the bytes that a layer keeps for each of a rank's tokens when nothing is recomputed.

    With H the hidden size, Q and K the columns of all query and of all key heads, F those of the feed-forward:

        4 H           inputs of both norms, inputs of the matrices behind them (a share under sequence parallelism)
        Q + 2 K       output of the query-key-value matrix
        Q             queries that a norm reads; with one key head on a rank they are a view of that output
        Q + K         rotated queries and keys
        Q             output of attention, and 4 bytes a head for its softmax
        3 F           output of gate and up, and their product

    Context parallelism gathers keys and values and copies what each of its two chunks sees, 2 C + 1 halves of a rank's
    tokens for C ranks, and puts the chunks' outputs together.
    """
    hidden = 4 * layout.hidden_size // (cut.tensor if cut.sequence else 1)
    query, key = layout.num_heads * layout.head_dim, layout.num_kv_heads * layout.head_dim
    attention = 3 * query + 2 * key
    if layout.qk_norm and layout.num_kv_heads > cut.tensor:
        attention += query
    attention += key if cut.context == 1 else query + key * (2 * cut.context + 1)
    inner = 3 * feed_forward(layout)
    return hidden * width + ((attention + inner) * width + 4 * layout.num_heads) // cut.tensor


def kept_activations(layout: ModelLayout, cut: Cut, width: int) -> int:
    """Return the bytes that a layer keeps for each of a rank's tokens with what is recomputed left out."""
    if cut.recompute == "full":
        return width * layout.hidden_size // (cut.tensor if cut.sequence else 1)
    whole = layer_activations(layout, cut, width)
    return whole - (3 * feed_forward(layout) * width // cut.tensor if cut.recompute == "selective" else 0)


def layers_in_flight(layout: ModelLayout, cut: Cut, stage: int) -> int:
    """Return how many layers' activations a stage holds at most, a layer once for every micro-batch in flight.

    One forward, one backward in turn: stage s of P has P - s micro-batches in flight, interleaved in V pieces
    2 (P - s - 1) + (V - 1) P + 1 pieces (arXiv 2104.04473).
    """
    if cut.virtual == 1:
        return layout.num_layers // cut.pipeline * (cut.pipeline - stage)
    pieces = 2 * (cut.pipeline - stage - 1) + (cut.virtual - 1) * cut.pipeline + 1
    return layout.num_layers // (cut.pipeline * cut.virtual) * pieces


def head_workspace(layout: ModelLayout, cut: Cut, load: Load) -> int:
    """Return the bytes of the head's backward pass: chunks of logits, and the gradient of its weight in float32."""
    rows = padded_vocabulary(layout, cut)
    if load.width == 2 and cut.tensor == 1:
        chunk = 4 * min(load.tokens * rows, 2 * CHUNK_ELEMENTS)  # logits and their gradient in 16 bits
    else:
        chunk = 16 * min(load.tokens * rows, CHUNK_ELEMENTS)  # four of them in float32
    weight = rows * layout.hidden_size
    states = load.tokens * layout.hidden_size * load.width
    return 4 * weight + max(load.width * weight, chunk) + 2 * states


def stage_memory(layout: ModelLayout, cut: Cut, load: Load, stage: int) -> RankMemory:
    """Return what a rank of a pipeline stage holds at the worst moment of a step."""
    parameters = stage_parameters(layout, cut, stage)
    moments = 8 if load.adam else 0
    masters = 4 if load.width == 2 else 0
    # Without Adam nothing is spread. Experts have other ranks to be spread over than all else.
    experts = layout.num_layers // cut.pipeline * (layer_parameters(layout)[1] // cut.expert)
    copies = max(1, cut.tensor * cut.data * cut.context // cut.expert)
    spread, expert_spread = (cut.data * cut.context, copies) if load.adam else (1, 1)
    state = (moments + masters) * load.trained_roles
    layer = load.tokens * layer_activations(layout, cut, load.width)
    # Gradients of a layer's activations, and the activations themselves where they are computed again.
    recomputed = layer - load.tokens * kept_activations(layout, cut, load.width)
    workspace = layer + recomputed
    if stage == cut.pipeline - 1:
        workspace = max(workspace, head_workspace(layout, cut, load))
    activations = load.tokens * kept_activations(layout, cut, load.width) * layers_in_flight(layout, cut, stage)
    if load.frozen_roles:
        # A frozen role is asked before: its weights and a layer of its forward pass, nothing kept.
        activations = max(activations, load.width * parameters)
    return RankMemory(
        stage=stage,
        weights=load.width * parameters * load.trained_roles,
        gradients=4 * parameters * load.trained_roles,
        optimizer=-(-state * (parameters - experts) // spread) - (-state * experts // expert_spread),
        activations=activations,
        workspace=workspace,
    )


def rank_memory(layout: ModelLayout, cut: Cut, load: Load) -> RankMemory:
    """Return what a rank of the fullest pipeline stage holds: the first has most in flight, the last the head."""
    stages = {0, cut.pipeline - 1}
    return max((stage_memory(layout, cut, load, stage) for stage in sorted(stages)), key=lambda memory: memory.total)


def cost(cut: Cut) -> float:
    """Return a rough relative time of a step on the same GPUs, to order layouts by.

    Recomputing costs what it was measured to cost; tensor parallelism 6% for each GPU after the first, for messages
    that nothing hides, which is a guess; a pipeline of P stages its bubble, (P - 1) / (V x micro-batches).
    """
    bubble = (cut.pipeline - 1) / (cut.virtual * MICRO_BATCHES)
    return RECOMPUTE_COST[cut.recompute] * (1 + 0.06 * (cut.tensor - 1)) * (1 + bubble)


def layouts(layout: ModelLayout, given: Cut, gpus_per_node: int) -> Iterator[Cut]:
    """Yield the layouts of the same ranks that the model allows; context and expert parallelism stay as given."""
    world = given.tensor * given.pipeline * given.data
    sizes = [1 << power for power in range(world.bit_length())]
    for tensor, pipeline, recompute in product(sizes, sizes, RECOMPUTE_COST):
        divides = layout.num_heads % tensor == layout.num_kv_heads % tensor == layout.num_layers % pipeline == 0
        if tensor <= gpus_per_node and divides and world % (tensor * pipeline) == 0:
            yield replace(
                given,
                tensor=tensor,
                pipeline=pipeline,
                virtual=1,
                data=world // (tensor * pipeline),
                sequence=tensor > 1,
                recompute=recompute,
            )


def suggest(layout: ModelLayout, given: Cut, load: Load, *, gpus_per_node: int, gpu_memory: float) -> Cut | None:
    """Return the cheapest layout of the same ranks that fits into `gpu_memory` bytes with room to spare, or None."""
    fitting = [
        cut
        for cut in layouts(layout, given, gpus_per_node)
        if rank_memory(layout, cut, load).total <= SPARE * gpu_memory
    ]
    return min(fitting, key=lambda cut: (cost(cut), cut.tensor, cut.pipeline), default=None)
