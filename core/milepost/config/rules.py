"""The rules a run config must meet beyond its types: what would otherwise be a silent wrong result is a problem here.

Each rule looks at one thing and reports through `Findings`; none stops the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, cast

from milepost.components import (
    AdvantageTraits,
    AlgorithmTraits,
    ModelLayout,
    ModelTraits,
    RewardTraits,
    TransportTraits,
)
from milepost.config.batch import BatchIdentity
from milepost.config.choices import Choice
from milepost.config.files import data_sources, resolve_path
from milepost.config.loading import Loaded
from milepost.errors import Problem


@dataclass(slots=True)
class Findings:
    """Problems and warnings of planning."""

    origin: Callable[[str], str]
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, path: str, message: str) -> None:
        """Record a problem with the value at a dotted path."""
        self.problems.append(Problem(path, message, self.origin(path)))

    def warn(self, path: str, message: str) -> None:
        """Record something that a user should know before starting."""
        self.warnings.append(str(Problem(path, message, self.origin(path))))


@dataclass(frozen=True, slots=True)
class Roles:
    """Which roles the run has beside the actor."""

    critic: bool
    reference: bool
    teacher: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """How many ranks train and how many engines generate."""

    world_size: int
    data_parallel: int
    num_engines: int


def algorithm_traits(loaded: Loaded) -> AlgorithmTraits:
    """Return the traits of the chosen algorithm."""
    return cast("AlgorithmTraits", loaded.choices["algorithm"].component.traits)


def advantage_traits(loaded: Loaded) -> AdvantageTraits:
    """Return the traits of the chosen advantage estimator."""
    return cast("AdvantageTraits", loaded.choices["advantage"].component.traits)


def check_sampling(loaded: Loaded, found: Findings) -> None:
    """Refuse samplers that draw from another distribution than the trainer scores."""
    rollout = loaded.config.rollout
    why = "is for evaluation: the trainer scores the whole distribution, so training samples must be drawn from it"
    if rollout.temperature == 0:
        found.problem("rollout.temperature", f"0 (greedy) {why}; give a temperature above 0")
    for key, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(rollout, key)
        if value != neutral:
            found.problem(f"rollout.{key}", f"{value} {why}; leave it at {neutral}")


def check_lengths(loaded: Loaded, layout: ModelLayout, found: Findings) -> int:
    """Compare length limits with each other and with the model's positions; return the context length."""
    config = loaded.config
    rollout = config.rollout
    context = rollout.max_context_len or layout.max_positions
    whose = "rollout.max_context_len" if rollout.max_context_len else "the model's positions,"
    if context > layout.max_positions:
        found.problem("rollout.max_context_len", f"{context} is more than the model's {layout.max_positions} positions")
    limits = [("rollout.max_response_len", rollout.max_response_len)]
    for index, dataset in enumerate(config.eval.datasets):
        if dataset.max_response_len is not None:
            limits.append((f"eval.datasets.{index}.max_response_len", dataset.max_response_len))
    for path, length in limits:
        if length >= context:
            found.problem(path, f"{length} leaves no room for a prompt within {whose} {context}")
    prompt = config.data.max_prompt_len
    if prompt is not None and rollout.max_response_len < context < prompt + rollout.max_response_len:
        found.warn(
            "data.max_prompt_len",
            f"{prompt} prompt and {rollout.max_response_len} response tokens exceed {whose} {context}: "
            "responses to long prompts are cut short",
        )
    overlong = config.reward.overlong
    if overlong is not None and overlong.buffer > rollout.max_response_len:
        found.problem(
            "reward.overlong.buffer",
            f"{overlong.buffer} is more than rollout.max_response_len {rollout.max_response_len}, at which it ends; "
            "give a fraction of that",
        )
    budget = config.trainer.max_tokens_per_gpu * config.trainer.context_parallel
    if rollout.max_response_len >= budget:
        consequence = "stop the run" if config.trainer.overlong == "error" else "ride alone in a micro-batch"
        found.warn(
            "trainer.max_tokens_per_gpu",
            f"the token budget of a micro-batch is {budget}, a response may have {rollout.max_response_len} tokens: "
            f"samples over the budget {consequence}",
        )
    return context


def check_groups(loaded: Loaded, batch: BatchIdentity, found: Findings) -> None:
    """Want two or more samples per prompt where samples of a group are compared."""
    if batch.samples_per_prompt >= 2:
        return
    for kind in ("algorithm", "advantage"):
        choice = loaded.choices[kind]
        if getattr(choice.component.traits, "group", False):
            found.problem(
                "rollout.samples_per_prompt",
                f"{kind} {choice.name!r} compares the samples of a prompt, so it wants 2 or more; "
                f"got {batch.samples_per_prompt}",
            )
            return


def check_roles(loaded: Loaded, found: Findings) -> Roles:
    """Decide which roles are needed, and whether what they need is there."""
    config = loaded.config
    algorithm, advantage = algorithm_traits(loaded), advantage_traits(loaded)
    estimator = loaded.choices["advantage"].name
    reads = advantage.reads(loaded.choices["advantage"].options)
    critic = algorithm.critic or "values" in reads
    reference = algorithm.reference or config.algorithm.kl_loss_coef > 0 or "ref_log_probs" in reads
    if critic:
        if not advantage.returns:
            found.problem(
                "advantage.name",
                f"estimator {estimator!r} gives no returns, which the critic is trained on; use one that does (gae)",
            )
        late = sorted({"log_probs", "ref_log_probs"} & reads)
        if late:
            found.problem(
                "advantage.name",
                f"estimator {estimator!r} reads {' and '.join(late)}, which do not exist yet when the critic trains; "
                "use algorithm.kl_loss_coef for a KL term",
            )
        if not config.trainer.offload:
            found.warn("trainer.offload", "actor and critic share their GPUs; without offload both must fit at once")
    elif any(loaded.origin(f"critic.{key}") for key in type(config.critic).model_fields):
        name = loaded.choices["algorithm"].name
        found.warn("critic", f"has no effect: algorithm {name!r} with estimator {estimator!r} has no critic")
    if not reference and config.reference.path is not None:
        found.warn("reference.path", "has no effect: algorithm.kl_loss_coef is 0 and nothing else reads a reference")
    if algorithm.teacher and config.teacher.path is None:
        name = loaded.choices["algorithm"].name
        found.problem("teacher.path", f"required, but not given: algorithm {name!r} learns from a teacher")
    if not algorithm.teacher and config.teacher.path is not None:
        found.warn("teacher.path", f"has no effect: algorithm {loaded.choices['algorithm'].name!r} has no teacher")
    return Roles(critic, reference, algorithm.teacher)


def check_role_models(
    loaded: Loaded, model: Choice | None, vocab_size: int | None, roles: Roles, found: Findings
) -> None:
    """Check that the other roles' checkpoints can stand beside the actor's: one recipe loads them all.

    Reference and teacher score the actor's tokens, so they need its vocabulary.
    """
    if model is None:
        return
    config = loaded.config
    places = (
        ("critic.init_from", roles.critic, config.critic.init_from, False),
        ("reference.path", roles.reference, config.reference.path, True),
        ("teacher.path", roles.teacher, config.teacher.path, True),
    )
    served = cast("ModelTraits", model.component.traits).architectures
    for path, needed, text, scores in places:
        file = resolve_path(text, loaded.base_dir) / "config.json" if needed and text is not None else None
        if file is None or not file.is_file():
            continue
        try:
            described = json.loads(file.read_text(encoding="utf-8"))
            layout = cast("ModelTraits", model.component.traits).layout(described)
            architecture = described["architectures"][0]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            found.problem(path, f"recipe {model.name!r} cannot read {file}: {error!r}; give a checkpoint of its kind")
            continue
        if "*" not in served and architecture not in served:
            found.problem(
                path,
                f"{file} is of architecture {architecture}, which the actor's recipe {model.name!r} does not serve "
                f"(it serves {', '.join(served)}); give a checkpoint of the same family",
            )
        elif scores and vocab_size is not None and layout.vocab_size != vocab_size:
            found.problem(
                path,
                f"{file} has a vocabulary of {layout.vocab_size}, the actor's is {vocab_size}; "
                "log-probs can only be compared under one tokenizer",
            )


def check_placement(loaded: Loaded, layout: ModelLayout | None, model: Choice | None, found: Findings) -> Placement:
    """Divide the cluster between ranks and engines, and the model between ranks."""
    config = loaded.config
    cluster, trainer, engine = config.cluster, config.trainer, config.engine
    total = cluster.nodes * (cluster.gpus_per_node or cluster.cpu_ranks)
    if cluster.gpus_per_node > 0 and cluster.cpu_ranks > 1:
        found.problem(
            "cluster.cpu_ranks",
            f"{cluster.cpu_ranks}, but there is a rank on each of the {cluster.gpus_per_node} GPUs of a machine; "
            "leave it at 1, or set cluster.gpus_per_node: 0",
        )
    if cluster.launcher == "inline" and total > 1:
        keys = ("gpus_per_node", "cpu_ranks", "nodes")
        path = next(f"cluster.{key}" for key in keys if getattr(cluster, key) > 1)
        devices = f"{cluster.gpus_per_node} GPUs" if cluster.gpus_per_node else f"{cluster.cpu_ranks} CPU ranks"
        found.problem(
            path,
            f"launcher inline is one process on one device, got {cluster.nodes} x {devices}; use cluster.launcher: ray",
        )
        total = 1
    if cluster.launcher == "inline" and engine.backend == "local" and (engine.num_engines or 1) > 1:
        found.problem(
            "engine.num_engines", f"{engine.num_engines}, but launcher inline runs one local engine; use launcher: ray"
        )
    if cluster.launcher == "inline" and not cluster.colocate:
        found.problem(
            "cluster.colocate", "false, but launcher inline has one device for all; use cluster.launcher: ray"
        )
    if config.run.device == "cpu" and cluster.gpus_per_node > 0:
        found.problem("run.device", f"cpu contradicts cluster.gpus_per_node {cluster.gpus_per_node}; give one of them")
    transport = cast("TransportTraits", loaded.choices["transport"].component.traits)
    name = loaded.choices["transport"].name
    if transport.colocated == "required" and not cluster.colocate:
        found.problem("transport.name", f"transport {name!r} needs cluster.colocate: true, which is false")
    if transport.colocated == "forbidden" and cluster.colocate:
        found.problem("transport.name", f"transport {name!r} cannot be colocated; set cluster.colocate: false")
    world, engines = _divide(loaded, total, found)
    model_parallel = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel
    if trainer.backend == "torch":
        for key in ("tensor", "pipeline", "virtual_pipeline", "context", "expert"):
            key = f"{key}_parallel"
            if getattr(trainer, key) > 1:
                found.problem(f"trainer.{key}", "is above 1, which the torch backend cannot do; use backend: megatron")
        if loaded.config.model.converted is not None:
            found.warn("model.converted", "has no effect: the torch backend reads the checkpoint itself")
        if trainer.sharding == "full" and world == 1:
            found.warn("trainer.sharding", "full has no effect: there is one rank, which holds everything")
    elif world % model_parallel:
        found.problem(
            "trainer.tensor_parallel",
            f"tensor {trainer.tensor_parallel} x pipeline {trainer.pipeline_parallel} x context "
            f"{trainer.context_parallel} = {model_parallel} does not divide the {world} training ranks",
        )
    if trainer.backend != "torch" and trainer.sharding != "auto":
        message = f"{trainer.sharding} is for backend: torch; megatron shares out the optimizer's state by itself"
        found.problem("trainer.sharding", f"{message}: leave it at auto")
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        found.problem("trainer.sequence_parallel", "needs trainer.tensor_parallel above 1")
    if engine.backend == "local" and engine.gpus_per_engine > 1:
        found.problem("engine.gpus_per_engine", f"{engine.gpus_per_engine}, but a local engine runs on one device")
    if layout is not None and model is not None:
        _check_model_split(loaded, layout, model, world, found)
    return Placement(world, max(1, world // model_parallel), engines)


def _divide(loaded: Loaded, total: int, found: Findings) -> tuple[int, int]:
    """Return the number of training ranks and of engines."""
    cluster, engine = loaded.config.cluster, loaded.config.engine
    size = engine.gpus_per_engine
    if cluster.gpus_per_node == 0:
        if size > 1:
            found.problem("engine.gpus_per_engine", f"{size}, but cluster.gpus_per_node is 0: engines are on CPUs")
        return total, engine.num_engines or 1
    if cluster.gpus_per_node % size and (size > cluster.gpus_per_node or cluster.nodes > 1):
        found.problem(
            "engine.gpus_per_engine",
            f"{size} does not divide the {cluster.gpus_per_node} GPUs of a machine, and an engine's GPUs are of one",
        )
        return total, engine.num_engines or 1
    if cluster.colocate:
        engines = engine.num_engines or max(1, total // size)
        if total % size or engines * size > total:
            found.problem(
                "engine.gpus_per_engine", f"{engines} engines of {size} GPUs do not fit evenly on the {total} GPUs"
            )
        return total, engines
    engines = engine.num_engines or 1
    world = total - engines * size
    if world < 1:
        found.problem(
            "cluster.colocate",
            f"false gives engines GPUs of their own: {engines} of {size} take all of the {total} GPUs, none is left "
            "to train",
        )
    return max(world, 1), engines


def _check_model_split(loaded: Loaded, layout: ModelLayout, model: Choice, world: int, found: Findings) -> None:
    """Check that the model can be cut the way the trainer is to cut it."""
    trainer = loaded.config.trainer
    if trainer.backend != "megatron":
        return
    if not cast("ModelTraits", model.component.traits).megatron:
        found.problem(
            "trainer.backend", f"megatron, but recipe {model.name!r} has no Megatron half; use backend: torch"
        )
    for what, count in (("attention heads", layout.num_heads), ("key-value groups", layout.num_kv_heads)):
        if count % trainer.tensor_parallel:
            found.problem(
                "trainer.tensor_parallel", f"{trainer.tensor_parallel} does not divide the model's {count} {what}"
            )
    pipeline, pieces = trainer.pipeline_parallel, trainer.virtual_pipeline_parallel
    if pieces > 1 and pipeline == 1:
        found.problem("trainer.virtual_pipeline_parallel", f"{pieces}, which needs trainer.pipeline_parallel above 1")
    elif layout.num_layers % (pipeline * pieces):
        key = "pipeline_parallel" if layout.num_layers % pipeline else "virtual_pipeline_parallel"
        stages = f"{pipeline} stages" + (f" of {pieces} pieces" if pieces > 1 else "")
        found.problem(
            f"trainer.{key}",
            f"{stages} do not divide the model's {layout.num_layers} layers; choose one that does",
        )
    if max(layout.num_experts, 1) % trainer.expert_parallel:
        found.problem(
            "trainer.expert_parallel", f"{trainer.expert_parallel} does not divide {layout.num_experts} experts"
        )
    elif world // pipeline % trainer.expert_parallel:
        found.problem(
            "trainer.expert_parallel",
            f"{trainer.expert_parallel} does not divide the {world // pipeline} ranks of a pipeline stage (tensor x "
            "context x data parallel), which share the experts; choose one that does",
        )
    if layout.num_experts and trainer.tensor_parallel > 1 and not trainer.sequence_parallel:
        found.problem(
            "trainer.sequence_parallel", "a model with experts needs it under tensor parallelism; set it to true"
        )


def check_optimizer(loaded: Loaded, num_steps: int, critic_steps: int | None, found: Findings) -> None:
    """Check that the learning-rate schedules have a shape: the actor's, and the critic's if it has steps to take."""
    optimizer, critic = loaded.config.optimizer, loaded.config.critic
    keys = ("lr", "schedule", "warmup_steps", "decay_steps", "min_lr")
    of_actor = {f"optimizer.{key}": getattr(optimizer, key) for key in keys}
    _check_schedule(of_actor, num_steps, found)
    if critic_steps is None:
        return
    of_critic = {}
    for key, actors in zip(keys, of_actor.items(), strict=True):
        own = getattr(critic, key)
        path, value = actors if own is None else (f"critic.{key}", own)
        of_critic[path] = value
    if of_critic.keys() != of_actor.keys():
        _check_schedule(of_critic, critic_steps, found)


def _check_schedule(settings: Mapping[str, Any], num_steps: int, found: Findings) -> None:
    """Check one schedule, given by where its lr, schedule, warmup_steps, decay_steps and min_lr come from."""
    (lr_path, lr), (_, schedule), (warmup_path, warmup), (_, decay), (min_path, min_lr) = settings.items()
    if schedule != "constant":
        if warmup >= (decay or num_steps):
            found.problem(
                warmup_path, f"{warmup} leaves nothing of the {decay or num_steps} steps at whose end min_lr is reached"
            )
        if min_lr > lr:
            found.problem(min_path, f"{min_lr} is above {lr_path} {lr}")
    elif warmup > num_steps:
        found.warn(warmup_path, f"{warmup}, but the run has only {num_steps} steps")


def check_correction(loaded: Loaded, found: Findings) -> None:
    """Check the bounds of the importance correction, and that both log-probs it compares exist."""
    correction = loaded.config.algorithm.correction
    if correction is None:
        return
    if correction.low >= correction.high:
        found.problem("algorithm.correction.low", f"{correction.low} must be below high, which is {correction.high}")
    if loaded.config.trainer.old_log_probs == "engine":
        found.problem(
            "algorithm.correction",
            "compares the trainer's log-probs with the engine's, but trainer.old_log_probs: engine takes the engine's "
            "for both; use auto or trainer",
        )


def check_data(loaded: Loaded, found: Findings) -> None:
    """Check fields of the data sections that depend on one another, and names of held-out sets."""
    config = loaded.config
    sections = [("data", config.data), *((f"eval.datasets.{i}", d) for i, d in enumerate(config.eval.datasets))]
    for path, section in sections:
        given = section.model_fields_set
        templated = section.chat_template if "chat_template" in given else config.data.chat_template
        for key in ("system", "chat_template_args"):
            if key in given and getattr(section, key) and not templated:
                found.problem(f"{path}.{key}", "has an effect only with chat_template: true")
        if getattr(section, "path", None) == ():
            found.problem(f"{path}.path", "expected at least one source, got an empty list")
    for path, source in data_sources(config):
        if source.weight != 1 and not path.startswith("data."):
            found.problem(f"{path}.weight", "has an effect on training prompts only; remove it")
    names = [dataset.name for dataset in config.eval.datasets]
    for index, name in enumerate(names):
        if name in names[:index]:
            first = names.index(name)
            found.problem(
                f"eval.datasets.{index}.name",
                f"{name!r} is already the name of eval.datasets.{first}; metrics need names of their own",
            )
        if not name or any(character in name for character in "/ \t\n"):
            found.problem(f"eval.datasets.{index}.name", f"{name!r} names metrics: no spaces, no slashes, not empty")
        reward = config.eval.datasets[index].reward
        if reward is not None and reward.overlong is not None:
            found.problem(
                f"eval.datasets.{index}.reward.overlong", "shapes the rewards trained on alone; remove it here"
            )
    if config.eval.interval and not names:
        found.warn("eval.interval", "has no effect: eval.datasets is empty")


def check_labels(loaded: Loaded, found: Findings) -> None:
    """Check that rewards which compare with a label get one."""
    config = loaded.config
    reward = loaded.choices["reward"]
    places = [("data.label", config.data.label, reward)]
    for index, dataset in enumerate(config.eval.datasets):
        label = dataset.label if "label" in dataset.model_fields_set else config.data.label
        places.append(
            (f"eval.datasets.{index}.label", label, loaded.choices.get(f"eval.datasets.{index}.reward", reward))
        )
    for path, label, choice in places:
        if label is None and cast("RewardTraits", choice.component.traits).needs_label:
            found.problem(path, f"null, but reward {choice.name!r} compares responses with a label; name its field")


def check_requirements(loaded: Loaded, found: Findings) -> None:
    """Check `plugins.require` against the installed distributions."""
    for text in loaded.config.plugins.require:
        # Only runs that pin plugins need a parser for version specifiers.
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            found.problem("plugins.require", f"{text!r} is not a requirement such as `my-rewards>=1.2`: {error}")
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found.problem("plugins.require", f"{text!r} is not met: {requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.problem("plugins.require", f"{text!r} is not met: {requirement.name} {version} is installed")
