"""The attention function against a float64 reference, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import packed, tiny_llama
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kveval.attention import ATTENTION, ATTENTION_PATH, attention, cache_argument, use_packed_attention
from kveval.errors import UnsupportedError
from kveval.formats.codec import Codec
from kveval.formats.spec import get_scheme
from kveval.storage import PackedKV, PackedStore

MODULE = nn.Module()  # has no is_causal: causal is the default


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(*, batch: int = 2, groups: int = 2, queries: int = 5, keys: int = 9, seed: int = 0) -> tuple[Tensor, ...]:
    """Query [B, 2 * groups, Lq, 16], key [B, 2, Lk, 16], value [B, 2, Lk, 24]."""
    return (
        numbers(batch, 2 * groups, queries, 16, seed=seed),
        numbers(batch, 2, keys, 16, seed=seed + 1),
        numbers(batch, 2, keys, 24, seed=seed + 2),
    )


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """float64 [B, Lq, Hq, Dv], head by head; a row that attends to nothing is 0."""
    batch, heads, queries, _ = query.shape
    out = torch.zeros(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        kv = head // (heads // key.shape[1])
        scores = query[:, head].double() @ key[:, kv].double().mT * scaling
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        out[:, :, head] = weights @ value[:, kv].double()
    return out


def causal(queries: int, keys: int) -> Tensor:
    """bool [1, 1, Lq, Lk] of the last `queries` of `keys` tokens."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("scaling", [None, 0.1])
def test_grouped_heads_and_scaling(groups: int, scaling: float | None) -> None:
    query, key, value = inputs(groups=groups)
    mask = causal(5, 9).expand(2, -1, -1, -1)
    out, weights = attention(MODULE, query, key, value, mask, scaling=scaling)
    assert weights is None
    assert out.shape == (2, 5, 2 * groups, 24)
    assert out.is_contiguous()
    expected = reference(query, key, value, mask, 16**-0.5 if scaling is None else scaling)
    assert torch.allclose(out.double(), expected, atol=1e-5)


@settings(max_examples=50)
@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 4),
    queries=st.integers(1, 6),
    extra=st.integers(0, 8),
    density=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_any_mask_gives_the_reference_and_never_nan(
    batch: int, groups: int, queries: int, extra: int, density: float, seed: int
) -> None:
    query, key, value = inputs(batch=batch, groups=groups, queries=queries, keys=queries + extra, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, 1, queries, queries + extra, generator=generator) < density
    out, _ = attention(MODULE, query, key, value, mask)
    assert torch.allclose(out.double(), reference(query, key, value, mask, 16**-0.5), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fully_masked_rows_are_exactly_zero(dtype: torch.dtype) -> None:
    query, key, value = (x.to(dtype) for x in inputs())
    mask = causal(5, 9).repeat(2, 1, 1, 1)
    mask[0, 0, 2] = False
    mask[1] = False
    out, _ = attention(MODULE, query, key, value, mask)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert (out[0, 2] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, 1] != 0).any()


def test_fully_masked_rows_are_zero_even_where_torch_makes_them_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of torch's kernels give NaN there, others 0."""

    def nan(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((*query.shape[:3], value.shape[-1]), torch.nan)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", nan)
    mask = causal(5, 9).repeat(2, 1, 1, 1)
    mask[0, 0, 2], mask[1] = False, False
    out, _ = attention(MODULE, *inputs(), mask)
    assert torch.isfinite(out[0]).all(-1).all(-1).tolist() == [False, False, True, False, False]
    assert (out[1] == 0).all()


def test_without_a_mask_it_is_causal_unless_told_otherwise() -> None:
    query, key, value = inputs(queries=9)
    expected = reference(query, key, value, causal(9, 9), 0.25)
    everything = reference(query, key, value, None, 0.25)
    not_causal = SimpleNamespace(is_causal=False)
    for module, is_causal, right in (
        (MODULE, None, expected),
        (MODULE, True, expected),
        (MODULE, False, everything),
        (not_causal, None, everything),
        (not_causal, True, expected),
    ):
        out, _ = attention(module, query, key, value, None, is_causal=is_causal)
        assert torch.allclose(out.double(), right, atol=1e-5)


def test_one_query_sees_every_key() -> None:
    query, key, value = inputs(queries=1)
    out, _ = attention(MODULE, query, key, value, None)
    assert torch.allclose(out.double(), reference(query, key, value, None, 0.25), atol=1e-5)


def test_a_chunk_after_others_needs_its_mask() -> None:
    """torch aligns a maskless causal pattern to the first key, which would be wrong here: refused."""
    query, key, value = inputs(queries=3, keys=9)
    with pytest.raises(UnsupportedError, match="3 queries over 9 keys came without a mask"):
        attention(MODULE, query, key, value, None)
    out, _ = attention(MODULE, query, key, value, None, is_causal=False)
    assert torch.allclose(out.double(), reference(query, key, value, None, 0.25), atol=1e-5)


def test_only_boolean_masks_are_taken() -> None:
    """An additive mask has 0 where a boolean one has True; read as boolean it would attend to the opposite."""
    query, key, value = inputs()
    additive = torch.zeros(2, 1, 5, 9)
    with pytest.raises(UnsupportedError, match=r"mask of torch\.float32"):
        attention(MODULE, query, key, value, additive)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_score_modifiers_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"uses {name}"):
        attention(MODULE, *inputs(), None, **{name: torch.ones(4)})
    attention(MODULE, *inputs(queries=9), None, **{name: None}, sliding_window=3, unknown=1)


def test_dropout_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dropout is on"):
        attention(MODULE, *inputs(), None, dropout=0.1)


@pytest.mark.parametrize("name", ["bf16", "fp8_per_token_head", "int4_g64", "nvfp4", "mxfp4"])
def test_packed_keys_and_values_are_what_is_attended(name: str) -> None:
    query, key, value = inputs()
    stores = []
    for x, fmt in ((key, get_scheme(name).key), (value, get_scheme(name).value)):
        store = PackedStore(Codec(fmt, x.shape[-1]), where="layer 0")
        store.append(x)
        stores.append(store)
    handles = [PackedKV(store, x, fresh=None) for store, x in zip(stores, (key, value), strict=True)]
    mask = causal(5, 9).expand(2, -1, -1, -1)
    out, _ = attention(MODULE, query, *handles, mask)
    assert [store.tokens_read for store in stores] == [9, 9]
    decoded = [store.read(9, torch.float64) for store in stores]
    assert torch.allclose(out.double(), reference(query, *decoded, mask, 0.25), atol=1e-5)
    assert not torch.allclose(out.double(), reference(query, key, value, mask, 0.25), atol=1e-5)


def test_error_stays_within_twice_that_of_plain_torch_in_bfloat16() -> None:
    query, key, value = (x.bfloat16() for x in inputs(keys=300, queries=1))
    expected = reference(query, key, value, None, 0.25)
    ours = attention(MODULE, query, key, value, None)[0].double()
    repeated = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    plain = nn.functional.scaled_dot_product_attention(query, *repeated, scale=0.25).transpose(1, 2).double()
    assert (ours - expected).abs().max() <= 2 * (plain - expected).abs().max()


def test_registration_is_repeatable_and_takes_a_mask_function() -> None:
    model = tiny_llama()
    for _ in range(2):
        use_packed_attention(model)
    assert model.config._attn_implementation == ATTENTION
    assert AttentionInterface()[ATTENTION] is attention
    assert ATTENTION in AttentionMaskInterface().valid_keys()
    assert ATTENTION_PATH == "dequantize + torch sdpa"
    assert not any(word in ATTENTION for word in ("sdpa", "flash", "|", "/"))


def test_a_user_mask_that_is_additive_is_refused_through_the_model() -> None:
    model = packed(tiny_llama())
    with pytest.raises(UnsupportedError, match="mask of"):
        model(input_ids=torch.tensor([[1, 2, 3]]), attention_mask=torch.zeros(1, 1, 3, 3))


def test_the_cache_argument_is_read_from_the_forward() -> None:
    assert cache_argument(tiny_llama()) in ("cache", "past_key_values")

    class New:
        def forward(self, input_ids: Any, cache: Any = None, past_key_values: Any = None) -> None: ...

    class Old:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Without:
        def forward(self, input_ids: Any, **kwargs: Any) -> None: ...

    assert cache_argument(New()) == "cache"
    assert cache_argument(Old()) == "past_key_values"
    with pytest.raises(UnsupportedError, match="Without's forward takes no cache"):
        cache_argument(Without())
