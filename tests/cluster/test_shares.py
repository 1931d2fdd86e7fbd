"""What ranks hold of a batch: their own samples, every column once."""

from __future__ import annotations

import numpy as np
import torch
from milepost.cluster.shares import FORWARD_COLUMNS, Delivery, Share, Shares, local_schedule
from milepost.training.schedule import Schedule, StepSchedule
from milepost.training.trainer import Batch

# Two steps of two ranks over samples of 2, 3, 1, 2 tokens; the second step has filler.
SCHEDULE = Schedule((StepSchedule((((1,),), ((0,),)), 5), StepSchedule((((3, 2),), ((),)), 3)))
LENGTHS = torch.tensor([2, 3, 1, 2])


def make_batch() -> Batch:
    tokens = torch.tensor([10, 11, 20, 21, 22, 30, 40, 41], dtype=torch.int32)
    return Batch(LENGTHS, {"tokens": tokens, "mask": torch.ones(8, dtype=torch.bool)})


def test_a_rank_holds_its_own_samples_alone() -> None:
    shares, batch = Shares(2, keep_results=True), make_batch()
    deliveries = shares.deliver(SCHEDULE.steps, batch, FORWARD_COLUMNS)
    first, second = (Share().take(delivery) for delivery in deliveries)
    assert first["tokens"].tolist() == [20, 21, 22, 30, 40, 41]  # samples 1, 2, 3
    assert first.lengths.tolist() == [3, 1, 2]
    assert (second["tokens"].tolist(), second.lengths.tolist()) == ([10, 11], [2])
    assert local_schedule(shares, SCHEDULE, 0).steps == (
        StepSchedule((((0,),), ((),)), 5),
        StepSchedule((((2, 1),), ((),)), 3),
    )
    assert local_schedule(shares, SCHEDULE, 1).steps[0] == StepSchedule((((),), ((0,),)), 5)


def test_what_ranks_compute_is_put_together_and_kept() -> None:
    shares, batch, ranks = Shares(2, keep_results=True), make_batch(), (Share(), Share())
    deliveries = shares.deliver(SCHEDULE.steps, batch, FORWARD_COLUMNS, ("log_probs",))
    for rank, delivery in zip(ranks, deliveries, strict=True):
        rank.take(delivery)
    computed = [{"log_probs": torch.arange(6.0)}, {"log_probs": torch.tensor([7.0, 8.0])}]
    for rank, delivery, columns in zip(ranks, deliveries, computed, strict=True):
        rank.keep(delivery, columns)
    merged = shares.merge(deliveries, [[{name: c.numpy() for name, c in columns.items()}] for columns in computed])
    assert merged["log_probs"].tolist() == [7, 8, 0, 1, 2, 3, 4, 5]

    batch["old_log_probs"] = merged["log_probs"]
    deliveries = shares.deliver(SCHEDULE.steps[:1], batch, ("tokens", "old_log_probs"))
    assert [(delivery.lengths, dict(delivery.arrays)) for delivery in deliveries] == [(None, {})] * 2  # nothing is sent
    assert ranks[0].take(deliveries[0])["old_log_probs"].tolist() == [0, 1, 2, 3, 4, 5]
    assert ranks[1].take(deliveries[1])["tokens"].tolist() == [10, 11]


def test_ranks_that_share_samples_add_up_and_are_sent_what_they_computed() -> None:
    shares, batch = Shares(1, keep_results=False), make_batch()
    steps = (StepSchedule((((0, 1, 2, 3),),), 8),)
    deliveries = shares.deliver(steps, batch, FORWARD_COLUMNS, ("log_probs",))
    halves = [np.array([1, 0] * 4, np.float32), np.array([0, 2] * 4, np.float32)]
    merged = shares.merge(deliveries, [[{"log_probs": half} for half in halves] + [{}]])
    assert merged["log_probs"].tolist() == [1, 2] * 4
    batch["old_log_probs"] = merged["log_probs"]
    (delivery,) = shares.deliver(steps, batch, ("old_log_probs",))
    assert [array.tolist() for array in delivery.arrays.values()] == [[1, 2] * 4]


def test_a_column_that_was_replaced_or_changed_in_place_is_sent_anew() -> None:
    shares, batch = Shares(1, keep_results=True), make_batch()
    steps = (StepSchedule((((0, 1, 2, 3),),), 8),)
    batch["weights"] = torch.zeros(8)

    def sent() -> list[list[float]]:
        (delivery,) = shares.deliver(steps, batch, ("weights",))
        return [array.tolist() for array in delivery.arrays.values()]

    assert sent() == [[0.0] * 8]
    assert sent() == []
    batch["weights"][2:] = 1.0
    assert sent() == [[0, 0, 1, 1, 1, 1, 1, 1]]
    batch["weights"] = torch.full((8,), 2.0)
    assert sent() == [[2.0] * 8]


def test_another_batch_or_other_samples_make_a_rank_forget() -> None:
    shares, batch = Shares(1, keep_results=True), make_batch()
    rank = Share()
    one, two = StepSchedule((((0,),),), 2), StepSchedule((((1, 2, 3),),), 6)
    for step, tokens in ((one, [10, 11]), (two, [20, 21, 22, 30, 40, 41])):
        (delivery,) = shares.deliver([step], batch, ("tokens",))
        assert rank.take(delivery)["tokens"].tolist() == tokens
    (delivery,) = shares.deliver([two], make_batch(), ("tokens",))
    assert delivery.lengths is not None and len(delivery.arrays) == 1


def test_forty_bytes_per_token_pass_the_controller_at_most() -> None:
    """The columns of a rollout with critic, reference, teacher and several steps, each counted where it passes."""
    shares, batch, ranks = Shares(2, keep_results=True), make_batch(), (Share(), Share())
    batch["engine_log_probs"], batch["weights"] = torch.zeros(8), torch.ones(8)

    def call(steps: tuple[StepSchedule, ...], names: tuple[str, ...], results: tuple[str, ...] = ()) -> list[Delivery]:
        deliveries = shares.deliver(steps, batch, names, results)
        for rank, delivery in zip(ranks, deliveries, strict=True):
            rank.take(delivery)
        return deliveries

    def forward(name: str, column: str) -> None:
        deliveries = call(SCHEDULE.steps, FORWARD_COLUMNS, (name,))
        computed = [{name: torch.zeros(count)} for count in (6, 2)]
        for rank, delivery, columns in zip(ranks, deliveries, computed, strict=True):
            rank.keep(delivery, columns)
        batch[column] = shares.merge(deliveries, [[{name: columns[name].numpy()}] for columns in computed])[name]

    forward("values", "values")
    batch["advantages"], batch["returns"] = torch.zeros(8), torch.zeros(8)
    for step in SCHEDULE.steps:
        call((step,), tuple(batch.columns))
    for column in ("ref_log_probs", "teacher_log_probs", "old_log_probs"):
        forward("log_probs", column)
    for step in SCHEDULE.steps:
        call((step,), tuple(batch.columns))
    assert shares.bytes_moved == 8 * batch.bytes_per_token == 8 * 37
