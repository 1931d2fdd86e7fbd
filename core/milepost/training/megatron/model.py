"""A role's model: Megatron's GPT model, built in pieces, which says what a row's tokens are worth."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from milepost.errors import CheckpointError
from milepost.recipe import MegatronModel
from milepost.training.logprobs import HeadSettings
from milepost.training.megatron.accumulation import accumulates_in_products
from milepost.training.megatron.head import vocab_parallel_log_probs
from milepost.training.megatron.layers import RMSNorm, Rotation, RowParams
from milepost.training.megatron.parallel import Parallelism
from milepost.training.megatron.rows import Row
from milepost.training.policy import ValueHead
from milepost.training.trainer import Want
from milepost.weights.conversion import Conversion, all_layers
from milepost.weights.files import HFCheckpoint

Recompute = Literal["none", "selective", "full"]

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
VALUE_HEAD = {"output_layer.weight": "value_head.weight", "output_layer.bias": "value_head.bias"}
"""A critic's output layer, and what its tensors are called outside."""
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of old checkpoints that say nothing."""


def transformer_config(
    description: MegatronModel,
    parallelism: Parallelism,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: Recompute = "none",
) -> Any:
    """Return Megatron's configuration of a model, trained in `dtype` with gradients in float32."""
    on_gpu = device.type == "cuda"
    fields: dict[str, Any] = {
        **description.transformer,
        "tensor_model_parallel_size": parallelism.tensor,
        "pipeline_model_parallel_size": parallelism.pipeline,
        "context_parallel_size": parallelism.context,
        "expert_model_parallel_size": parallelism.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallelism.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Dropout would make log-probs irreproducible, and the ratio never exactly 1.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the one that knows rows of different lengths
        "use_cpu_initialization": not on_gpu,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": accumulates_in_products(device),
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        # With interleaving, sends are still under way when outputs would be freed: gloo would send what came after.
        "deallocate_pipeline_outputs": parallelism.interleave == 1,
    }
    if parallelism.interleave > 1:
        # Batched point-to-point calls with interleaving give wrong gradients on gloo.
        fields |= {
            "virtual_pipeline_model_parallel_size": parallelism.interleave,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        fields |= {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe" if description.transformer.get("num_moe_experts") else "mlp"],
        }
    return TransformerConfig(**fields)


class ValueLayer(ValueHead):
    """A value head whose weights have the model's dtype, as the optimizer wants them, and which computes above it.

    Its float32 weights are with the optimizer's.
    """

    def __init__(self, hidden_size: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hidden_size, seed=seed, dtype=dtype, device=device)
        self.to(dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the value of each state [n], in float32 at least."""
        dtype = torch.promote_types(torch.float32, self.weight.dtype)
        values = torch.addmm(self.bias.to(dtype), hidden.to(dtype), self.weight.to(dtype).t())
        return values.squeeze(1)


class PolicyModel(GPTModel):  # type: ignore[misc]
    """One piece of a role's model. The last piece gives hidden states, of which `read` makes log-probs or values."""

    def __init__(
        self,
        config: Any,
        description: MegatronModel,
        *,
        value_head: ValueLayer | None,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        tied = description.tied_embeddings and value_head is None
        spec = description.layer_spec(config)
        if not isinstance(spec, TransformerBlockSubmodules):
            count = get_num_layers_to_build(config, vp_stage)
            layers = list(spec) if isinstance(spec, Sequence) else [spec] * count
            spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=description.padded_vocab_size,
            max_sequence_length=description.max_positions,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",
            vp_stage=vp_stage,
        )
        self.inverse_frequencies = description.inverse_frequencies
        """[D / 2] float32; not a buffer, so that no cast to bfloat16 reaches it."""
        self.real_vocab_size = description.vocab_size
        self.value_head = value_head is not None
        if value_head is not None and post_process:
            self.output_layer = value_head

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def read(self, hidden: Tensor, row: Row, settings: HeadSettings, want: Collection[Want]) -> dict[Want, Tensor]:
        """Return one column [n] per wanted name, read off the last stage's hidden states before each trainable token.

        Raises ValueError if values are asked of a policy, or log-probs of a critic.
        """
        wrong = ("log_probs", "entropy") if self.value_head else ("values",)
        if any(name in want for name in wrong):
            what = "a critic, which has a value head alone" if self.value_head else "a role without a value head"
            raise ValueError(f"{', '.join(want)} were asked of {what}")
        if self.config.sequence_parallel:
            # Each rank has a part of the gradient of a policy's hidden states, and all of a critic's.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not self.value_head
            )
        before = hidden.squeeze(1).index_select(0, row.before)
        if self.value_head:
            return {"values": self.output_layer(before)}
        if not self.config.sequence_parallel:
            before = tensor_parallel.copy_to_tensor_model_parallel_region(before)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        log_probs, entropy = vocab_parallel_log_probs(
            before,
            weight,
            row.targets,
            group=parallel_state.get_tensor_model_parallel_group(),
            vocab_size=self.real_vocab_size,
            settings=settings,
            entropy="entropy" in want,
        )
        columns: dict[Want, Tensor] = {"log_probs": log_probs}
        if entropy is not None:
            columns["entropy"] = entropy
        return {name: columns[name] for name in want}

    def canonical_names(self) -> dict[str, str]:
        """Return each parameter's name, and the name it has in a model without pipeline and expert parallelism."""
        numbers = {index: layer.layer_number - 1 for index, layer in enumerate(self.decoder.layers)}
        experts = (self.config.num_moe_experts or 0) // self.config.expert_model_parallel_size
        first = experts * parallel_state.get_expert_model_parallel_rank()

        def canonical(name: str) -> str:
            name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(numbers[int(match[0])]), name)
            return re.sub(r"(?<=\.local_experts\.)\d+", lambda match: str(first + int(match[0])), name)

        return {name: canonical(name) for name, _ in self.named_parameters()}


def run_row(model: nn.Module, row: Row) -> Tensor:
    """Run a row through a `PolicyModel` or what wraps one."""
    attendance = row.attendance
    frequencies = unwrap(model).inverse_frequencies.to(attendance.positions.device)
    rotation = Rotation.of(attendance.positions, frequencies)
    params = RowParams(attendance=attendance, rotation=rotation)
    hidden: Tensor = model(row.tokens, None, None, packed_seq_params=params)
    return hidden


def build_pieces(
    description: MegatronModel, config: Any, *, critic: bool, seed: int, device: torch.device
) -> list[PolicyModel]:
    """Build this rank's pieces of a model, without weights; a critic's value head is drawn from the seed."""
    stages: list[int | None] = [None]
    if config.virtual_pipeline_model_parallel_size is not None:
        stages = list(range(config.virtual_pipeline_model_parallel_size))
    pieces = []
    for stage in stages:
        head = ValueLayer(config.hidden_size, seed=seed, dtype=config.params_dtype, device=device) if critic else None
        piece = PolicyModel(
            config,
            description,
            value_head=head,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        pieces.append(piece.to(device))
    return pieces


def rules_by_name(description: MegatronModel) -> dict[str, Conversion]:
    """Return the rule of every tensor of the whole model by its Megatron name."""
    rules = all_layers(description.conversions, description.transformer["num_layers"])
    return {rule.megatron: rule for rule in rules}


@torch.no_grad()
def load_hf(
    pieces: Sequence[PolicyModel],
    description: MegatronModel,
    folder: Path,
    loaded: Callable[[Tensor], object] = lambda tensor: None,
) -> None:
    """Fill this rank's pieces from a Hugging Face folder; only what the rank holds is read.

    `loaded` is called with every parameter that was filled from it. Raises CheckpointError if a tensor is missing, has
    another shape, or is one the recipe does not know.
    """
    checkpoint = HFCheckpoint(folder)
    rules = rules_by_name(description)
    _check_names(checkpoint, rules, critic=pieces[0].value_head)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for piece in pieces:
        parameters = dict(piece.named_parameters())
        for local, name in piece.canonical_names().items():
            parameter = parameters[local]
            if piece.value_head and name in VALUE_HEAD:
                if VALUE_HEAD[name] in checkpoint.names:
                    parameter.copy_(checkpoint.read(VALUE_HEAD[name]))
                continue
            # The last stage of a tied model has a copy of the embedding.
            rule = rules[EMBEDDING if name == HEAD and name not in rules else name]
            cuts = [checkpoint.read(part.name, rule.cut(part, rank, size)) for part in rule.parts]
            parameter.copy_(rule.merge(cuts, size if rule.split == 0 else 1))
            loaded(parameter)


def _check_names(checkpoint: HFCheckpoint, rules: Mapping[str, Conversion], *, critic: bool) -> None:
    expected = {part.name: part.shape for rule in rules.values() for part in rule.parts}
    for name, shape in expected.items():
        if critic and name == "lm_head.weight":
            continue
        if (found := checkpoint.shape(name)) != shape:
            raise CheckpointError(f"{checkpoint.folder}: {name} is {found}, config.json says {shape}")
    spare = set(VALUE_HEAD.values()) | {"lm_head.weight"}
    unknown = [n for n in checkpoint.names if n not in expected and n not in spare and not IGNORED.fullmatch(n)]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.folder} has {unknown[0]!r} and {len(unknown) - 1} more tensors that the recipe does not "
            "know; training without them would train another model"
        )


def unwrap(model: Any) -> PolicyModel:
    """Return the `PolicyModel` inside a wrapper."""
    while not isinstance(model, PolicyModel):
        model = model.module
    return model
