"""The conformance kit: the promises every plugin keeps, as functions that say what is broken.

They need no test runner; in pytest one line does it::

    from milepost.testing import check_algorithm

    def test_my_algorithm_keeps_its_promises():
        assert check_algorithm("my_algorithm", {"eps_clip": 0.1}) == []

`milepost plugins check NAME` runs the same. A check is imported when it is first used: a reward needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milepost.testing.advantages import check_advantage
    from milepost.testing.algorithms import check_algorithm
    from milepost.testing.findings import Finding
    from milepost.testing.models import check_model
    from milepost.testing.rewards import check_reward
    from milepost.testing.transports import check_transport

__all__ = ["Finding", "check_advantage", "check_algorithm", "check_model", "check_reward", "check_transport"]

_HOMES = {
    "Finding": "findings",
    "check_advantage": "advantages",
    "check_algorithm": "algorithms",
    "check_model": "models",
    "check_reward": "rewards",
    "check_transport": "transports",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'milepost.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"milepost.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
