"""Everything that ships with milepost keeps every promise of its kind."""

from __future__ import annotations

from typing import Any

import pytest
from milepost.registry import Provided, Registry
from milepost.testing.plugins import Settings, check_component, check_record
from mooncake_here import has_mooncake

REGISTRY = Registry.load()
OURS = [record for record in REGISTRY.plugins if record.distribution == "milepost"]
COMPONENTS = [item for record in OURS for item in record.components]
if not has_mooncake():
    # Its libraries come from the system's package manager. tests/transports asks for the message then.
    COMPONENTS = [item for item in COMPONENTS if item.name != "p2p"]
OPTIONS: dict[str, dict[str, Any]] = {
    "python": {"function": "math_for_checks:length"},
    "mix": {
        # Whether a mix needs a label is its parts' matter; these do without.
        "parts": {
            "thought": {"name": "format", "options": {"pattern": "</think>"}},
            "box": {"name": "format", "weight": 0.5, "options": {"pattern": "boxed"}},
        }
    },
    "format": {"pattern": "^<think>.*</think>"},
}
"""Options of the components that have no defaults for all of them."""


@pytest.fixture(autouse=True)
def function_for_the_python_reward(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_for_checks.py").write_text("def length(sample):\n    return len(sample.text)\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_list_is_not_empty() -> None:
    assert {item.kind for item in COMPONENTS} == {"algorithm", "advantage", "reward", "model", "transport"}


@pytest.mark.parametrize("item", COMPONENTS, ids=lambda item: f"{item.kind}-{item.name}")
def test_a_builtin_keeps_every_promise(item: Provided) -> None:
    # what takes a second of a core may take longer beside other tests
    report = check_component(item, Settings(options=OPTIONS.get(item.name, {}), timeout=120.0))
    assert [str(finding) for finding in report.findings] == []


@pytest.mark.parametrize("record", OURS, ids=lambda record: record.name)
def test_a_builtin_loads(record: Any) -> None:
    findings = [finding for finding in check_record(record).findings if finding.promise == "loads"]
    assert findings == []
