"""Rewards: scored in worker processes that can be killed, or inline.

`pool` is what the loop calls; `workers` drives worker processes (`process`), each of which runs `worker` and talks JSON
(`wire`); `calls` is the one place that calls a reward and checks what it answers.
"""

from milepost.rollout.rewards.pool import RewardPool, RewardStats, Scored

__all__ = ["RewardPool", "RewardStats", "Scored"]
