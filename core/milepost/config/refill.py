"""Whether an engine that was started again in mid-rollout can be given its weights while the others generate."""

from __future__ import annotations

from milepost.config.estimates import estimate
from milepost.config.plan import Plan

SLACK = 2 * 2**30
"""Bytes for the buckets of a push, beside the weights."""


def refill_bytes(plan: Plan) -> int:
    """Return the bytes a rank's device must have free for a refill in mid-rollout; 0 where nothing has to move.

    The trainer's weights are in host memory while colocated engines generate, and have to come back for the push.
    """
    config = plan.config
    if not plan.colocated or not config.trainer.offload or not (config.cluster.gpus_per_node or _asks_for_gpu(plan)):
        return 0
    return estimate(plan).weights + SLACK


def _asks_for_gpu(plan: Plan) -> bool:
    return plan.config.run.device == "cuda"


def refill_text(plan: Plan) -> str:
    """Say what becomes of an engine that dies in a rollout."""
    needed = refill_bytes(plan)
    if not needed:
        return "started again and refilled alone at once"
    return (
        f"started again; refilled alone at once if {needed / 2**30:.3g} GiB are then free on every rank's GPU, else at "
        "the next push"
    )
