"""How far a result lies from exact attention, and how far it may: twice as far as torch in the same precision.

Shape legend: B batch, H KV heads, G query heads of a KV head, Lq queries, N stored tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kveval.kernels import reference
from kveval.kernels.checks.cases import Cache, Case
from kveval.kernels.formats import format_key

__all__ = ["Measured", "Yardstick", "different", "merged", "precision", "relative"]

ALLOWANCE = 2.0
"""Times the error of torch in the same precision."""

FLOOR = 2.0**-18
"""Relative error that float32 sums alone may make, zero points against codes among them; torch's is 0 where one token
decides and its numbers are short."""


class Measured(NamedTuple):
    """One comparison: an error and its limit, both relative, or counts of unequal numbers."""

    what: str
    error: float
    limit: float


def precision(case: Case) -> torch.dtype:
    """In which tensor cores multiply for this scheme: bf16 if something is stored in it, else fp16."""
    return torch.bfloat16 if any(fmt.element == "bf16" for fmt in case.formats) else torch.float16


def relative(out: Tensor, expected: Tensor) -> Tensor:
    """float64 [B]: ||out - expected|| / ||expected|| of every sequence; the plain norm where nothing is expected."""
    size = expected.double().flatten(1).norm(dim=1)
    error: Tensor = (out.double() - expected.double()).flatten(1).norm(dim=1) / torch.where(size == 0, 1.0, size)
    return error


def different(what: str, a: Tensor, b: Tensor) -> Measured:
    """How many numbers differ in their bits; none may."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    a, b = (x.contiguous().view(kinds[x.element_size()]) for x in (a, b))
    return Measured(what, float((a != b).sum()), 0.0)


@dataclass(frozen=True)
class Yardstick:
    """What is expected, and how far from it a result may lie.

    Attributes:
        out: float64 [B, Lq, Hq, D].
        lse: float64 [B, Hq, Lq].
        out_limit: float64 [B], relative to each sequence's norm.
        lse_limit: Absolute: an error of the log-sum-exp is a relative one of the softmax's sum, so it may be one
            rounding of the precision besides what torch errs.
    """

    out: Tensor
    lse: Tensor
    out_limit: Tensor
    lse_limit: float

    @classmethod
    def of(cls, case: Case, cache: Cache) -> Self:
        """For one call."""
        expected, expected_lse = case.expected(cache)
        dtype = precision(case)
        out, lse = torch_attention(case, cache, dtype)
        # Where one token decides, torch's weight is 1 and it may not err; one that carries a scale is rounded.
        seen = expected_lse.isfinite()
        rounding = torch.finfo(dtype).eps / 2 + FLOOR * _largest(expected_lse[seen])
        return cls(
            expected,
            expected_lse,
            ALLOWANCE * relative(out.to(case.out_dtype), expected).clamp(min=torch.finfo(dtype).eps / 4) + FLOOR,
            ALLOWANCE * (_largest((lse - expected_lse)[seen]) + rounding),
        )

    @classmethod
    def of_parts(cls, parts: list[tuple[Case, Cache]]) -> Self:
        """For attention that is merged from several calls: the limits are those of the worst of them."""
        each = [cls.of(case, cache) for case, cache in parts]
        out, lse = merged([(y.out, y.lse) for y in each])
        return cls(out, lse, torch.stack([y.out_limit for y in each]).amax(0), max(y.lse_limit for y in each))

    def measure(self, out: Tensor, lse: Tensor, *, note: str = "") -> list[Measured]:
        """Of the result, for the sequence that comes closest to its limit or is furthest beyond; of the log-sum-exp."""
        off = torch.where(lse == self.lse, 0.0, lse - self.lse)
        return [
            self._worst(f"out{note}", out, self.out),
            Measured(f"lse{note}", _largest(off), self.lse_limit),
        ]

    def agree(self, what: str, out: Tensor, other: Tensor) -> Measured:
        """Two results of the kernel that should be one but for rounding."""
        return self._worst(what, out, other)

    def _worst(self, what: str, out: Tensor, expected: Tensor) -> Measured:
        errors = relative(out, expected)
        # NaN is the worst, and argmax takes it for the largest.
        worst = int((errors / self.out_limit).argmax())
        return Measured(what, float(errors[worst]), float(self.out_limit[worst]))


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Results [B, Lq, Hq, D] and log-sum-exps [B, Hq, Lq] of attention to parts of a sequence, as of the whole."""
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    weighted = [out * (part - lse).exp().transpose(1, 2)[..., None] for out, part in parts]
    return torch.stack(weighted).sum(0), lse


def torch_attention(case: Case, cache: Cache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention to the decoded cache with torch's own operations on `dtype` numbers.

    Queries, keys and values are first brought to a largest magnitude in [1, 2) by powers of two, which costs nothing
    and keeps fp16 from under- and overflowing: the yardstick is the best that torch can do.

    Returns:
        (`dtype` [B, Lq, Hq, D]; float64 log-sum-exp [B, Hq, Lq]).
    """
    device = cache.query.device
    allowed = case.allowed(device)
    read = allowed.any(1)[:, None, :, None]
    rows = (case.batch, case.heads, case.group, case.queries)
    kfmt, vfmt = map(format_key, case.formats)
    sides = ((cache.key, kfmt), (cache.value, vfmt))
    k, v = (reference.dequantize(p.q, p.s, p.g, fmt, case.head_dim, 0, case.length, torch.float32) for p, fmt in sides)
    (q, q_unit), (k, k_unit), (v, v_unit) = (
        _in_unit(x) for x in (cache.query.float(), torch.where(read, k, 0.0), torch.where(read, v, 0.0))
    )
    scale = case.scaling * q_unit * k_unit
    # The query heads of a KV head become rows of one product.
    q_BHRD = q.to(dtype).view(*rows[:2], -1, case.head_dim)
    k, v = k.to(dtype), v.to(dtype)
    mask = allowed[:, None, None].expand(*rows, -1).flatten(2, 3)
    sink = None
    if cache.sinks is not None:
        sink = cache.sinks.view(1, case.heads, case.group, 1, 1).expand(*rows, 1).flatten(2, 3)
    if case.softcap:
        out = _explicit(_scores(q_BHRD, k, scale, case.softcap, mask, sink), v)
    else:
        out = _sdpa(q_BHRD, k, v, scale, mask, sink)
    sees = mask.any(-1) if sink is None else torch.ones_like(mask[..., 0])
    out = torch.where(sees[..., None], out * v_unit, 0.0)
    lse = torch.cat(
        [
            _scores(q_BHRD[:, :, i : i + 64], k, scale, case.softcap, mask[:, :, i : i + 64],
                    None if sink is None else sink[:, :, i : i + 64]).logsumexp(-1)
            for i in range(0, q_BHRD.shape[2], 64)
        ],
        dim=2,
    )  # fmt: skip
    return out.view(*rows, -1).permute(0, 3, 1, 2, 4).flatten(2, 3), lse.view(*rows).flatten(1, 2).double()


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float, mask: Tensor, sink: Tensor | None) -> Tensor:
    """float32 [B, H, G * Lq, N or N + 1] from rounded queries and keys."""
    scores = (q.float() @ k.float().mT) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = torch.where(mask, scores, -torch.inf)
    return scores if sink is None else torch.cat([scores, sink], dim=-1)


def _explicit(scores: Tensor, v: Tensor) -> Tensor:
    """Softmax in float32, weights rounded, sums in float32, result rounded: what fused kernels do."""
    weights = scores.softmax(-1)[..., : v.shape[2]].to(v.dtype)
    return (weights.float() @ v.float()).to(v.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, sink: Tensor | None) -> Tensor:
    bias: Tensor | None = None
    if sink is not None:
        # One more key of zeros, whose score is the bias alone, and a value of zeros.
        bias = torch.cat([torch.zeros(mask.shape, device=q.device).masked_fill_(~mask, -torch.inf), sink], -1).to(
            q.dtype
        )
        k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], dim=2) for x in (k, v))
    elif not mask.all():
        bias = mask
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(fused if q.is_cuda else [*fused, SDPBackend.MATH]):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def _in_unit(x: Tensor) -> tuple[Tensor, float]:
    """`x` divided by a power of two, and that power."""
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    unit = 2.0 ** float(largest.log2().floor()) if largest > 0 else 1.0
    return x / unit, unit


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
