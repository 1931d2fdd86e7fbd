"""Weight conversions by hand, and there and back on whole tensors and shards."""

import pytest
import torch
from milepost.weights.conversion import Conversion, Part, all_layers
from torch import Tensor


def shards(rule: Conversion, wholes: list[Tensor], size: int) -> list[Tensor]:
    found = []
    for rank in range(size):
        cuts = []
        for part, whole in zip(rule.parts, wholes, strict=True):
            cuts.append(whole[tuple(slice(start, stop) for start, stop in rule.cut(part, rank, size))])
        found.append(rule.merge(cuts, size if rule.split == 0 else 1))
    return found


def column(*values: int) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


QKV = Conversion("qkv", (Part("q", (8, 1)), Part("k", (4, 1)), Part("v", (4, 1))), split=0, blocks=2)
GATED = Conversion("fc1", (Part("gate", (4, 1)), Part("up", (4, 1))), split=0)
VOCAB = Conversion("embedding", (Part("embed", (5, 1)),), split=0, padded=8)


def test_query_groups_are_interleaved_on_any_number_of_ranks() -> None:
    wholes = [column(*range(8)), column(10, 11, 12, 13), column(20, 21, 22, 23)]
    expected = [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert shards(QKV, wholes, 1)[0].squeeze(1).tolist() == expected
    assert [x for shard in shards(QKV, wholes, 2) for x in shard.squeeze(1).tolist()] == expected


def test_gate_and_up_lie_side_by_side_on_every_rank() -> None:
    wholes = [column(0, 1, 2, 3), column(10, 11, 12, 13)]
    assert [s.squeeze(1).tolist() for s in shards(GATED, wholes, 2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_a_vocabulary_is_padded_with_zeros_at_its_end() -> None:
    parts = shards(VOCAB, [column(1, 2, 3, 4, 5)], 4)
    assert [s.squeeze(1).tolist() for s in parts] == [[1, 2], [3, 4], [5, 0], [0, 0]]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rule", [QKV, GATED, VOCAB, Conversion("o", (Part("o", (3, 4)),), split=1)])
def test_there_and_back_is_exact(rule: Conversion, size: int) -> None:
    wholes = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)) for part in rule.parts]
    assert all(torch.equal(a, b) for a, b in zip(rule.join(shards(rule, wholes, size)), wholes, strict=True))


def test_ranks_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"q has 8 rows or columns in 2 blocks, which 4 tensor-parallel ranks"):
        QKV.cut(QKV.parts[0], 0, 4)


def test_layers_come_between_what_is_before_and_behind_them() -> None:
    part = (Part("p.{layer}", (1,)),)
    rules = [
        Conversion("first", (Part("a", (1,)),)),
        Conversion("l.{layer}", part),
        Conversion("last", (Part("b", (1,)),)),
    ]
    found = list(all_layers(rules, 2))
    assert [rule.megatron for rule in found] == ["first", "l.0", "l.1", "last"]
    assert found[2].parts[0].name == "p.1"
