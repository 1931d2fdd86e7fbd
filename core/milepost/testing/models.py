"""The promises of a model recipe, tried on a tiny checkpoint of its family."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from milepost.components import Component, ModelLayout, ModelTraits
from milepost.recipe import Decoder, HFModel, MegatronModel, Recipe
from milepost.testing.checkpoints import config_of, make_checkpoint, prompts_for, read_config, stir, tiny_config
from milepost.testing.findings import Finding, Findings, find_subject
from milepost.training.packing import Layout
from milepost.weights.conversion import all_layers
from milepost.weights.source import ModuleSource

FALLBACK_ARCHITECTURE = "LlamaForCausalLM"
"""What a recipe for every architecture (`*`) is tried on."""
LENGTHS = (5, 9, 1, 4)
CLOSE = 1e-4
"""Largest difference of log-probs that another order of float32 sums explains in a tiny model."""
CPU = torch.device("cpu")


def check_model(
    recipe: str | Component[Recipe] | Recipe,
    options: Mapping[str, Any] | None = None,
    *,
    traits: ModelTraits | None = None,
    config: Mapping[str, Any] | Path | str | None = None,
    seed: int = 0,
) -> list[Finding]:
    """Try every promise of a model recipe and return those that were not kept.

    A tiny checkpoint is made for each architecture the recipe serves, or from the `config` that is given.

    - The layout read from `config.json` is the real model's, its number of parameters included; a config without what
      it needs raises ValueError that names the key; `train_flops` grows with the length, and faster than it.
    - `hf.load` gives the checkpoint's weights, bit for bit and under its names, and body, head, scale and softcap
      give the model's own logits.
    - Samples packed into one row get the log-probs they get one by one.
    - The decoder's log-probs, through prefill, shared prompts, steps and a growing cache, are those of a full forward;
      also after a push of other weights.
    - A weight round trip through the weight source and the decoder is bit-exact, in whatever order and portions the
      tensors come. A tensor that is missing, unknown or of another shape is an error.
    - Where there is a Megatron half its rules take every tensor of the checkpoint there and back, bit for bit, on one
      rank and on two; the traits say whether there is one.
    - Options survive pickling and JSON.

    Args:
        recipe: registered name, component, or a built recipe.
        options: of the component.
        traits: of a built recipe; taken from the component otherwise.
        config: a `config.json` (its content, its path, or its folder's) instead of those of transformers' own
            defaults; its sizes are made tiny.
        seed: of the weights.

    Returns:
        Findings; empty where all promises are kept.

    Raises:
        PluginError: there is no such component, or it cannot be built.
        ValueError: options were given beside a built recipe, a built recipe without traits, or an architecture is not
            known to transformers and no config was given.
    """
    subject = find_subject("model", recipe, options)
    known = subject.traits if isinstance(subject.traits, ModelTraits) else traits
    if known is None:
        raise ValueError("a built recipe was given without traits; pass traits=ModelTraits(...), or the component")
    findings = Findings()
    findings.check_options(subject)
    if config is None:
        names = [FALLBACK_ARCHITECTURE if name == "*" else name for name in known.architectures]
        configs = [config_of(name) for name in names]
    else:
        configs = [read_config(Path(config)) if isinstance(config, str | Path) else dict(config)]
    for given in configs:
        tiny = tiny_config(given)
        with tempfile.TemporaryDirectory(prefix="milepost-check-") as folder:
            model = make_checkpoint(tiny, Path(folder), seed)
            # What transformers wrote is what a recipe reads.
            case = f"a tiny {type(model).__name__}"
            _Check(findings, subject.built, known, model, Path(folder), read_config(Path(folder)), case, seed).run()
    return list(findings)


@dataclass(frozen=True, slots=True)
class _Check:
    """One recipe on one checkpoint."""

    findings: Findings
    recipe: Recipe
    traits: ModelTraits
    model: Any
    """The transformers model: what the recipe is compared with."""
    folder: Path
    config: Mapping[str, Any]
    case: str
    seed: int

    def run(self) -> None:
        self._check_layout()
        loaded = None
        with self.findings.surviving("hf half loads", self.case):
            loaded = self.recipe.hf.load(self.folder, torch.float32, CPU)
        if loaded is not None:
            self._check_load(loaded)
            with self.findings.surviving("the model's own logits", self.case), torch.no_grad():
                self._check_logits(loaded)
        decoder = None
        with self.findings.surviving("decoder", self.case):
            decoder = self.recipe.hf.decoder(self.config, torch.float32, CPU)
        if decoder is not None and loaded is not None:
            _DecoderCheck(
                self.findings, self.recipe, self.model, loaded, decoder, self.config, self.case, self.seed
            ).run()
        self._check_megatron()

    # The layout

    def _check_layout(self) -> None:
        promise = "layout"
        with self.findings.surviving(promise, self.case):
            layout = self.traits.layout(self.config)
            for name, expected in _real_layout(self.model).items():
                got = getattr(layout, name)
                self.findings.require(got == expected, promise, self.case, f"{name} {expected}", got)
            self._check_flops(layout)
        for key in ("hidden_size", "n_embd", "num_hidden_layers", "n_layer"):
            if key in self.config:
                self._check_missing(key)

    def _check_flops(self, layout: ModelLayout) -> None:
        promise, case = "training FLOPs", f"{self.case}, 100 and 200 tokens"
        short, long = (self.traits.train_flops(layout, length) for length in (100, 200))
        sound = 0 < short < math.inf and 2 * short < long < 4 * short
        self.findings.require(
            sound,
            promise,
            case,
            "more than twice and less than four times as many for twice as many tokens",
            (short, long),
        )

    def _check_missing(self, key: str) -> None:
        """A config that lacks something is refused by name, never read as something else."""
        promise, case = "layout names what is missing", f"{self.case}, config.json without {key}"
        broken = {name: value for name, value in self.config.items() if name != key}
        try:
            got = f"layout {self.traits.layout(broken)}"
        except ValueError as error:
            self.findings.require(key in str(error), promise, case, f"a ValueError that names {key}", error)
            return
        except Exception as error:  # noqa: BLE001 - the check outlives what it checks, and reports it
            got = f"{type(error).__name__}: {error}"
        self.findings.append(Finding(promise, case, f"a ValueError that names {key}", got))

    # The hf half

    def _check_load(self, loaded: HFModel) -> None:
        promise = "weights under the checkpoint's names"
        with self.findings.surviving(promise, self.case):
            source = dict(ModuleSource(loaded.model).tensors())
            expected = dict(ModuleSource(self.model).tensors())
            self.findings.require(
                sorted(source) == sorted(expected),
                promise,
                self.case,
                _names(expected, source),
                _names(source, expected),
            )
            changed = [name for name in source if name in expected and not _same_bits(source[name], expected[name])]
            self.findings.require(
                not changed, "bit-exact load", self.case, "the checkpoint's bits", f"others in {', '.join(changed[:3])}"
            )
        promise = "output head"
        with self.findings.surviving(promise, self.case):
            shape = tuple(self.model.get_output_embeddings().weight.shape)
            got = tuple(cast("Tensor", loaded.head.weight).shape)
            self.findings.require(got == shape, promise, self.case, f"a head.weight of shape {shape}", got)

    def _check_logits(self, loaded: HFModel) -> None:
        prompts = prompts_for(self._vocab_size, LENGTHS, self.seed)
        alone = [_log_probs(loaded, [prompt]) for prompt in prompts]
        for prompt, got in zip(prompts, alone, strict=True):
            case = f"{self.case}, {len(prompt)} tokens"
            _close(self.findings, "the model's own logits", case, _forward(self.model, prompt), got)
        for order in (range(len(prompts)), reversed(range(len(prompts)))):
            places = list(order)
            case = f"{self.case}, lengths {[len(prompts[place]) for place in places]} in one row"
            with self.findings.surviving("packed equals separate", case):
                packed = _log_probs(loaded, [prompts[place] for place in places])
                expected = torch.cat([alone[place] for place in places])
                _close(self.findings, "packed equals separate", case, expected, packed)

    @property
    def _vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    # The Megatron half

    def _check_megatron(self) -> None:
        promise, half = "megatron half", self.recipe.megatron
        declared = self.traits.megatron
        self.findings.require(
            declared == (half is not None),
            promise,
            "the traits",
            f"megatron={half is not None}, as it was built",
            f"megatron={declared}",
        )
        if half is None:
            return
        with self.findings.surviving(promise, self.case):
            self._check_conversions(half.describe(self.config))

    def _check_conversions(self, megatron: MegatronModel) -> None:
        """Play the rules forwards and backwards on the checkpoint's tensors, whole and in two shards."""
        promise = "megatron conversions"
        tensors = dict(ModuleSource(self.model).tensors())
        layers = int(megatron.transformer["num_layers"])
        used: list[str] = []
        for size in (1, 2):
            for rule in all_layers(megatron.conversions, layers):
                case = f"{self.case}, {rule.megatron} on {size} ranks"
                with self.findings.surviving(promise, case):
                    whole = [tensors[part.name] for part in rule.parts]
                    shards = []
                    for rank in range(size):
                        cuts = [
                            tensor[tuple(slice(*bounds) for bounds in rule.cut(part, rank, size))]
                            for part, tensor in zip(rule.parts, whole, strict=True)
                        ]
                        shards.append(rule.merge(cuts, size))
                    for part, before, after in zip(rule.parts, whole, rule.join(shards), strict=True):
                        self.findings.require(
                            _same_bits(before, after), promise, case, f"{part.name} bit for bit", "something else"
                        )
                used += [part.name for part in rule.parts] if size == 1 else []
        self.findings.require(
            sorted(used) == sorted(tensors),
            promise,
            self.case,
            f"every tensor of the checkpoint once; {_names(tensors, used)}",
            _names(used, tensors),
        )


@dataclass(frozen=True, slots=True)
class _DecoderCheck:
    """The recipe's decoder beside the full forward of transformers."""

    findings: Findings
    recipe: Recipe
    model: Any
    loaded: HFModel
    decoder: Decoder
    config: Mapping[str, Any]
    case: str
    seed: int

    def run(self) -> None:
        tensors = list(ModuleSource(self.loaded.model).tensors())
        with self.findings.surviving("decoder", self.case):
            self._load(self.decoder, [tensors])
            self._check_log_probs("decoder log-probs", self.case)
        with self.findings.surviving("bit-exact weight round trip", self.case):
            self._check_round_trip(tensors)
        self._check_refusals(tensors)
        with self.findings.surviving("new weights", self.case), torch.no_grad():
            stir(self.loaded.model.parameters(), self.seed + 1)
            weights = dict(ModuleSource(self.loaded.model).tensors())
            for name, tensor in ModuleSource(self.model).tensors():
                tensor.copy_(weights[name])
            self._load(self.decoder, [[pair] for pair in weights.items()])
            self._check_log_probs("new weights", f"{self.case}, after a push of other weights")

    def _load(self, decoder: Decoder, portions: Sequence[Sequence[tuple[str, Tensor]]]) -> None:
        for portion in portions:
            decoder.load(portion)
        decoder.finish_load()

    @torch.inference_mode()
    def _check_log_probs(self, promise: str, case: str) -> None:
        """Prefill two prompts, share the first, and step all three rows, through a cache that grows half-way."""
        prompts = prompts_for(int(self.model.config.vocab_size), (5, 3), self.seed)
        rows = [list(prompts[0]), list(prompts[1]), list(prompts[0])]
        self.decoder.release()
        self.decoder.allocate(3, 7)
        logits = self.decoder.prefill([0, 1], prompts)
        for row in (0, 1):
            expected = _forward(self.model, rows[row])[-1]
            _close(
                self.findings, promise, f"{case}, prefill of {len(rows[row])}", expected, logits[row].log_softmax(-1)
            )
        self.decoder.copy_rows(torch.tensor([0]), torch.tensor([2]), len(prompts[0]))
        for step, tokens in enumerate(((7, 11, 13), (17, 19, 23), (29, 31, 37), (41, 43, 47))):
            if step == 2:
                self.decoder.allocate(4, 16)
            positions = torch.tensor([len(row) for row in rows])
            logits = self.decoder.step(torch.tensor(tokens), positions)
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
            expected = torch.stack([_forward(self.model, row)[-1] for row in rows])
            _close(self.findings, promise, f"{case}, step {step + 1}", expected, logits.log_softmax(-1))

    def _check_round_trip(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Logits of equal weights are equal bits, however the weights came."""
        promise = "bit-exact weight round trip"
        (prompt,) = prompts_for(int(self.model.config.vocab_size), (6,), self.seed)

        def logits(decoder: Decoder) -> Tensor:
            decoder.release()
            decoder.allocate(1, 16)
            return decoder.prefill([0], [prompt])

        expected = logits(self.decoder)
        other = self.recipe.hf.decoder(self.config, torch.float32, CPU)
        self._load(other, [[pair] for pair in reversed(tensors)])
        case = f"{self.case}, tensors one by one in reverse"
        self.findings.require(
            _same_bits(logits(other), expected), promise, case, "the same logits, bit for bit", "others"
        )
        self.decoder.unload()
        self._load(self.decoder, [tensors])
        case = f"{self.case}, after unloading"
        self.findings.require(
            _same_bits(logits(self.decoder), expected), promise, case, "the same logits, bit for bit", "others"
        )

    def _check_refusals(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        name, tensor = tensors[len(tensors) // 2]
        self._refuses("an unknown tensor", KeyError, lambda new: new.load([("no.such.tensor", tensor)]))
        wrong = tensor.new_zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        self._refuses(f"{name} of shape {tuple(wrong.shape)}", ValueError, lambda new: new.load([(name, wrong)]))
        without = [pair for pair in tensors if pair[0] != name]
        self._refuses(f"a load without {name}", KeyError, lambda new: self._load(new, [without]))
        self._refuses("a second load without a tensor", KeyError, lambda new: self._twice(new, tensors, without))

    def _twice(
        self, decoder: Decoder, tensors: Sequence[tuple[str, Tensor]], without: Sequence[tuple[str, Tensor]]
    ) -> None:
        self._load(decoder, [tensors])
        decoder.unload()
        self._load(decoder, [without])

    def _refuses(self, case: str, error: type[Exception], act: Any) -> None:
        promise, where = "incomplete weights are refused", f"{self.case}, {case}"
        try:
            act(self.recipe.hf.decoder(self.config, torch.float32, CPU))
            got = "no exception"
        except error:
            return
        except Exception as other:  # noqa: BLE001 - the check outlives what it checks, and reports it
            got = f"{type(other).__name__}: {other}"
        self.findings.append(Finding(promise, where, error.__name__, got))


def _real_layout(model: Any) -> dict[str, int | bool]:
    """Return what a layout must say of a transformers model, as far as its config speaks plainly."""
    config = model.config
    named = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
    }
    found: dict[str, int | bool] = {
        field: int(getattr(config, name)) for field, name in named.items() if getattr(config, name, None) is not None
    }
    found["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found["tied_embeddings"] = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return found


@torch.no_grad()
def _forward(model: Any, tokens: Sequence[int]) -> Tensor:
    """Log-probs [T, V] of the model's own forward over one text."""
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


@torch.no_grad()
def _log_probs(loaded: HFModel, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Log-probs [T, V] as the torch trainer has them: the texts packed into one row, the head on hidden states."""
    layout = Layout(tuple(len(prompt) for prompt in prompts), CPU)
    row = torch.tensor([[token for prompt in prompts for token in prompt]])
    hidden = loaded.body(
        input_ids=row, position_ids=layout.positions, use_cache=False, packing=layout
    ).last_hidden_state
    logits: Tensor = loaded.head(hidden)[0].float() * loaded.logit_scale
    if loaded.softcap is not None:
        logits = loaded.softcap * (logits / loaded.softcap).tanh()
    return logits.log_softmax(-1)


def _close(findings: Findings, promise: str, case: str, expected: Tensor, got: Tensor) -> None:
    """Require that log-probs agree to `CLOSE` wherever the expected one is above e^-30."""
    if expected.shape != got.shape:
        findings.append(Finding(promise, case, f"log-probs of shape {tuple(expected.shape)}", f"{tuple(got.shape)}"))
        return
    # NaN must not pass for close.
    differs = ~((expected - got).abs() <= CLOSE * expected.abs().clamp(min=1.0))
    if bool(differs.any()):
        place = tuple(int(index) for index in differs.nonzero()[0])
        findings.append(
            Finding(promise, case, f"log-prob {float(expected[place]):.6f} at {place}", f"{float(got[place]):.6f}")
        )


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (first, second)))


def _names(names: Any, beside: Any) -> str:
    """Name what one collection has and the other has not."""
    only = [name for name in names if name not in set(beside)]
    return f"{len(list(names))} tensors{', among them ' + ', '.join(only[:3]) if only else ''}"
