import pytest
import torch
from milepost.training.packing import Layout, pack
from milepost.training.trainer import Batch

CPU = torch.device("cpu")


def test_row_of_two_samples_by_hand() -> None:
    batch = Batch(
        torch.tensor([2, 3, 4]),
        {
            "tokens": torch.tensor([10, 11, 20, 21, 22, 30, 31, 32, 33], dtype=torch.int32),
            "mask": torch.tensor([0, 1, 0, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
        },
    )
    packed = pack(batch, (2, 0), CPU)
    assert packed.tokens.tolist() == [[30, 31, 32, 33, 10, 11]]
    assert packed.layout.positions.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.layout.sample_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert packed.layout.cumulative.tolist() == [0, 4, 6]
    assert packed.trainable.tolist() == [1, 3, 5]
    assert packed.targets.tolist() == [31, 33, 11]
    assert packed.columns.tolist() == [6, 8, 1]


def test_a_trainable_first_token_is_an_error() -> None:
    columns = {"tokens": torch.zeros(4, dtype=torch.int32), "mask": torch.tensor([0, 1, 1, 1], dtype=torch.bool)}
    batch = Batch(torch.tensor([2, 2]), columns)
    with pytest.raises(ValueError, match="first token of sample 1 is trainable"):
        pack(batch, (0, 1), CPU)


def test_buckets_by_hand() -> None:
    # 100 takes down to 80; 79 starts anew and takes down to 64; the short ones go by FREE_PADDING.
    layout = Layout((3, 100, 79, 10, 80, 64), CPU)
    assert [(bucket.samples, bucket.length) for bucket in layout.buckets] == [
        ((1, 4), 100),
        ((2, 5), 79),
        ((3, 0), 10),
    ]
    gather = layout.gather
    assert len(gather) == 200 + 158 + 20
    assert gather[358:].tolist() == [*range(182, 192), 0, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    torch.testing.assert_close(gather[layout.restore], torch.arange(layout.num_tokens))


def test_long_samples_go_alone_and_stay_in_place() -> None:
    assert [bucket.samples for bucket in Layout((20, 200, 20, 300), CPU).buckets] == [(1,), (3,), (0, 2)]
    assert Layout((20, 200, 20, 300), CPU).is_regrouped
    assert not Layout((300, 200, 400), CPU).is_regrouped
    assert Layout((300, 200, 400), CPU).gather.tolist() == list(range(900))


def test_few_kernel_calls_for_many_short_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(10, 31, (512,), generator=generator).tolist())
    assert len(Layout(lengths, CPU).buckets) <= 3


def test_padding_costs_at_most_a_quarter_beyond_the_squares_of_mixed_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(20, 400, (256,), generator=generator).tolist())
    layout = Layout(lengths, CPU)
    padded = sum(len(bucket.samples) * bucket.length**2 for bucket in layout.buckets)
    assert padded / sum(length**2 for length in lengths) < 1.25


def test_equal_lengths_need_no_regrouping() -> None:
    assert Layout((7, 7, 7), CPU).equal_length == 7
    assert Layout((7, 7, 8), CPU).equal_length is None


def test_token_index_and_select_keep_the_given_order() -> None:
    batch = Batch(torch.tensor([1, 2, 3]), {"values": torch.arange(6.0)})
    assert batch.token_index((2, 0)).tolist() == [3, 4, 5, 0]
    assert batch.select((2, 0))["values"].tolist() == [3, 4, 5, 0]
    assert batch.token_index(()).tolist() == []


def test_samples_of_nearly_one_length_are_padded_to_a_batch() -> None:
    lengths = torch.tensor([4, 2, 4])
    tokens = torch.tensor([5, 6, 7, 8, 1, 2, 11, 12, 13, 14], dtype=torch.int32)
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    batch = Batch(lengths, {"tokens": tokens, "mask": mask})
    ragged = pack(batch, [0, 2, 1], CPU, pad=True)  # 2 of 12 tokens would be padding
    assert ragged.layout.lengths == (4, 4, 2)
    lengths = torch.tensor([12, 11, 12])
    batch = Batch(lengths, {"tokens": torch.arange(35, dtype=torch.int32), "mask": torch.zeros(35, dtype=torch.bool)})
    batch["mask"][[21, 22, 33, 34]] = True
    packed = pack(batch, [1, 2], CPU, pad=True)
    assert packed.layout.lengths == (12, 12)
    assert packed.tokens[0].tolist() == [*range(12, 23), 22, *range(23, 35)]
    assert packed.columns.tolist() == [21, 22, 33, 34]
    assert packed.trainable.tolist() == [9, 10, 22, 23]
    assert packed.targets.tolist() == packed.columns.tolist()
