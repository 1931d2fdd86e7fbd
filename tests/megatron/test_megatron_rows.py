"""Rows under context parallelism: every token once, and attention that sees what the whole sample would."""

import torch
from megatron_cases import CPU, LENGTHS, make_batch
from milepost.training.megatron.rows import local_tokens, make_row, padded_lengths


def test_padding_divides_among_chunks_and_tensor_parallel_ranks() -> None:
    assert padded_lengths([7, 12, 5], context=1, tensor=1) == (7, 12, 5)
    assert padded_lengths([7, 12, 5], context=1, tensor=2) == (7, 12, 5)
    assert padded_lengths([7, 12], context=1, tensor=4) == (7, 13)
    assert padded_lengths([7, 12, 5], context=2, tensor=1) == (8, 12, 8)
    assert padded_lengths([7, 12, 5], context=2, tensor=4) == (8, 12, 12)


def test_zig_zag_gives_each_rank_an_early_and_a_late_chunk() -> None:
    starts = [0, 8, 12]
    assert local_tokens((8, 4), starts, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert local_tokens((8, 4), starts, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_every_trainable_token_is_read_on_one_rank_off_the_token_before_it() -> None:
    batch = make_batch()
    samples = tuple(range(len(LENGTHS)))
    rows = [make_row(batch, samples, CPU, context=2, rank=rank) for rank in range(2)]
    columns = torch.cat([row.columns for row in rows])
    assert sorted(columns.tolist()) == batch["mask"].nonzero().squeeze(1).tolist()
    assert sum(row.num_tokens for row in rows) == sum(LENGTHS)
    for row in rows:
        assert torch.equal(row.tokens[0][row.before], batch["tokens"][row.columns - 1].long())
        assert torch.equal(row.targets, batch["tokens"][row.columns].long())


def test_queries_of_both_halves_see_their_sample_up_to_themselves() -> None:
    batch = make_batch()
    samples = (1, 8, 13)
    rows = [make_row(batch, samples, CPU, context=2, rank=rank) for rank in range(2)]
    positions = torch.cat([row.attendance.positions for row in rows])
    tokens = torch.cat([row.tokens[0] for row in rows])
    for row in rows:
        halves = row.attendance.halves
        assert halves is not None
        for half in halves:
            queries, keys = half.queries.split(half.query_lengths), half.keys.split(half.key_lengths)
            for sample, query, key in zip(samples, queries, keys, strict=True):
                # Keys are the sample's first tokens in order, and end where the queries do.
                assert positions[key].tolist() == list(range(len(key)))
                assert row.attendance.positions[query].tolist() == list(range(len(key) - len(query), len(key)))
                real = batch["tokens"][int(batch.offsets[sample]) : int(batch.offsets[sample + 1])].long()
                count = min(len(real), len(key))
                assert torch.equal(tokens[key][:count], real[:count])


def test_filler_has_no_trainable_token_and_counts_for_nothing() -> None:
    row = make_row(make_batch(), (), CPU, context=2, rank=1, tensor=2)
    assert row.tokens.shape == (1, 2)
    assert len(row.before) == len(row.columns) == row.num_tokens == 0
