"""Packed buffers: what is written is what is read, whatever happened in between."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.codec import Codec
from kveval.formats.spec import get_scheme, scheme_names
from kveval.storage import GROWTH_TOKENS, PackedKV, PackedStore, StoredBytes

PURE = [name for name in scheme_names() if get_scheme(name).key == get_scheme(name).value]
EVERY = pytest.mark.parametrize("name", PURE)
HEAD_DIM = 80


def new_store(name: str, head_dim: int = HEAD_DIM) -> PackedStore:
    return PackedStore(Codec(get_scheme(name).key, head_dim), where="keys of layer 3")


def numbers(tokens: int, *, batch: int = 2, seed: int = 0, head_dim: int = HEAD_DIM) -> Tensor:
    return torch.randn(batch, 2, tokens, head_dim, generator=torch.Generator().manual_seed(seed))


def filled(name: str, *pieces: Tensor) -> PackedStore:
    store = new_store(name, pieces[0].shape[-1])
    for piece in pieces:
        store.append(piece)
    return store


def assert_same(one: PackedStore, other: PackedStore) -> None:
    """Equal bytes, scales and frozen constants."""
    assert one.length == other.length
    for a, b in zip(one.parts(), other.parts(), strict=True):
        assert (b is None) if a is None else torch.equal(a, b)


@EVERY
@pytest.mark.parametrize("chunk", [1, 7])
def test_appending_in_chunks_equals_appending_at_once(name: str, chunk: int) -> None:
    x = numbers(30)
    if get_scheme(name).append_invariant:
        assert_same(filled(name, *x.split(chunk, dim=2)), filled(name, x))
    else:
        assert_same(filled(name, x[:, :, :9], *x[:, :, 9:].split(chunk, dim=2)), filled(name, *x.split(9, dim=2)))


@EVERY
@pytest.mark.parametrize("tokens", [1, GROWTH_TOKENS - 1, GROWTH_TOKENS, GROWTH_TOKENS + 1, 3 * GROWTH_TOKENS])
def test_bytes_are_the_formula_and_growth_is_padding(name: str, tokens: int) -> None:
    fmt, store = get_scheme(name).key, filled(name, numbers(tokens, head_dim=8))
    expected = 2 * 2 * tokens
    held = store.nbytes()
    assert held.payload == expected * fmt.payload_bytes(8)
    assert held.scales == expected * fmt.scale_bytes(8)
    assert held.constants == 2 * fmt.constant_bytes
    assert held.stored == expected * fmt.token_bytes(8) + 2 * fmt.constant_bytes
    assert held.padding == 2 * 2 * (-tokens % GROWTH_TOKENS) * fmt.token_bytes(8)
    assert held.wide_layers == 0


@EVERY
def test_what_lies_in_unused_capacity_is_never_read(name: str) -> None:
    store, x = filled(name, numbers(5)), numbers(7, seed=1)
    twin = store.copy()
    for buffer in (twin._payload, twin._scale):
        if buffer is not None:
            buffer[:, :, 5:] = 0xFF
    assert torch.equal(store.read(5, torch.float32), twin.read(5, torch.float32))
    for s in (store, twin):
        s.append(x)
    assert_same(store, twin)
    assert torch.equal(store.read(12, torch.float32), twin.read(12, torch.float32))


@EVERY
@pytest.mark.parametrize("at", [1, 255, 256, 257])
def test_crop_then_append_equals_never_written(name: str, at: int) -> None:
    kept, dropped, later = numbers(at), numbers(40, seed=1) * 100, numbers(9, seed=2)
    store = filled(name, kept, dropped)
    store.crop(40)
    store.append(later)
    assert_same(store, filled(name, kept, later))


@EVERY
@pytest.mark.parametrize("surplus", [0, 5])
def test_a_store_cropped_to_nothing_forgets_its_frozen_scale(name: str, surplus: int) -> None:
    store = filled(name, numbers(6) * 100)
    store.crop(6 + surplus)
    assert (store.length, store.nbytes()) == (0, StoredBytes())
    store.append(numbers(4, batch=3))
    assert_same(store, filled(name, numbers(4, batch=3)))


def test_a_crop_into_the_first_write_keeps_the_frozen_scale() -> None:
    first = numbers(6)
    store = filled("nvfp4", first)
    store.crop(2)
    assert torch.equal(store.parts()[2], filled("nvfp4", first).parts()[2])


@EVERY
def test_an_empty_write_changes_nothing(name: str) -> None:
    store = new_store(name)
    store.append(numbers(0))
    assert (store.length, store.nbytes()) == (0, StoredBytes())
    store.append(numbers(3))
    store.append(numbers(0))
    assert_same(store, filled(name, numbers(3)))


@EVERY
def test_copies_are_independent(name: str) -> None:
    store = filled(name, numbers(5))
    twin = store.copy()
    assert_same(store, twin)
    twin.append(numbers(4, seed=1) * 50)
    assert_same(store, filled(name, numbers(5)))
    store.crop(5)
    store.append(numbers(8, seed=2) * 0.01)
    assert_same(twin, filled(name, numbers(5), numbers(4, seed=1) * 50))
    assert_same(store, filled(name, numbers(8, seed=2) * 0.01))


@EVERY
@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0], [0, 0, 1, 1]])
def test_batch_changes_move_codes_scales_and_constants(name: str, rows: list[int]) -> None:
    x = numbers(5) * torch.tensor([1.0, 100.0])[:, None, None, None]
    store, index = filled(name, x), torch.tensor(rows)
    store.map_batch(lambda t: t.index_select(0, index))
    assert_same(store, filled(name, x[index]))
    store.append(x[index])
    assert_same(store, filled(name, x[index], x[index]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@EVERY
def test_nan_and_infinity_are_refused_with_the_layer_named(name: str, value: float) -> None:
    store, x = filled(name, numbers(2)), numbers(3)
    x[1, 1, 2, 7] = value
    with pytest.raises(MeasurementError, match="keys of layer 3 got NaN or infinity"):
        store.append(x)
    assert_same(store, filled(name, numbers(2)))


def test_float16_and_bfloat16_arrive_as_they_are() -> None:
    x = numbers(4)
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(filled("int4_g64", x.to(dtype)), filled("int4_g64", x.to(dtype).float()))


@pytest.mark.parametrize("name", ["nvfp4", "crush"])
def test_padding_never_enters_a_frozen_scale(name: str) -> None:
    x = numbers(6)
    x[0, :, :4] *= 1000
    valid = torch.tensor([[False] * 4 + [True] * 2, [True] * 6])
    store = new_store(name)
    store.append(x, valid_BT=valid)
    alone = filled(name, x[:1, :, 4:])
    assert torch.equal(store.parts()[2][:1], alone.parts()[2])
    assert torch.equal(store.parts()[0][:1, :, 4:], alone.parts()[0])
    # Padding itself is stored, cut to the scale's range: finite.
    assert torch.isfinite(store.read(6, torch.float32)).all()


@pytest.mark.parametrize("name", ["nvfp4", "crush"])
def test_a_padding_mask_may_cover_more_than_the_first_write(name: str) -> None:
    x, valid = numbers(6), torch.tensor([[False] * 2 + [True] * 4, [True] * 6])
    store = new_store(name)
    store.append(x[:, :, :3], valid_BT=valid)
    store.append(x[:, :, 3:], valid_BT=valid)
    assert torch.equal(store.parts()[2][:1], filled(name, x[:1, :, 2:3]).parts()[2])


def test_a_first_write_of_padding_alone_is_refused() -> None:
    valid = torch.tensor([[False] * 4 + [True] * 2, [True] * 6])
    with pytest.raises(UnsupportedError, match="keys of layer 3: a whole row of the first write is padding"):
        new_store("nvfp4").append(numbers(4), valid_BT=valid)
    # A format that freezes nothing does not care.
    new_store("mxfp4").append(numbers(4), valid_BT=valid)


def test_a_padding_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"padding mask of 3 x 6 .* first write of 2 x 4"):
        new_store("nvfp4").append(numbers(4), valid_BT=torch.ones(3, 6, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match=r"padding mask of 2 x 3 .* first write of 2 x 4"):
        new_store("nvfp4").append(numbers(4), valid_BT=torch.ones(2, 3, dtype=torch.bool))


def test_reads_beyond_what_is_stored_are_refused() -> None:
    store = filled("bf16", numbers(4))
    with pytest.raises(MeasurementError, match="asked for 5 tokens but stores 4"):
        store.read(5, torch.float32)
    with pytest.raises(MeasurementError, match="stores nothing yet"):
        new_store("bf16").parts()


def test_reads_are_counted() -> None:
    store = filled("bf16", numbers(10))
    store.read(10, torch.float32)
    store.read(4, torch.float32)
    assert store.tokens_read == 14
    assert store.copy().tokens_read == 0


def test_stored_bytes_add_up_by_part() -> None:
    total = StoredBytes(1, 2, 3, 4, 5) + StoredBytes(10, 20, 30, 40, 50)
    assert total == StoredBytes(11, 22, 33, 44, 55)
    assert total.stored == 11 + 22 + 33 + 44


@EVERY
def test_a_handle_is_a_tensor_in_shape_dtype_and_every_operation(name: str) -> None:
    x = numbers(6).bfloat16()
    store = filled(name, x)
    handle = PackedKV(store, x, fresh=None)
    assert (handle.shape, handle.dtype, handle.device) == (x.shape, torch.bfloat16, x.device)
    assert store.tokens_read == 0
    assert "PackedKV(shape=(2, 2, 6, 80)" in repr(handle)
    expected = store.read(6, torch.bfloat16)
    assert type(handle.dequantize()) is Tensor
    for got, right in (
        (handle.dequantize(), expected),
        (handle.transpose(2, 3), expected.transpose(2, 3)),
        (handle[:, :1, 2:4], expected[:, :1, 2:4]),
        (torch.cat([handle, handle], dim=2), torch.cat([expected, expected], dim=2)),
        (x @ handle.mT, x @ expected.mT),
        (handle.repeat_interleave(2, dim=1), expected.repeat_interleave(2, dim=1)),
        (handle.float(), expected.float()),
    ):
        assert torch.equal(got, right)
    assert store.tokens_read > 6


def test_a_handle_is_a_snapshot_of_its_length() -> None:
    store = filled("bf16", numbers(3))
    handle = PackedKV(store, numbers(3), fresh=None)
    store.append(numbers(2, seed=1))
    assert handle.shape[2] == 3
    assert torch.equal(handle.dequantize(), store.read(3, torch.float32))
    store.crop(4)
    with pytest.raises(MeasurementError, match="asked for 3 tokens but stores 1"):
        handle.dequantize()


def test_a_handle_with_a_fresh_tail_reads_the_past_only() -> None:
    past, new = numbers(4), numbers(3, seed=1)
    store = filled("crush", past, new)
    handle = PackedKV(store, new, fresh=new)
    got = handle.dequantize()
    assert torch.equal(got[:, :, 4:], new)
    assert torch.equal(got[:, :, :4], store.read(4, torch.float32))
    assert store.tokens_read == 8


def test_a_handle_to_nothing_is_an_empty_tensor() -> None:
    store, empty = new_store("nvfp4"), numbers(0).bfloat16()
    store.append(empty)
    got = PackedKV(store, empty, fresh=None).dequantize()
    assert got.shape == (2, 2, 0, HEAD_DIM)
    assert got.dtype == torch.bfloat16
    assert type(got) is Tensor


def test_storage_takes_no_part_in_gradients() -> None:
    x = numbers(4).requires_grad_()
    for name in PURE:
        store = filled(name, x)
        assert all(part is None or not part.requires_grad for part in store.parts())
        assert not store.read(4, torch.float32).requires_grad


@settings(max_examples=40)
@given(
    name=st.sampled_from(PURE),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 300)),
            st.tuples(st.just("crop"), st.integers(0, 300)),
            st.tuples(st.just("swap"), st.just(0)),
        ),
        max_size=8,
    ),
)
def test_any_history_equals_writing_what_is_left(name: str, steps: list[tuple[str, int]]) -> None:
    """After any appends, crops and reorders, the store reads as the plain list of tokens that it should hold.

    A first write of one huge token pins the frozen scale, so that it is the same in any history.
    """
    pin = torch.full((2, 1, 1, 8), 50.0)
    store, held = filled(name, pin), pin
    for seed, (action, count) in enumerate(steps):
        if action == "append":
            x = torch.randn(2, 1, count, 8, generator=torch.Generator().manual_seed(seed))
            store.append(x)
            held = torch.cat([held, x], dim=2)
        elif action == "crop":
            count = min(count, held.shape[2] - 1)
            store.crop(count)
            held = held[:, :, : held.shape[2] - count]
        else:
            store.map_batch(lambda t: t.flip(0))
            held = held.flip(0)
    assert_same(store, filled(name, pin, held[:, :, 1:]))
