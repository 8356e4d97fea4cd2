"""Attention to parts adds up to attention to the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kveval.partial_attention import PartialAttention, Scores

B, H, L, T, D = 2, 3, 4, 20, 8


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SCORES, VALUES = numbers(B, H, L, T, seed=0) * 4, numbers(B, H, T, D, seed=1)


def part(start: int, stop: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output [B, L, H, D] and log of the sum [B, H, L] of tokens `start` to `stop`."""
    scores = SCORES[..., start:stop]
    if mask is not None:
        scores = scores.masked_fill(~mask[..., start:stop], -torch.inf)
    out = scores.softmax(-1).nan_to_num() @ VALUES[:, :, start:stop]
    return out.transpose(1, 2), scores.logsumexp(-1)


def merged(borders: list[int], dtype: torch.dtype, mask: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    run = PartialAttention(torch.empty(B, H, L, 5, dtype=dtype), D, sinks)
    for start, stop in itertools.pairwise(borders):
        out, lse = part(start, stop, mask)
        run.add(out.to(run.dtype), lse.to(run.dtype))
    return run.result(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("borders", [[0, 20], [0, 1, 20], [0, 7, 8, 19, 20]])
def test_parts_add_up(borders: list[int], dtype: torch.dtype) -> None:
    got = merged(borders, dtype)
    assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, (B, L, H, D), True)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    assert torch.allclose(got.double(), part(0, 20)[0], atol=tolerance)


def test_a_sink_enters_once() -> None:
    sinks = torch.tensor([3.0, -torch.inf, 0.5], dtype=torch.float64)
    with_sinks = torch.cat([SCORES, sinks.view(1, H, 1, 1).expand(B, -1, L, 1)], dim=-1).softmax(-1)[..., :T]
    expected = (with_sinks @ VALUES).transpose(1, 2)
    for borders in ([0, 20], [0, 5, 6, 20]):
        assert torch.allclose(merged(borders, torch.float64, sinks=sinks), expected)


def test_parts_and_rows_without_a_token_count_for_nothing() -> None:
    mask = torch.ones(B, H, L, T, dtype=torch.bool)
    mask[..., 5:9] = False
    mask[1, :, 2] = False
    got = merged([0, 5, 9, 20], torch.float64, mask)
    assert torch.allclose(got, part(0, 20, mask)[0])
    assert not got[1, 2].any()
    sunk = merged([0, 5, 9, 20], torch.float64, mask, torch.zeros(H))
    assert torch.isfinite(sunk).all()
    assert not sunk[1, 2].any()


def test_later_queries_alone_may_see_a_part() -> None:
    mask = torch.ones(B, H, L, T, dtype=torch.bool)
    mask[:, :, :3, 12:] = False
    run = PartialAttention(torch.empty(B, H, L, 5, dtype=torch.float64), D)
    run.add(*part(0, 12))
    out, lse = part(12, 20)
    run.add(out[:, 3:], lse[:, :, 3:], first=3)
    assert torch.allclose(run.result(torch.float64), part(0, 20, mask)[0])


def test_huge_scores_do_not_overflow() -> None:
    run = PartialAttention(torch.empty(B, H, L, 5), D)
    for size, value in ((-1e4, 1.0), (1e4, 2.0), (0.0, 3.0)):
        run.add(torch.full((B, L, H, D), value), torch.full((B, H, L), size))
    assert torch.equal(run.result(torch.float32), torch.full((B, L, H, D), 2.0))


def test_plain_scores_are_scaled_alone() -> None:
    assert Scores(0.1).plain
    assert not Scores(0.1, softcap=2.0).plain
    assert not Scores(0.1, sinks=torch.zeros(3)).plain
