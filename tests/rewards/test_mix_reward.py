"""`mix` and `format`: weights, routing, gates, nested numbers, async and group parts, and what planning refuses."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from milepost.components import RewardTraits
from milepost.samples import Sample, Task
from milepost_mix import FormatOptions, MixOptions, build, build_format, check, milepost_rewards
from pydantic import ValidationError

PARTS = """
import asyncio

def length(sample):
    return len(sample.text)

def several(sample):
    return {"reward": 2.0, "words": len(sample.text.split())}

async def later(sample):
    await asyncio.sleep(0)
    return 10.0

def ranks(samples):
    order = sorted(len(sample.text) for sample in samples)
    return [order.index(len(sample.text)) for sample in samples]
"""


@pytest.fixture(autouse=True)
def parts_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mix_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mix_parts", None)


def python(function: str, scope: str = "sample", **more: Any) -> dict[str, Any]:
    return {"name": "python", "options": {"function": f"mix_parts:{function}", "scope": scope}, **more}


def sample(text: str, **metadata: Any) -> Sample:
    empty = np.zeros(0)
    return Sample(
        task=Task(index=0, prompt="", tokens=(), label="42", metadata=metadata),
        tokens=empty.astype(np.int32),
        trainable=empty.astype(np.bool_),
        log_probs=empty.astype(np.float32),
        versions=empty.astype(np.int32),
        text=text,
    )


def test_scores_are_weighted_and_kept_apart() -> None:
    parts = {"long": python("length", weight=0.5), "rich": python("several", weight=-1.0)}
    mix = build(MixOptions(parts=parts))
    # 0.5 * 3 - 1 * 2
    assert mix.score(sample("a b")) == {"reward": -0.5, "long": 3.0, "rich": 2.0, "rich/words": 2.0}


def test_samples_are_routed_by_metadata() -> None:
    parts = {"long": python("length", only=["prose", "7"]), "rich": python("several", only=["verse"])}
    mix = build(MixOptions(parts=parts, route="source.kind"))
    assert mix.score(sample("abc", source={"kind": "prose"})) == {"reward": 3.0, "long": 3.0}
    assert mix.score(sample("abc", source={"kind": 7}))["reward"] == 3.0
    assert mix.score(sample("abc", source={"kind": "verse"})) == {"reward": 2.0, "rich": 2.0, "rich/words": 1.0}
    with pytest.raises(ValueError, match=r"no part of the mix is for source\.kind = 'code'"):
        mix.score(sample("abc", source={"kind": "code"}))
    with pytest.raises(ValueError, match=r"metadata has no 'source\.kind'.*it has other"):
        mix.score(sample("abc", other=1))


def test_a_gate_that_is_shut_leaves_only_itself() -> None:
    parts = {
        "form": {"name": "deepscaler", "gate": True, "weight": 1.0},
        "long": python("length", weight=0.1),
    }
    mix = build(MixOptions(parts=parts))
    assert mix.score(sample("no thought"))["reward"] == 0.0
    assert mix.score(sample("</think>\\boxed{42}"))["reward"] == pytest.approx(1.0 + 0.1 * 18)


def test_an_async_part_makes_the_mix_async() -> None:
    mix = build(MixOptions(parts={"long": python("length"), "later": python("later", weight=2.0)}))
    assert asyncio.run(mix.score(sample("abc"))) == {"reward": 23.0, "long": 3.0, "later": 10.0}


def test_a_group_part_gets_the_samples_it_counts_for() -> None:
    parts = {
        "rank": python("ranks", "group", only=["x"]),
        "long": python("length"),
        "later": python("later", weight=0.0),
    }
    mix = build(MixOptions(parts=parts, route="k"))
    group = [sample("aaaa", k="x"), sample("b", k="y"), sample("cc", k="x")]
    assert asyncio.run(mix.score_group(group)) == [
        {"reward": 5.0, "rank": 1.0, "long": 4.0, "later": 10.0},
        {"reward": 1.0, "long": 1.0, "later": 10.0},
        {"reward": 2.0, "rank": 0.0, "long": 2.0, "later": 10.0},
    ]


def test_planning_names_every_problem_of_the_parts() -> None:
    parts = {
        "a": {"name": "deepscalr"},
        "b": {"name": "deepscaler", "options": {"require_thought": True}},
        "c": {"name": "deepscaler", "only": ["x"]},
        "d": {"name": "deepscaler", "options": {"require_think": False}},
    }
    problems = list(check(None, MixOptions(parts=parts)))  # type: ignore[arg-type]
    assert len(problems) == 3
    assert problems[0].startswith("parts.a: unknown reward 'deepscalr'") and "'deepscaler'?" in problems[0]
    assert problems[1] == (
        "parts.b.options.require_thought: Extra inputs are not permitted (options of reward 'deepscaler')"
    )
    assert problems[2] == "parts.c.only needs `route`, the metadata key whose values it lists"


def test_reserved_names_and_an_empty_mix_are_refused() -> None:
    with pytest.raises(ValidationError, match="a part is named overlong"):
        MixOptions(parts={"overlong": {"name": "deepscaler"}})
    with pytest.raises(ValidationError, match="at least 1 item"):
        MixOptions(parts={})


def test_format_scores_the_form() -> None:
    reward = build_format(FormatOptions(pattern=r"<think>.+</think>\s*\S", right=0.2, wrong=-0.2))
    assert reward.score(sample("<think>a\nb</think> c")) == 0.2
    assert reward.score(sample("<think></think> c")) == -0.2
    assert reward.score(sample("<think>" + "a" * 300_000 + "</think> c")) == 0.2
    with pytest.raises(ValidationError, match="does not compile"):
        FormatOptions(pattern="(")


def test_the_plugin_provides_both() -> None:
    mix, form = milepost_rewards()
    assert (mix.name, form.name) == ("mix", "format")
    assert isinstance(mix.traits, RewardTraits) and not mix.traits.needs_label
