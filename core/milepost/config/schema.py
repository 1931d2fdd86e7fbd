"""The run config: every section and field, with its default and what it means.

Static options only; runtime objects never enter a config. Sections that name a plugin carry kernel keys (declared here)
and the component's own options (declared by its options model); `milepost.config.loading` tells them apart.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base class of all sections: unknown keys are rejected, a built value never changes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class ComponentSection(Section):
    """A section that names a component; keys that are not declared here are the component's own options."""

    model_config = ConfigDict(extra="allow")
    kind: ClassVar[str]

    @property
    def options(self) -> dict[str, Any]:
        """The component's own options, as given."""
        return dict(self.__pydantic_extra__ or {})


class RunSection(Section):
    """Where the run lives and what seeds it."""

    dir: str | None = None
    """Run folder; default `runs/NAME` after the last run config, from whose folder relative paths are taken."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds data order, sampling and initial values of new heads."""
    threads: Positive | None = None
    """CPU threads of the process that computes; default all cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer and the local engine compute; `auto` takes a GPU if there is one."""


class ModelSection(Section):
    """The policy that is trained."""

    path: str
    """Folder of a Hugging Face checkpoint; relative paths are taken from the last run config's folder."""
    recipe: str | None = None
    """Model recipe by name; default the one that serves the checkpoint's architecture."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    converted: str | None = None
    """Folder that `milepost prepare` converts the checkpoint into for Megatron, whose ranks then read their shards
    of it; null reads the checkpoint itself."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""


class LabelField(Section):
    """Where a label stands inside a row."""

    key: str
    """Dotted path into the row."""
    regex: str | None = None
    """Pattern searched in the text at `key`; its first group (or the whole match) is the label."""

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        """Refuse what is no regular expression while the run config is read."""
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"expected a regular expression, but it does not compile: {error}") from None
        return value


class DatasetFields(Section):
    """How rows of a file become prompts and labels."""

    prompt: str = "prompt"
    """Dotted path of the prompt: a string, or a list of chat messages with role and content."""
    label: str | LabelField | None = "label"
    """Dotted path of the label, or {key, regex} where it stands inside a text; null for none."""
    metadata: str | None = "metadata"
    """Dotted path of a mapping kept with each sample; absent is fine."""
    prompt_prefix: str = ""
    """Text put before the prompt (before the last user message of a chat)."""
    prompt_suffix: str = ""
    """Text put after the prompt (after the last user message of a chat)."""
    chat_template: bool = False
    """Apply the tokenizer's chat template; a string prompt becomes one user message."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, for example {enable_thinking: true}."""
    system: str | None = None
    """System message put before the conversation; needs chat_template."""
    max_prompt_len: Positive | None = None
    """Prompts of more tokens are dropped, and counted; default those that leave no room for a response."""


class DataSource(Section):
    """One place that prompts are taken from."""

    path: str
    """JSONL or parquet file, dataset folder, or ORGANISATION/NAME on the Hub; `@[a:b]` at its end takes rows a to b."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """How often an epoch goes over each row; 0.5 takes half of them, and the others in the next epoch."""
    split: str | None = None
    """Split of a dataset folder or name; default `train`."""
    subset: str | None = None
    """Subset (configuration) of a dataset folder or name that has several."""


class DataSection(DatasetFields):
    """Training prompts."""

    path: str | DataSource | tuple[str | DataSource, ...]
    """JSONL or parquet file, dataset folder, or ORGANISATION/NAME on the Hub, with `@[a:b]` for rows a to b; or a list.
    Relative paths are taken from the last run config's folder."""
    dedupe: bool = False
    """Drop rows whose prompt text occurred before, and count them."""
    shuffle: bool = True
    """Shuffle anew in every epoch, by the run's seed."""


class RolloutSection(Section):
    """How responses are generated."""

    num_rollouts: Positive | None = None
    """Rollouts in the run; give this or num_epochs."""
    num_epochs: Positive | None = None
    """Passes over the data, instead of num_rollouts."""
    batch_size: Positive | None = None
    """Prompts per rollout."""
    samples_per_prompt: Positive | None = None
    """Responses per prompt, which form a group."""
    max_response_len: Positive = 1024
    """Tokens a response may have."""
    max_context_len: Positive | None = None
    """Tokens prompt and response may have together; default the model's positions."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Sampling temperature; also divides the trainer's logits. 0 (greedy) is for evaluation only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; other than 1 is refused for training."""
    top_k: NonNegative = 0
    """Draw from the k likeliest tokens; other than 0 is refused for training."""
    min_p: Fraction = 0.0
    """Draw from tokens at least this likely beside the likeliest; other than 0 is refused for training."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the model's own end tokens."""
    generate: str | None = None
    """`module:function` with `async generate(task, engine) -> list[Sample]`, instead of one response per sample."""
    filter: Literal["none", "zero_variance"] = "none"
    """`zero_variance` drops groups whose rewards are all equal and generates others in their place (DAPO)."""
    max_filter_rounds: Positive = 8
    """Rounds of generation a filter may ask for before the rollout is trained with what there is."""
    constant_reward_limit: Positive = 5
    """Rollouts in a row with one and the same reward everywhere after which the run stops."""


class Overlong(Section):
    """A soft penalty for responses that come near the length limit (DAPO, arXiv 2503.14476, equation 13)."""

    buffer: Positive
    """Tokens below rollout.max_response_len over which the penalty rises linearly from 0."""
    penalty: Annotated[float, Field(gt=0.0)] = 1.0
    """What is taken off the reward of a response of max_response_len tokens."""


class RewardSection(ComponentSection):
    """What scores responses; other keys are the reward's own options."""

    kind = "reward"
    name: str
    """Reward by name; `python` takes `function: module:name`."""
    timeout: Annotated[float, Field(gt=0.0)] = 30.0
    """Seconds one score may take before its worker process is killed."""
    on_error: float | None = 0.0
    """Score of a sample whose reward failed; null stops the run at the first failure."""
    error_budget: Fraction = 0.5
    """Share of a rollout's rewards that may fail before the run stops with the first traceback."""
    workers: Positive = 1
    """Worker processes."""
    placement: Literal["process", "inline"] = "process"
    """`process` survives anything a reward does; `inline` runs it in the controller, without a time limit."""
    memory_gb: Annotated[float, Field(gt=0.0)] | None = 4.0
    """Memory one worker may take before it counts as failed; null for no limit."""
    overlong: Overlong | None = None
    """Penalty for responses that come near the length limit, after scoring; not applied in evaluation."""


class ReferenceSection(Section):
    """The frozen policy that the KL term compares with."""

    path: str | None = None
    """Its checkpoint; default model.path, never the resumed weights."""


class TeacherSection(Section):
    """The frozen policy that distillation learns from."""

    path: str | None = None
    """Its checkpoint; needed by algorithms that have a teacher."""


class ConstantAggregation(Section):
    """Divide by samples times a constant length."""

    constant: Annotated[float, Field(gt=0.0)]
    """The length C."""


class Correction(Section):
    """Importance correction for the difference between engine and trainer log-probs."""

    name: Literal["tis", "icepop"]
    """`tis` clips the factor into [low, high]; `icepop` makes it 0 outside."""
    low: Annotated[float, Field(ge=0.0)] = 0.0
    """Lower bound of exp(trainer - engine)."""
    high: Annotated[float, Field(gt=0.0)] = 2.0
    """Upper bound of exp(trainer - engine)."""


class AlgorithmSection(ComponentSection):
    """What turns advantages into a loss; other keys are the algorithm's own options."""

    kind = "algorithm"
    name: str = "grpo"
    """Algorithm by name."""
    aggregation: Literal["sample_mean", "token_mean", "constant"] | ConstantAggregation | None = None
    """How token losses become one; `constant` divides by max_response_len. Default the algorithm's own."""
    kl_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL term against the reference; 0 skips the reference altogether."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    correction: Correction | None = None
    """Importance correction for the difference between engine and trainer log-probs."""


class AdvantageSection(ComponentSection):
    """What turns rewards into advantages; other keys are the estimator's own options."""

    kind = "advantage"
    name: str | None = None
    """Estimator by name; default the algorithm's own."""


class OptimizerSection(Section):
    """How the policy is updated."""

    name: Literal["adam", "sgd"] = "adam"
    """`adam` is AdamW; `sgd` has no momentum and is meant for tests."""
    lr: Annotated[float, Field(ge=0.0)] = 1e-6
    """Learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay of matrices; norms and biases have none."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    """Adam's decay rates."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Adam's epsilon."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    decay_steps: Positive | None = None
    """Optimizer steps at whose end min_lr is reached; default the whole run."""
    min_lr: Annotated[float, Field(ge=0.0)] = 0.0
    """Rate at the end of a linear or cosine schedule."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest gradient norm; 0 for no limit."""


class CriticSection(Section):
    """The value network of PPO; what is not given falls back to the actor's."""

    init_from: str | None = None
    """Checkpoint the critic starts from; default model.path."""
    lr: Annotated[float, Field(ge=0.0)] | None = None
    """Learning rate; default the actor's."""
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None
    """Weight decay; default the actor's."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning-rate schedule; default the actor's."""
    warmup_steps: NonNegative | None = None
    """Warm-up steps; default the actor's."""
    decay_steps: Positive | None = None
    """Optimizer steps at whose end min_lr is reached; default the actor's if it is given, else the whole run."""
    min_lr: Annotated[float, Field(ge=0.0)] | None = None
    """Rate at the end of a linear or cosine schedule; default the actor's."""
    clip_grad: Annotated[float, Field(ge=0.0)] | None = None
    """Largest gradient norm; default the actor's."""
    warmup_rollouts: NonNegative = 0
    """Rollouts at the start that train the critic alone."""
    value_clip: Annotated[float, Field(gt=0.0)] = 0.2
    """How far a value may move from the old one within the value loss."""


class TrainerSection(Section):
    """How gradients are computed."""

    backend: Literal["torch", "megatron"] = "torch"
    """`torch` trains a Hugging Face model; `megatron` a Megatron-core one."""
    tensor_parallel: Positive = 1
    """GPUs that share each layer's matrices."""
    pipeline_parallel: Positive = 1
    """GPUs that share the layers."""
    virtual_pipeline_parallel: Positive = 1
    """Pieces of the model on each of those GPUs, taken in turn (interleaved pipeline): shorter waits, more messages."""
    context_parallel: Positive = 1
    """GPUs that share each sequence."""
    expert_parallel: Positive = 1
    """GPUs that share the experts of each layer; must divide the GPUs of a pipeline stage."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel ranks along the sequence."""
    global_batch_size: Positive | None = None
    """Rollouts per optimizer step."""
    steps_per_rollout: Positive | None = None
    """Optimizer steps per rollout."""
    max_tokens_per_gpu: Positive = 8192
    """Tokens one micro-batch may have on one GPU."""
    overlong: Literal["warn", "error"] = "warn"
    """A sample over the token budget rides alone with a warning, or is an error."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass."""
    old_log_probs: Literal["auto", "trainer", "engine"] = "auto"
    """Where old log-probs come from; `auto` skips the pass where one step per rollout makes it redundant."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """Whether data-parallel ranks of `torch` share out weights, gradients and optimizer state (FSDP2, `full`) or hold
    copies (`none`); `auto` shares them out on GPUs."""
    offload: bool = True
    """Move optimizer state and gradients to the host while engines generate."""
    push_from: Literal["gpu", "host"] = "gpu"
    """Memory the weights are pushed from."""
    nonfinite_limit: Positive = 3
    """Skipped steps in a row after which the run stops."""


class EngineSection(Section):
    """What generates."""

    backend: Literal["local", "sglang"] = "local"
    """`local` decodes in this process; `sglang` runs servers."""
    gpus_per_engine: Positive = 1
    """GPUs of one engine."""
    num_engines: Positive | None = None
    """Engines; default as many as fit on the GPUs when colocated, else one."""
    max_running_requests: Positive = 512
    """Requests decoded at once; more wait."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the backend's own, for example {mem_fraction_static: 0.8}."""


class TransportSection(ComponentSection):
    """What carries weights to the engines; other keys are the transport's own options."""

    kind = "transport"
    name: str | None = None
    """Transport by name; default `ipc` when colocated, else `broadcast`."""
    verify: bool = False
    """Hash every tensor at both ends."""


class ClusterSection(Section):
    """Where processes run."""

    launcher: Literal["inline", "ray"] = "inline"
    """`inline` is this process; `ray` one actor per rank and engine."""
    nodes: Positive = 1
    """Machines."""
    gpus_per_node: NonNegative = 0
    """GPUs on each; 0 computes on CPUs."""
    gpu_memory_gib: Annotated[float, Field(gt=0.0)] | None = None
    """Memory of one GPU (80 for an H100, 140 for an H200): planning warns where the trainer's estimate exceeds it."""
    cpu_ranks: Positive = 1
    """Training ranks on each machine where gpus_per_node is 0; more than 1 needs launcher ray."""
    colocate: bool = True
    """Engines and trainer share the same GPUs."""
    stall_timeout: Annotated[float, Field(gt=0.0)] = 1800.0
    """Seconds a rank may stay in one phase."""


class CheckpointSection(Section):
    """What is saved, and how a run goes on."""

    save_interval: Positive | None = None
    """Rollouts between saves."""
    save_last: bool = True
    """Save at the end of the run, too."""
    keep: Positive = 2
    """Checkpoints kept."""
    resume: Literal["auto", "must", "never"] = "auto"
    """Go on from the run folder's last checkpoint: if there is one, or it is an error, or never."""
    init_from: str | None = None
    """Start weights from another run's checkpoint; not a resume."""
    allow_other_plugins: bool = False
    """Resume also where plugin distributions or their versions differ from the checkpoint's, which it lists."""


class EvalDataset(DatasetFields):
    """One held-out set."""

    name: str
    """Its name in the metrics."""
    path: str | DataSource | tuple[str | DataSource, ...]
    """As `data.path`."""
    samples_per_prompt: Positive = 1
    """Responses per prompt; with more than one, pass@k is reported."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling."""
    top_k: NonNegative = 0
    """Draw from the k likeliest tokens."""
    max_response_len: Positive | None = None
    """Tokens a response may have; default the rollout's."""
    limit: Positive | None = None
    """Use this many rows from the start."""
    reward: RewardSection | None = None
    """Its own reward; default the run's."""


class EvalSection(Section):
    """Evaluation before, during and after training."""

    interval: Positive | None = None
    """Rollouts between evaluations; null evaluates before and after only."""
    before: bool = True
    """Evaluate the starting policy."""
    datasets: tuple[EvalDataset, ...] = ()
    """Held-out sets; fields that are not given are taken from `data`."""


class WandbSection(Section):
    """Weights & Biases."""

    project: str
    """Project name."""
    entity: str | None = None
    """Team or user."""
    name: str | None = None
    """Run name; default the run folder's."""
    mode: Literal["online", "offline"] = "online"
    """`offline` keeps everything in the run folder."""


class TrackSection(Section):
    """Where metrics go, beside stdout and metrics.jsonl."""

    wandb: WandbSection | None = None
    """Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder."""
    samples_per_rollout: NonNegative = 4
    """Samples of each rollout kept in samples.jsonl."""


class PluginsSection(Section):
    """Which plugins are loaded."""

    block: tuple[str, ...] = ()
    """Plugins never imported: NAME, or DISTRIBUTION:NAME."""
    require: tuple[str, ...] = ()
    """Requirements the environment must meet, for example `my-rewards>=1.2`."""
    modules: tuple[str, ...] = ()
    """Hook modules beside the run config, loaded as plugins of their own."""


class RunConfig(Section):
    """One training run."""

    run: RunSection = Field(default_factory=RunSection)
    """Where the run lives and what seeds it."""
    model: ModelSection
    """The policy that is trained."""
    data: DataSection
    """Training prompts."""
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    """How responses are generated."""
    reward: RewardSection
    """What scores responses."""
    reference: ReferenceSection = Field(default_factory=ReferenceSection)
    """The frozen policy that the KL term compares with."""
    teacher: TeacherSection = Field(default_factory=TeacherSection)
    """The frozen policy that distillation learns from."""
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    """What turns advantages into a loss."""
    advantage: AdvantageSection = Field(default_factory=AdvantageSection)
    """What turns rewards into advantages."""
    critic: CriticSection = Field(default_factory=CriticSection)
    """The value network of PPO."""
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    """How the policy is updated."""
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    """How gradients are computed."""
    engine: EngineSection = Field(default_factory=EngineSection)
    """What generates."""
    transport: TransportSection = Field(default_factory=TransportSection)
    """What carries weights to the engines."""
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    """Where processes run."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """What is saved, and how a run goes on."""
    eval: EvalSection = Field(default_factory=EvalSection)
    """Evaluation before, during and after training."""
    track: TrackSection = Field(default_factory=TrackSection)
    """Where metrics go."""
    plugins: PluginsSection = Field(default_factory=PluginsSection)
    """Which plugins are loaded."""
