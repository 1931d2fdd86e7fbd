"""The conformance kit: the promises every plugin keeps, as functions that say what is broken.

They need no test runner; in pytest one line does it::

    from milepost.testing import check_algorithm

    def test_my_algorithm_keeps_its_promises():
        assert check_algorithm("my_algorithm", {"eps_clip": 0.1}) == []
"""

from milepost.testing.advantages import check_advantage
from milepost.testing.algorithms import check_algorithm
from milepost.testing.findings import Finding

__all__ = ["Finding", "check_advantage", "check_algorithm"]
