"""What a plugin provides: `Component` records, and the traits planning may use of each kind.

Nothing here imports torch: planning runs on traits alone. The protocols name what `build` must return; their tensor
types live in `milepost.training` and `milepost.rollout`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

    from milepost.config.plan import Plan
    from milepost.recipe import Recipe
    from milepost.samples import Sample
    from milepost.training.inputs import AdvantageBatch, Estimate, PolicyInputs, TokenLoss, ValueInputs
    from milepost.weights.transport import Address, EngineInfo, Receiver, Sender, World

Kind = Literal["algorithm", "advantage", "reward", "model", "transport"]
KINDS: tuple[Kind, ...] = ("algorithm", "advantage", "reward", "model", "transport")

Aggregation = Literal["sample_mean", "token_mean", "constant"]
AdvantageInput = Literal["rewards", "token_rewards", "values", "log_probs", "ref_log_probs"]

T_co = TypeVar("T_co", covariant=True)


class Options(BaseModel):
    """Base class for a component's options: unknown keys are rejected and a built value never changes.

    A string below a field is its description. pydantic works on an options model (validators, schema, descriptions)
    when it is first used, not when its module is imported, so that many plugins can be listed at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Take descriptions from the source; pydantic's `use_attribute_docstrings` does so at import, for 1 ms each."""
        for owner in cls.__mro__:
            undescribed = [name for name, info in cls.model_fields.items() if info.description is None]
            if undescribed and "__annotations__" in vars(owner) and issubclass(owner, Options):
                documented = attribute_docs(owner)
                for name in documented.keys() & undescribed:
                    cls.model_fields[name].description = documented[name]
        return handler(source)


def attribute_docs(owner: type) -> dict[str, str]:
    """Return the string below each annotated attribute in the source of a class; nothing where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):
        return {}
    found = {}
    for statement, below in pairwise(cast("ast.ClassDef", tree.body[0]).body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found


class NoOptions(Options):
    """Options of a component that has none."""


@dataclass(frozen=True, slots=True)
class AlgorithmTraits:
    """What planning needs to know of an algorithm."""

    advantage: str = "group"
    """Estimator used when the run config names none."""
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of that default estimator, overridden by the run config's."""
    aggregation: Aggregation = "sample_mean"
    """How token losses become one where the run config does not say."""
    critic: bool = False
    """Needs a value network."""
    reference: bool = False
    """Needs reference log-probs whatever the KL coefficient."""
    teacher: bool = False
    """Needs teacher log-probs."""
    group: bool = False
    """Makes no sense with fewer than two samples per prompt."""
    check: Callable[[Plan, Any], Iterable[str]] | None = None
    """`check(plan, options)` yields one message per thing the algorithm cannot work with."""


@dataclass(frozen=True, slots=True)
class AdvantageTraits:
    """What planning needs to know of an advantage estimator."""

    inputs: frozenset[AdvantageInput] = frozenset({"rewards"})
    """What the estimator reads; anything else is absent from its batch."""
    more_inputs: Callable[[Any], Iterable[AdvantageInput]] | None = None
    """`more_inputs(options)`: what it reads beside `inputs` only with some options, so that it is not made for nothing
    with others: a reference policy for a coefficient that is 0."""
    group: bool = False
    """Compares the samples of a group, so it wants two or more."""
    returns: bool = False
    """Also gives returns, which a critic is trained on."""
    check: Callable[[Plan, Any], Iterable[str]] | None = None
    """`check(plan, options)` yields one message per thing the estimator cannot work with."""

    def reads(self, options: Any) -> frozenset[AdvantageInput]:
        """Return everything that the estimator reads with these options."""
        return self.inputs if self.more_inputs is None else self.inputs | frozenset(self.more_inputs(options))


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """What planning needs to know of a reward."""

    scope: Literal["sample", "group"] = "sample"
    """Whether it scores samples one by one (`score`) or a whole group at once (`score_group`)."""
    needs_label: bool = True
    """Compares with the label, so that data without one is refused."""
    check: Callable[[Plan, Any], Iterable[str]] | None = None
    """`check(plan, options)` yields one message per thing the reward cannot work with."""


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The numbers of a model that planning uses, read from its `config.json`."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int
    tied_embeddings: bool
    max_positions: int
    num_experts: int = 0
    feed_forward: int = 0
    """Columns of the feed-forward that a token passes, of all experts that it visits; 0 lets planning derive them."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    expert_parameters: int = 0
    """Of num_parameters, those of experts, which expert parallelism spreads."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What planning needs to know of a model recipe; everything is read from `config.json` in plain Python."""

    architectures: tuple[str, ...]
    """Hugging Face architecture names this recipe serves; `("*",)` is the fallback for all others."""
    layout: Callable[[Mapping[str, Any]], ModelLayout]
    """`layout(config)`; raises ValueError naming a value it does not understand."""
    train_flops: Callable[[ModelLayout, int], float]
    """`train_flops(layout, length)`: floating-point operations of forward and backward over one sequence."""
    megatron: bool = False
    """Whether the recipe has a Megatron half."""


@dataclass(frozen=True, slots=True)
class TransportTraits:
    """What planning needs to know of a weight transport."""

    colocated: Literal["required", "forbidden", "either"] = "either"
    """Whether engines and trainer share their GPUs: must, may not, or may."""
    tensors: Literal["full", "shards"] = "full"
    """What it asks of the weight source: whole Hugging Face tensors or shards of them."""
    check: Callable[[Plan, Any], Iterable[str]] | None = None
    """`check(plan, options)` yields one message per thing the transport cannot work with."""


Traits = AlgorithmTraits | AdvantageTraits | RewardTraits | ModelTraits | TransportTraits
TRAITS: dict[Kind, type[Any]] = {
    "algorithm": AlgorithmTraits,
    "advantage": AdvantageTraits,
    "reward": RewardTraits,
    "model": ModelTraits,
    "transport": TransportTraits,
}

KERNEL_KEYS: dict[Kind, frozenset[str]] = {
    "algorithm": frozenset({"name", "aggregation", "kl_loss_coef", "kl_loss_type", "entropy_coef", "correction"}),
    "advantage": frozenset({"name"}),
    "reward": frozenset(
        {"name", "timeout", "on_error", "error_budget", "workers", "placement", "memory_gb", "overlong"}
    ),
    "model": frozenset(),
    "transport": frozenset({"name", "verify"}),
}
"""Keys of each kind's config section that are the kernel's; no component's options may define them.

They are the declared fields of the sections in `milepost.config.schema`. Written out here because importing the schema
costs more than all of plugin discovery; a test holds the two together.
"""


@dataclass(frozen=True, slots=True)
class Component(Generic[T_co]):
    """One named implementation: what it is called, how it is configured, how it is built.

    `build` receives a validated instance of `options` and is the place to import the heavy half.
    """

    name: str
    options: type[BaseModel]
    traits: Traits
    build: Callable[[Any], T_co]
    summary: str


class Algorithm(Protocol):
    """Turns log-probs and advantages into one loss value per token."""

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return one unmasked loss value per local token, and metrics that are not yet reduced."""
        ...


@runtime_checkable
class HasValueLoss(Protocol):
    """An algorithm that brings its own critic loss."""

    def value_loss(self, inputs: ValueInputs) -> TokenLoss:
        """Return one unmasked loss value per local token, and metrics that are not yet reduced."""
        ...


class AdvantageEstimator(Protocol):
    """Turns rewards (and values, log-probs) of a whole rollout into advantages."""

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        """Return advantages for every token of the rollout, and returns where a critic is to learn them."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores one sample; may be `async`. A mapping gives several named rewards, of which `reward` is trained on."""

    def score(self, sample: Sample) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float]]:
        """Return the score of one finished sample."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """Scores all samples of one prompt together; may be `async`."""

    def score_group(self, samples: Sequence[Sample]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return one score per sample, in order."""
        ...


class Transport(Protocol):
    """Carries weights from trainer ranks to engines; see `milepost.weights.transport` for the three sides."""

    def open(self, world: World, engines: Sequence[EngineInfo]) -> Address:
        """Controller side: agree on how ranks reach engines. The address must survive pickling."""
        ...

    def sender(self, address: Address, rank: int) -> Sender:
        """Trainer-rank side, called on every rank, also on those that send nothing."""
        ...

    def receiver(self, address: Address, engine: int) -> Receiver | None:
        """Engine side, for transports that need code there; None where the engine's own calls do."""
        ...


AlgorithmComponent: TypeAlias = "Component[Algorithm]"
AdvantageComponent: TypeAlias = "Component[AdvantageEstimator]"
RewardComponent: TypeAlias = "Component[Reward | GroupReward]"
ModelComponent: TypeAlias = "Component[Recipe]"
TransportComponent: TypeAlias = "Component[Transport]"
