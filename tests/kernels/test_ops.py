"""The ops on a CPU: what they compute, what they refuse, and what torch's own checks say of their definitions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_formats import FORMATS, global_scale
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kveval.errors import UnsupportedError
from kveval.formats.codec import Codec, Frozen
from kveval.formats.spec import TensorFormat, get_scheme, scheme_names
from kveval.kernels import ops, reference
from kveval.kernels.formats import format_key, format_of, kernel_codec, macros, misfit, stored_width, tensor_scale

FP8, NVFP4, INT4, BF16 = (get_scheme(name).key for name in ("fp8_per_token_head", "nvfp4", "int4_g64", "bf16"))


@dataclass
class Side:
    """Packed keys or values, and what they decode to."""

    key: str
    q: Tensor
    s: Tensor | None
    g: Tensor | None
    plain: Tensor

    @property
    def packed(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.q, self.s, self.g


def empty(fmt: TensorFormat, batch: int, heads: int, capacity: int, head_dim: int) -> Side:
    fmt = format_of(format_key(fmt))
    q = torch.full((batch, heads, capacity, fmt.payload_bytes(head_dim)), 0xFF, dtype=torch.uint8)
    scale_bytes = fmt.scale_bytes(head_dim)
    s = torch.full((batch, heads, capacity, scale_bytes), 0xFF, dtype=torch.uint8) if scale_bytes else None
    return Side(format_key(fmt), q, s, global_scale(fmt, batch, heads, per="batch"), torch.empty(0))


def filled(fmt: TensorFormat, x: Tensor, *, capacity: int) -> Side:
    """`x` in the first rows; NaN codes and scales in the others."""
    batch, heads, tokens, head_dim = x.shape
    side = empty(fmt, batch, heads, capacity, head_dim)
    codec, frozen = kernel_codec(side.key, head_dim), frozen_of(side.g)
    payload, scale = codec.encode(x, frozen)
    side.q[:, :, :tokens] = payload
    if side.s is not None and scale is not None:
        side.s[:, :, :tokens] = scale
    return replace(side, plain=codec.decode(payload, scale, frozen).double())


def frozen_of(g: Tensor | None) -> Frozen:
    return Frozen() if g is None else Frozen(g[:, :, None, None])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- keys of formats


@pytest.mark.parametrize("name", scheme_names())
@pytest.mark.parametrize("role", ["key", "value"])
def test_a_key_says_what_is_stored(name: str, role: str) -> None:
    """Its format, given the scale of the tensor, makes the bytes of the format itself."""
    fmt: TensorFormat = getattr(get_scheme(name), role)
    plain = fmt.model_copy(update={"transform": "none"})
    x = numbers(2, 2, fmt.unit * 2, 128)
    scales = (0.013, 0.7) if fmt.scale_rule == "static" else None
    codec = Codec(plain, 128, scales)
    frozen = codec.freeze(x)
    g = tensor_scale(codec, frozen, x.device)
    assert (g is not None) == (plain.freezes_scale or scales is not None)
    again = format_of(format_key(fmt))
    assert format_key(again) == format_key(fmt)
    payload, scale = codec.encode(x, frozen)
    other, other_scale = Codec(again, 128).encode(x, frozen_of(g))
    assert torch.equal(payload, other)
    assert (scale is None) == (other_scale is None)
    assert scale is None or torch.equal(scale, other_scale)


def test_keys_tell_formats_apart() -> None:
    keys = {format_key(fmt) for fmt in FORMATS.values()}
    assert len(keys) == len(FORMATS)
    rotated, plain = get_scheme("nvfp4_hadamard").key, get_scheme("nvfp4").key
    assert format_key(rotated) == format_key(plain)
    assert format_key(get_scheme("fp8_per_head").key) == format_key(get_scheme("fp8_e4m3").key)


def test_a_constant_scale_is_given_unless_it_is_one() -> None:
    fmt = TensorFormat(element="e4m3", granularity="per_tensor", scale_rule="fixed", fixed_scale=0.5)
    given = tensor_scale(Codec(fmt, 64), Frozen(), torch.device("cpu"))
    assert given is not None
    assert given.tolist() == [[0.5]]
    assert tensor_scale(Codec(get_scheme("fp8_e4m3").key, 64), Frozen(), torch.device("cpu")) is None
    assert tensor_scale(Codec(FP8, 64), Frozen(), torch.device("cpu")) is None


def test_macros_describe_a_format() -> None:
    assert macros(format_key(NVFP4), 128, tensor_scale=True, prefix="K_") == (
        ("K_ELEMENT", 6), ("K_RULE", 2), ("K_SCALE", 4), ("K_GROUP", 16), ("K_ZERO", 0), ("K_GLOBAL", 1),
        ("K_HEAD_DIM", 128),
    )  # fmt: skip
    described = dict(macros(format_key(get_scheme("int8_asym").key), 96, tensor_scale=False, prefix="V_"))
    assert described == {
        "V_ELEMENT": 4, "V_RULE": 3, "V_SCALE": 3, "V_GROUP": 96, "V_ZERO": 1, "V_GLOBAL": 0, "V_HEAD_DIM": 96,
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_row_says_how_wide_its_head_is(name: str) -> None:
    fmt = FORMATS[name]
    assert not misfit(fmt, 128)
    assert stored_width(fmt, fmt.payload_bytes(128)) == 128


# ---- append and dequantize


@pytest.mark.parametrize("names", [("bf16.key", "fp8_e4m3.key"), ("nvfp4.key", "int4_g64.key")])
def test_append_stores_the_codecs_bytes(names: tuple[str, str]) -> None:
    x = numbers(2, 3, 6, 128), numbers(2, 3, 4, 128, seed=1)
    k, v = (empty(FORMATS[name], 2, 3, 9, 128) for name in names)
    nonfinite = torch.zeros(2, dtype=torch.int32)
    ops.append(x[0], x[1], *k.packed, *v.packed, nonfinite, 2, 5, k.key, v.key)
    assert nonfinite.tolist() == [0, 0]
    for side, states, start in ((k, x[0], 2), (v, x[1], 5)):
        codec, end = kernel_codec(side.key, 128), start + states.shape[2]
        payload, scale = codec.encode(states, frozen_of(side.g))
        assert torch.equal(side.q[:, :, start:end], payload)
        assert (side.q[:, :, :start] == 0xFF).all()
        assert (side.q[:, :, end:] == 0xFF).all()
        if side.s is not None:
            assert scale is not None
            assert torch.equal(side.s[:, :, start:end], scale)
            assert (side.s[:, :, :start] == 0xFF).all()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            read = ops.dequantize(*side.packed, side.key, 128, start + 1, end, dtype)
            assert read.is_contiguous()
            decoded = codec.decode(payload, scale, frozen_of(side.g), dtype)
            assert torch.equal(read, decoded[:, :, 1:])


def test_append_takes_one_side_alone() -> None:
    k, v = empty(NVFP4, 1, 1, 4, 64), empty(NVFP4, 1, 1, 4, 64)
    before = k.q.clone()
    nonfinite = torch.zeros(2, dtype=torch.int32)
    ops.append(numbers(1, 1, 0, 64), numbers(1, 1, 2, 64), *k.packed, *v.packed, nonfinite, 4, 0, k.key, v.key)
    assert torch.equal(k.q, before)
    assert not torch.equal(v.q, before)
    assert ops.dequantize(*k.packed, k.key, 64, 2, 2, torch.float32).shape == (1, 1, 0, 64)


@pytest.mark.parametrize("bad", [0, 1])
def test_append_reports_nan(bad: int) -> None:
    x = [numbers(1, 1, 2, 64), numbers(1, 1, 2, 64)]
    x[bad][0, 0, 1, 5] = torch.inf
    k, v = empty(FP8, 1, 1, 4, 64), empty(NVFP4, 1, 1, 4, 64)
    nonfinite = torch.zeros(2, dtype=torch.int32)
    ops.append(x[0], x[1], *k.packed, *v.packed, nonfinite, 0, 0, k.key, v.key)
    assert nonfinite.tolist() == [int(bad == 0), int(bad == 1)]


# ---- decode


def attended(bounds: Tensor | None, *, tokens: int, position: int, window: int, queries: int, batch: int) -> Tensor:
    """bool [B, Lq, T], said token by token."""
    allowed = torch.zeros(batch, queries, tokens, dtype=torch.bool)
    for b in range(batch):
        start, end = (0, tokens) if bounds is None else bounds[b].tolist()
        for i in range(queries):
            for j in range(max(start, 0), min(tokens, end)):
                allowed[b, i, j] = j <= position + i and (window == 0 or j > position + i - window)
    return allowed


def exact(
    query: Tensor, k: Tensor, v: Tensor, allowed: Tensor, *, scaling: float, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention in float64 over plain keys and values, a query head at a time."""
    batch, query_heads, queries, _ = query.shape
    out = torch.zeros(batch, queries, query_heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, query_heads, queries), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(query_heads):
            head = h // (query_heads // k.shape[1])
            for i in range(queries):
                rows = allowed[b, i].nonzero()[:, 0]
                scores = k[b, head, rows] @ query[b, h, i].double() * scaling
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                extra = torch.empty(0, dtype=torch.float64) if sinks is None else sinks[h : h + 1].double()
                everything = torch.cat([scores, extra])
                if everything.numel():
                    lse[b, h, i] = everything.logsumexp(0)
                    out[b, i, h] = (scores - lse[b, h, i]).exp() @ v[b, head, rows]
    return out, lse


CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "several queries": {"queries": 5, "position": 45},
    "a later position": {"position": 70},
    "a window": {"window": 9, "queries": 3, "position": 47},
    "a window beyond the rows": {"window": 9, "position": 80},
    "a window of one": {"window": 1},
    "bounds": {"bounds": [[3, 50], [20, 41]], "queries": 3, "position": 47},
    "an empty sequence": {"bounds": [[0, 50], [30, 30]]},
    "a window and bounds": {"bounds": [[0, 100], [44, 50]], "window": 6, "queries": 4, "position": 46},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True, "queries": 2, "position": 48},
    "sinks alone": {"sinks": True, "bounds": [[0, 0], [10, 40]]},
    "everything": {
        "sinks": True, "softcap": 2.0, "window": 20, "bounds": [[35, 48], [0, 50]], "queries": 4, "position": 46,
    },
    "no rows": {"length": 0, "position": 0},
}  # fmt: skip


@pytest.mark.parametrize("rows_of_a_block", [64, 7], ids=["one block", "blocks of 7"])
@pytest.mark.parametrize("case", CASES)
def test_decode_is_attention(monkeypatch: pytest.MonkeyPatch, case: str, rows_of_a_block: int) -> None:
    """Against a sum over the tokens one by one; rows beyond the length hold NaN."""
    options = {"queries": 1, "length": 50, "position": 49, "window": 0, "softcap": 0.0, **CASES[case]}
    length, queries, window = options["length"], options["queries"], options["window"]
    monkeypatch.setattr(reference, "block_size", lambda *args: rows_of_a_block)
    k = filled(FP8, numbers(2, 2, 50, 64), capacity=60)
    v = filled(NVFP4, numbers(2, 2, 50, 128, seed=1), capacity=60)
    query = numbers(2, 6, queries, 64, seed=2)
    bounds = torch.tensor(options["bounds"], dtype=torch.int32) if "bounds" in options else None
    sinks = numbers(6, seed=3) if "sinks" in options else None
    out, lse = ops.decode(
        query, *k.packed, *v.packed, bounds, sinks, k.key, v.key, length, options["position"], window, 0.2,
        options["softcap"], torch.float32,
    )  # fmt: skip
    allowed = attended(bounds, tokens=length, position=options["position"], window=window, queries=queries, batch=2)
    expected, expected_lse = exact(
        query, k.plain, v.plain, allowed, scaling=0.2, softcap=options["softcap"], sinks=sinks
    )
    assert out.shape == (2, queries, 6, 128)
    assert out.is_contiguous()
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-6)


def test_the_cases_of_decode_attend_to_nothing_somewhere() -> None:
    """Or the zeros and -inf of such queries would go untested."""
    bounds = torch.tensor(CASES["an empty sequence"]["bounds"], dtype=torch.int32)
    allowed = attended(bounds, tokens=50, position=49, window=0, queries=1, batch=2)
    assert allowed.any(-1).tolist() == [[True], [False]]
    beyond = attended(None, tokens=50, position=80, window=9, queries=1, batch=2)
    assert not beyond.any()


def test_blocks_of_decode_stay_small() -> None:
    for heads, rows, width in ((8, 4, 128), (1, 1, 64), (32, 8192, 128)):
        size = reference.block_size(2, heads, rows, width)
        assert size >= 64
        assert size == 64 or 2 * heads * size * max(rows, width) <= reference.BLOCK_NUMBERS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_decode_computes_in_float32_or_wider(dtype: torch.dtype) -> None:
    k, v = filled(BF16, numbers(1, 2, 30, 64), capacity=30), filled(INT4, numbers(1, 2, 30, 64, seed=1), capacity=30)
    query = numbers(1, 4, 1, 64, seed=2).to(dtype)
    out, _ = ops.decode(
        query, *k.packed, *v.packed, None, None, k.key, v.key, 30, 29, 0, 0.125, 0.0, torch.float64
    )  # fmt: skip
    allowed = torch.ones(1, 1, 30, dtype=torch.bool)
    expected, _ = exact(query, k.plain, v.plain, allowed, scaling=0.125, softcap=0.0, sinks=None)
    assert (out - expected).abs().max() < (1e-12 if dtype == torch.float64 else 1e-6)


# ---- what is refused


def append_arguments(**changed: Any) -> dict[str, Any]:
    k, v = empty(FP8, 2, 3, 9, 128), empty(NVFP4, 2, 3, 9, 128)
    x = numbers(2, 3, 4, 128)
    given = {
        "k": x, "v": x, "kq": k.q, "ks": k.s, "kg": k.g, "vq": v.q, "vs": v.s, "vg": v.g,
        "nonfinite": torch.zeros(2, dtype=torch.int32), "kpos": 0, "vpos": 0, "kfmt": k.key, "vfmt": v.key,
    }  # fmt: skip
    return given | changed


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"v": numbers(2, 3, 4, 128).bfloat16()}, "keys of torch.float32 and values of torch.bfloat16"),
        ({"k": numbers(2, 2, 4, 128)}, "does not fit a cache"),
        ({"k": numbers(2, 3, 4, 256)[..., ::2]}, "not side by side"),
        ({"k": numbers(2, 3, 4, 64)}, "codes of a token take 64 bytes, not 128"),
        ({"kpos": 6}, "rows 6 to 10 of 9"),
        ({"vpos": -1}, "rows -1 to 3 of 9"),
        ({"ks": None}, "this format stores scales, and got none"),
        ({"vs": zeros(2, 3, 8, 8)}, r"scales are uint8 \(2, 3, 9, 8\)"),
        ({"vq": zeros(2, 3, 9, 64, dtype=torch.int8)}, "codes of a token"),
        ({"kg": torch.ones(2, 1)}, "no scale for the whole tensor"),
        ({"vg": torch.ones(3, 1)}, r"float32 \[B or 1, H or 1\]"),
        ({"vg": torch.ones(2, 1, dtype=torch.float64)}, "not torch.float64"),
        ({"nonfinite": torch.zeros(2)}, r"nonfinite is int32 \[2\]"),
        ({"kfmt": format_key(get_scheme("kivi4").key)}, "encodes 32 tokens together"),
    ],
)
def test_append_refuses_what_does_not_fit(changed: dict[str, Any], reason: str) -> None:
    arguments = append_arguments(**changed)
    with pytest.raises(UnsupportedError, match=reason):
        ops.append(**arguments)
    ops.append(**append_arguments())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"query": numbers(2, 4, 1, 64)}, "do not fit keys"),
        ({"query": numbers(3, 6, 1, 64)}, "do not fit keys"),
        ({"query": numbers(2, 6, 1, 32)}, "codes of a token take 32 bytes, not 64"),
        ({"length": 61}, "rows 0 to 61 of 60"),
        ({"bounds": torch.zeros(2, 2)}, "bounds are int32"),
        ({"bounds": torch.zeros(1, 2, dtype=torch.int32)}, "bounds are int32"),
        ({"sinks": torch.zeros(3)}, "sinks are float32"),
        ({"position": -1}, "lie between 0 and"),
        ({"window": -1}, "lie between 0 and"),
        ({"out_dtype": torch.int8}, "no result of torch.int8"),
    ],
)
def test_decode_refuses_what_does_not_fit(changed: dict[str, Any], reason: str) -> None:
    k, v = empty(FP8, 2, 3, 60, 64), empty(NVFP4, 2, 3, 60, 64)
    given = {
        "query": numbers(2, 6, 1, 64), "kq": k.q, "ks": k.s, "kg": k.g, "vq": v.q, "vs": v.s, "vg": v.g, "bounds": None,
        "sinks": None, "kfmt": k.key, "vfmt": v.key, "length": 0, "position": 50, "window": 0, "scaling": 0.1,
        "softcap": 0.0, "out_dtype": torch.float32,
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match=reason):
        ops.decode(**(given | changed))
    ops.decode(**given)


def test_dequantize_refuses_what_does_not_fit() -> None:
    side = empty(FP8, 2, 3, 9, 64)
    for arguments, reason in (
        ((64, 5, 10, torch.float32), "rows 5 to 10 of 9"),
        ((64, 5, 4, torch.float32), "rows 5 to 4 of 9"),
        ((128, 0, 4, torch.float32), "codes of a token take 128 bytes, not 64"),
        ((64, 0, 4, torch.float64), "no result of torch.float64"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            ops.dequantize(*side.packed, side.key, *arguments)


# ---- definitions


def op_arguments() -> dict[str, tuple[Any, ...]]:
    k, v = filled(FP8, numbers(2, 2, 20, 64), capacity=24), filled(NVFP4, numbers(2, 2, 20, 64, seed=1), capacity=24)
    wide = filled(BF16, numbers(2, 2, 20, 64), capacity=24)
    x, query = numbers(2, 2, 3, 64), numbers(2, 4, 2, 64, seed=2).bfloat16()
    nonfinite = torch.zeros(2, dtype=torch.int32)
    bounds, sinks = torch.tensor([[0, 20], [5, 20]], dtype=torch.int32), torch.zeros(4)
    numeric = (20, 18, 0, 0.125, 0.0, torch.bfloat16, 0)
    return {
        "append": (x, x, *k.packed, *v.packed, nonfinite, 20, 20, k.key, v.key),
        "append without scales": (x, x, *wide.packed, *v.packed, nonfinite, 20, 20, wide.key, v.key),
        "dequantize": (*v.packed, v.key, 64, 3, 20, torch.bfloat16),
        "dequantize without scales": (*wide.packed, wide.key, 64, 3, 20, torch.bfloat16),
        "decode": (query, *k.packed, *v.packed, bounds, sinks, k.key, v.key, *numeric),
        "decode without bounds": (query, *wide.packed, *v.packed, None, None, wide.key, v.key, *numeric),
    }


@pytest.mark.parametrize("name", op_arguments())
def test_torch_finds_nothing_wrong(name: str) -> None:
    """Schemas say what is changed, and fake tensors have the shapes, dtypes and strides of real ones."""
    op = getattr(torch.ops.kveval, name.split()[0]).default
    report = torch.library.opcheck(op, op_arguments()[name])
    assert set(report.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", op_arguments())
def test_fake_tensors_compute_nothing(name: str) -> None:
    """On a GPU's fake tensors too, where there is no GPU."""
    op = getattr(torch.ops.kveval, name.split()[0]).default
    arguments = op_arguments()[name]
    real = op(*arguments)
    with FakeTensorMode():
        fakes = [torch.empty(a.shape, dtype=a.dtype, device="cuda") if isinstance(a, Tensor) else a for a in arguments]
        found = op(*fakes)
    if real is None:
        assert found is None
        return
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (real, found)), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert b.device.type == "cuda"
