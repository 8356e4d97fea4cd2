"""The attention function against a float64 reference, and what it refuses."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import packed, tiny_llama
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import kveval.attention
from kveval.attention import (
    ATTENTION,
    ATTENTION_PATH,
    FLOAT32_PATH,
    attention,
    cache_argument,
    path_text,
    recorded_paths,
    use_packed_attention,
)
from kveval.errors import UnsupportedError
from kveval.formats.layout import RoleFormat
from kveval.formats.spec import get_scheme
from kveval.packed_kv import PackedKV
from kveval.storage import PackedStore

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


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """float64 [B, Lq, Hq, Dv], head by head; a row that attends to nothing is 0."""
    batch, heads, queries, _ = query.shape
    out = torch.zeros(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        kv = head // (heads // key.shape[1])
        scores = query[:, head].double() @ key[:, kv].double().mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, min(head, mask.shape[1] - 1)], -torch.inf)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux[head].double().expand(batch, queries, 1)], dim=-1)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]]
        out[:, :, head] = weights @ value[:, kv].double()
    return out


def modifiers(heads: int) -> dict[str, dict[str, Any]]:
    """Keyword arguments of the attention of Gemma 2 and of GPT-OSS, and both at once."""
    sinks = numbers(heads, seed=9) * 2
    return {"softcap": {"softcap": 0.7}, "sinks": {"s_aux": sinks}, "both": {"softcap": 0.7, "s_aux": sinks}}


MODIFIERS = tuple(modifiers(1))


def stored(name: str, key: Tensor, value: Tensor) -> list[PackedStore]:
    """Keys and values in the formats of scheme `name`."""
    stores = []
    for x, fmt in ((key, get_scheme(name).key), (value, get_scheme(name).value)):
        store = PackedStore(RoleFormat(fmt), x.shape[-1], where="layer 0")
        store.append(x)
        stores.append(store)
    return stores


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


@pytest.mark.parametrize("name", ["position_bias", "sinks", "indices", "block_indices"])
def test_unknown_score_modifiers_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"uses {name}"):
        attention(MODULE, *inputs(), None, **{name: torch.ones(4)})
    attention(MODULE, *inputs(queries=9), None, **{name: None}, sliding_window=3, unknown=1)


class TestFloat32Softmax:
    """Capped scores and attention sinks, which torch's kernels do not know."""

    @settings(max_examples=50)
    @given(
        name=st.sampled_from(MODIFIERS),
        batch=st.integers(1, 3),
        groups=st.integers(1, 4),
        queries=st.integers(1, 6),
        extra=st.integers(0, 8),
        density=st.floats(0, 1),
        per_head=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_any_mask_gives_the_reference_and_never_nan(
        self, name: str, batch: int, groups: int, queries: int, extra: int, density: float, per_head: bool, seed: int
    ) -> None:
        query, key, value = inputs(batch=batch, groups=groups, queries=queries, keys=queries + extra, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        heads = 2 * groups
        mask = torch.rand(batch, heads if per_head else 1, queries, queries + extra, generator=generator) < density
        options = modifiers(heads)[name]
        out, weights = attention(MODULE, query, key, value, mask, **options)
        assert weights is None
        assert out.is_contiguous()
        assert torch.allclose(out.double(), reference(query, key, value, mask, 16**-0.5, **options), atol=1e-5)

    @pytest.mark.parametrize("name", MODIFIERS)
    @pytest.mark.parametrize("rows", [1, 2, 5, 7])
    def test_blocks_of_queries_change_nothing(self, name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        query, key, value = inputs(queries=9)
        padded = causal(9, 9).repeat(2, 1, 1, 1)
        padded[1, :, :, :4] = False
        options = modifiers(4)[name]
        whole = [attention(MODULE, query, key, value, mask, **options)[0] for mask in (None, padded)]
        held = []
        weights = kveval.attention._weights

        def spy(scores: Tensor, sinks: Tensor | None) -> Tensor:
            held.append(scores.numel() * 4)
            return weights(scores, sinks)

        monkeypatch.setattr(kveval.attention, "_weights", spy)
        monkeypatch.setattr(kveval.attention, "SCORE_BYTES", rows * 4 * 2 * 4 * 9)
        for mask, expected in zip((None, padded), whole, strict=True):
            assert torch.allclose(attention(MODULE, query, key, value, mask, **options)[0], expected, atol=1e-6)
        assert len(held) == 2 * -(-9 // rows)
        assert max(held) <= kveval.attention.SCORE_BYTES

    @pytest.mark.parametrize("name", MODIFIERS)
    def test_without_a_mask_it_is_causal_unless_told_otherwise(self, name: str) -> None:
        query, key, value = inputs(queries=9)
        options = modifiers(4)[name]
        for is_causal, mask in ((None, causal(9, 9)), (True, causal(9, 9)), (False, None)):
            out, _ = attention(MODULE, query, key, value, None, is_causal=is_causal, **options)
            expected = reference(query, key, value, mask, 0.25, **options)
            assert torch.allclose(out.double(), expected, atol=1e-5)
        one = query[:, :, -1:]
        out, _ = attention(MODULE, one, key, value, None, **options)
        assert torch.allclose(out.double(), reference(one, key, value, None, 0.25, **options), atol=1e-5)
        with pytest.raises(UnsupportedError, match="3 queries over 9 keys came without a mask"):
            attention(MODULE, query[:, :, :3], key, value, None, **options)

    @pytest.mark.parametrize("name", MODIFIERS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_fully_masked_rows_are_exactly_zero(self, name: str, dtype: torch.dtype) -> None:
        query, key, value = (x.to(dtype) for x in inputs())
        mask = causal(5, 9).repeat(2, 1, 1, 1)
        mask[0, 0, 2], mask[1] = False, False
        out, _ = attention(MODULE, query, key, value, mask, **modifiers(4)[name])
        assert out.dtype == dtype
        assert torch.isfinite(out).all()
        assert (out[0, 2] == 0).all()
        assert (out[1] == 0).all()
        assert (out[0, 1] != 0).any()

    @pytest.mark.parametrize("size", [1e4, -1e4])
    def test_sinks_far_above_or_below_the_scores(self, size: float) -> None:
        query, key, value = inputs()
        mask = causal(5, 9).expand(2, -1, -1, -1)
        out, _ = attention(MODULE, query, key, value, mask, s_aux=torch.full((4,), size))
        plain, _ = attention(MODULE, query, key, value, mask)
        assert torch.allclose(out, torch.zeros_like(plain) if size > 0 else plain, atol=1e-6)

    def test_a_cap_far_above_the_scores_is_no_cap(self) -> None:
        query, key, value = inputs()
        mask = causal(5, 9).expand(2, -1, -1, -1)
        out, _ = attention(MODULE, query, key, value, mask, softcap=1e4)
        assert torch.allclose(out, attention(MODULE, query, key, value, mask)[0], atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
    def test_it_is_what_transformers_computes(self, family: str, dtype: torch.dtype) -> None:
        """In bfloat16 transformers rounds its scores; ours must lie no farther from float64 than theirs."""
        eager = importlib.import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward
        query, key, value = (x.to(dtype) for x in inputs(keys=40))
        mask = causal(5, 40).repeat(2, 1, 1, 1)
        mask[1, :, :, :7] = False
        options = modifiers(4)["softcap" if family == "gemma2" else "sinks"]
        module = nn.Module()
        module.num_key_value_groups, module.sinks = 2, options.get("s_aux", torch.zeros(4)).to(dtype)
        additive = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        theirs, _ = eager(module, query, key, value, additive, scaling=0.3, **options)
        ours, _ = attention(module, query, key, value, mask, scaling=0.3, **options)
        if dtype == torch.float32:
            assert torch.allclose(ours, theirs, atol=1e-6)
        right = reference(query, key, value, mask, 0.3, **options)
        assert (ours - right).abs().max() <= (theirs - right).abs().max() + 1e-6

    def test_packed_keys_and_values_are_what_is_attended(self) -> None:
        query, key, value = inputs()
        stores = stored("int4_g64", key, value)
        handles = [PackedKV(s, s.snapshot(), x, 9, fresh=None) for s, x in zip(stores, (key, value), strict=True)]
        mask, options = causal(5, 9).expand(2, -1, -1, -1), modifiers(4)["both"]
        out, _ = attention(MODULE, query, *handles, mask, **options)
        assert [store.tokens_read for store in stores] == [9, 9]
        decoded = [store.read(store.snapshot(), torch.float64) for store in stores]
        assert torch.allclose(out.double(), reference(query, *decoded, mask, 0.25, **options), atol=1e-5)
        assert not torch.allclose(out.double(), reference(query, key, value, mask, 0.25, **options), atol=1e-5)


class TestPaths:
    """What a record may say of how attention ran."""

    def run(self, layer: int | None, **options: Any) -> None:
        module = nn.Module()
        if layer is not None:
            module.layer_idx = layer
        attention(module, *inputs(queries=1), None, **options)

    def test_every_layer_tells_its_path(self) -> None:
        with recorded_paths() as paths:
            self.run(0, softcap=2.0)
            self.run(1)
            self.run(2, s_aux=torch.zeros(4))
            self.run(1)
        self.run(3)
        assert paths == {0: FLOAT32_PATH, 1: ATTENTION_PATH, 2: FLOAT32_PATH}
        assert path_text(paths) == "dequantize + float32 softmax (layers 0, 2); dequantize + torch sdpa (layers 1)"

    def test_one_path_needs_no_layers(self) -> None:
        with recorded_paths() as outer:
            self.run(0)
            with recorded_paths() as inner:
                self.run(None, softcap=2.0)
            self.run(1)
        assert inner == {None: FLOAT32_PATH}
        assert path_text(inner) == "dequantize + float32 softmax"
        assert outer == {0: ATTENTION_PATH, 1: ATTENTION_PATH}
        assert path_text(outer) == "dequantize + torch sdpa"


class TestMasksOfTrimmedCaches:
    """A sliding layer that dropped old tokens says so by an offset; its mask must still point at the right ones."""

    @pytest.mark.parametrize("kind", ["sliding", "chunked"])
    @pytest.mark.parametrize("kept", [7, 11])
    @pytest.mark.parametrize("queries", [1, 3, 20])
    @pytest.mark.parametrize("padding", [0, 5])
    def test_offset_mask_is_the_tail_of_the_whole_mask(self, kind: str, kept: int, queries: int, padding: int) -> None:
        seen, window = 23, 8
        dropped = seen - kept
        unpadded = torch.tensor([0, padding])
        keys, rows = torch.arange(seen + queries), torch.arange(seen, seen + queries)[:, None]
        if kind == "sliding":
            pattern = sliding_window_causal_mask_function(window)
            near = (keys > rows - window).expand(2, -1, -1)
        else:
            pattern = chunked_causal_mask_function(window, unpadded)
            starts = unpadded[:, None, None]
            near = (keys - starts) // window == (rows - starts) // window
        expected = near & (keys <= rows) & (keys >= unpadded[:, None, None])
        mask = sdpa_mask(
            batch_size=2,
            q_length=queries,
            kv_length=kept + queries,
            q_offset=seen,
            kv_offset=dropped,
            mask_function=pattern,
            attention_mask=keys >= unpadded[:, None],
            local_size=window,
        )
        mask = torch.ones(2, 1, queries, kept + queries, dtype=torch.bool) if mask is None else mask
        assert not expected[:, :, :dropped].any()
        assert torch.equal(mask[:, 0], expected[:, :, dropped:])


def test_dropout_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dropout is on"):
        attention(MODULE, *inputs(), None, dropout=0.1)


@pytest.mark.parametrize("name", ["bf16", "fp8_per_token_head", "int4_g64", "nvfp4", "mxfp4"])
def test_packed_keys_and_values_are_what_is_attended(name: str) -> None:
    query, key, value = inputs()
    stores = stored(name, key, value)
    handles = [PackedKV(s, s.snapshot(), x, 9, fresh=None) for s, x in zip(stores, (key, value), strict=True)]
    mask = causal(5, 9).expand(2, -1, -1, -1)
    out, _ = attention(MODULE, query, *handles, mask)
    assert [store.tokens_read for store in stores] == [9, 9]
    decoded = [store.read(store.snapshot(), torch.float64) for store in stores]
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
