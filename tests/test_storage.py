"""Packed buffers of one role: what is written is what is read, whatever happened in between."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_tools import HEAD_DIM, HEADS, KINDS, ROLES, assert_same_store, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kveval.errors import MeasurementError, UnsupportedError
from kveval.storage import CROP_RESERVE, PackedStore, StoredBytes

EVERY_ROLE = pytest.mark.parametrize("name", ROLES)
EVERY = pytest.mark.parametrize("name", KINDS)
WINDOWED = pytest.mark.parametrize("name", [n for n in KINDS if not (ROLES[n].sink_tokens or ROLES[n].residual_length)])
FREEZING = [name for name, role in ROLES.items() if role.format.freezes]


def new_store(name: str, **kwargs: Any) -> PackedStore:
    return PackedStore(ROLES[name], HEAD_DIM, where="keys of layer 3", **kwargs)


def filled(name: str, *pieces: Tensor, **kwargs: Any) -> PackedStore:
    store = new_store(name, **kwargs)
    for piece in pieces:
        store.append(piece)
    return store


def read(store: PackedStore) -> Tensor:
    return store.read(store.snapshot(), torch.float32)


def has_tail(name: str) -> bool:
    """Whether tokens wait in BF16 before they are encoded."""
    return ROLES[name].residual_length > 0 or ROLES[name].format.unit > 1


def cropped(store: PackedStore, tokens: int) -> bool:
    """Crop, and say whether that was possible."""
    try:
        store.crop(tokens)
    except UnsupportedError as error:
        if f"keys of layer 3 can't forget its last {tokens} tokens exactly: only the last" not in str(error):
            raise
        return False
    return True


def test_every_kind_of_role_is_here() -> None:
    roles = [ROLES[name] for name in KINDS]
    assert 15 < len(roles) < len(ROLES)
    assert any(r.sink_tokens and r.residual_length and r.format.freezes for r in roles)
    assert any(r.sink_tokens and r.format.unit > 1 for r in roles)
    assert {r.residual_length for r in roles if r.format.unit > 1} >= {0, 32, 64, 128}
    assert any(r.scales for r in roles)


class TestAppend:
    @EVERY_ROLE
    @pytest.mark.parametrize("chunk", [1, 7])
    def test_in_chunks_equals_at_once(self, name: str, chunk: int) -> None:
        """But for what the first write freezes: that write is the same here."""
        x, first = numbers(0, 150 if name in KINDS else 40, batch=1), 20 if name in FREEZING else 0
        chunked = filled(name, *(p for p in (x[:, :, :first], *x[:, :, first:].split(chunk, dim=2)) if p.shape[2]))
        assert_same_store(chunked, filled(name, x[:, :, :first], x[:, :, first:]))
        assert torch.equal(read(chunked), read(filled(name, x[:, :, :first], x[:, :, first:])))

    @pytest.mark.parametrize("name", FREEZING)
    def test_the_first_write_decides(self, name: str) -> None:
        """Freezing is real: a first write of other size gives other bytes for all that follow."""
        x = numbers(0, 150)
        louder = filled(name, x[:, :, :20] * 9, x[:, :, 20:])
        assert not torch.equal(
            louder.parts()["payload"][:, :, 20:], filled(name, x[:, :, :20], x[:, :, 20:]).parts()["payload"][:, :, 20:]
        )

    @EVERY
    def test_an_empty_write_changes_nothing(self, name: str) -> None:
        store = new_store(name)
        store.append(numbers(0, 0))
        assert (store.total, store.nbytes(), store.billed_bytes()) == (0, StoredBytes(), 0)
        store.append(numbers(0, 3))
        store.append(numbers(0, 0))
        assert_same_store(store, filled(name, numbers(0, 3)))

    @EVERY
    def test_nan_and_infinity_are_refused_with_the_layer_named(self, name: str) -> None:
        store, x = filled(name, numbers(0, 2)), numbers(2, 5).clone()
        for value in (float("nan"), float("inf"), float("-inf")):
            x[1, 1, 2, 7] = value
            with pytest.raises(MeasurementError, match="keys of layer 3 got NaN or infinity"):
                store.append(x)
        assert_same_store(store, filled(name, numbers(0, 2)))

    def test_float16_and_bfloat16_arrive_as_they_are(self) -> None:
        x = numbers(0, 4)
        for dtype in (torch.bfloat16, torch.float16):
            assert_same_store(
                filled("int4_g64-keys-full", x.to(dtype)), filled("int4_g64-keys-full", x.to(dtype).float())
            )

    @EVERY
    def test_storage_takes_no_part_in_gradients(self, name: str) -> None:
        store = filled(name, numbers(0, 70).requires_grad_())
        assert not any(part.requires_grad for part in store.parts().values())
        assert not read(store).requires_grad

    @EVERY
    def test_what_was_handed_in_is_not_kept(self, name: str) -> None:
        """Wide tokens and means are copies: a caller may reuse its tensor."""
        x = numbers(0, 50).clone()
        store = filled(name, x)
        expected = {part: tensor.clone() for part, tensor in store.parts().items()}
        x.fill_(7)
        assert all(torch.equal(tensor, expected[part]) for part, tensor in store.parts().items())


class TestWideTokens:
    """Sinks and the last tokens stay BF16, and come back as they were."""

    @pytest.mark.parametrize("name", [n for n in KINDS if has_tail(n) or ROLES[n].sink_tokens])
    def test_first_and_last_tokens_are_exact(self, name: str) -> None:
        role, x = ROLES[name], numbers(0, 200).bfloat16()
        for total in (1, 4, 5, 31, 32, 33, 36, 37, 64, 127, 128, 129, 200):
            got = read(filled(name, x[:, :, :total])).bfloat16()
            exact = (got == x[:, :, :total]).all(-1).all(1).all(0)
            encoded, sinks = role.encoded_tokens(total), min(total, role.sink_tokens)
            assert exact[:sinks].all()
            assert exact[sinks + encoded :].all()
            # Of what was encoded, a token comes back whole by accident only.
            assert exact[sinks : sinks + encoded].sum() < 0.1 * encoded or encoded == 0

    @pytest.mark.parametrize(
        ("total", "encoded"),
        [(0, 0), (127, 0), (128, 128), (129, 128), (255, 128), (256, 256), (383, 256), (384, 384)],
    )
    def test_kivi_keys_wait_for_a_full_tail(self, total: int, encoded: int) -> None:
        role = ROLES["kivi4-keys-full"]
        assert (role.residual_length, role.format.unit) == (128, 32)
        assert role.encoded_tokens(total) == encoded
        if total:
            parts = filled("kivi4-keys-full", numbers(0, total)).parts()
            assert ("payload" in parts) == (encoded > 0)
            assert parts["tail"].shape[2] == total - encoded if total > encoded else "tail" not in parts

    @pytest.mark.parametrize(("total", "encoded"), [(127, 0), (128, 0), (129, 1), (200, 72)])
    def test_kivi_values_leave_one_by_one(self, total: int, encoded: int) -> None:
        assert ROLES["kivi4-values-full"].encoded_tokens(total) == encoded


class TestBytes:
    LENGTHS = (1, 31, 32, 33, 127, 128, 129, 200)

    @EVERY_ROLE
    @pytest.mark.parametrize("batch", [1, 3])
    def test_bytes_are_the_formula_and_growth_is_padding(self, name: str, batch: int) -> None:
        """From the definition: encoded units, wide tokens of two bytes an element, one constant per sequence."""
        role, block, store, at = ROLES[name], 64, new_store(name, block_size=64), 0
        fmt, rows = role.format, batch * HEADS
        for total in self.LENGTHS:
            store.append(numbers(at, total, batch=batch))
            at, held, encoded = total, store.nbytes(), role.encoded_tokens(total)
            units = encoded // fmt.unit
            assert held.payload == rows * encoded * fmt.payload_bytes(HEAD_DIM)
            assert held.scales == rows * units * fmt.scale_bytes(HEAD_DIM)
            assert held.wide_tokens == rows * (total - encoded) * 2 * HEAD_DIM
            assert held.constants == batch * fmt.constant_bytes(HEAD_DIM, HEADS)
            assert held.wide_layers == 0
            assert held.stored == store.billed_bytes() == batch * role.nbytes(total, head_dim=HEAD_DIM, kv_heads=HEADS)
            spare = -encoded % block
            assert held.padding == rows * (spare // fmt.unit) * fmt.unit_bytes(HEAD_DIM)
            # What a crop of `CROP_RESERVE` tokens would put back into a tail.
            copies = encoded - role.encoded_tokens(max(0, total - CROP_RESERVE)) if has_tail(name) else 0
            assert held.undo == rows * copies * 2 * HEAD_DIM

    @EVERY
    @pytest.mark.parametrize("block", [1, 48])
    def test_buffers_grow_by_whole_blocks(self, name: str, block: int) -> None:
        """Of whole groups of tokens, and of 16 tokens, so that every head's rows begin at a multiple of 16 bytes."""
        store, together = new_store(name, block_size=block), math.lcm(ROLES[name].format.unit, 16)
        size = -(-block // together) * together
        for start in range(0, 120, 24):
            store.append(numbers(start, start + 24))
            payload = store.snapshot().payload
            if payload is not None:
                encoded = ROLES[name].encoded_tokens(store.total)
                assert payload.shape[2] == -(-encoded // size) * size
        assert_same_store(store, filled(name, numbers(0, 24), numbers(24, 120)))

    @EVERY
    @pytest.mark.parametrize("reserve", [1, 100, 400])
    def test_what_is_reserved_is_allocated_once(self, name: str, reserve: int) -> None:
        """For as many tokens as will be encoded; more than that grows by blocks, and nothing else changes."""
        store, seen = new_store(name, block_size=32, reserve=reserve), set()
        for start in range(0, reserve, 50):
            store.append(numbers(start, min(start + 50, reserve)))
            if store.snapshot().payload is not None:
                seen.add(store.snapshot().payload.data_ptr())
        assert len(seen) == (ROLES[name].encoded_tokens(reserve) > 0)
        assert store.nbytes().stored == store.billed_bytes()
        store.append(numbers(reserve, reserve + 100))
        assert_same_store(
            store,
            filled(name, *numbers(0, reserve + 100).split([min(50, reserve), reserve + 100 - min(50, reserve)], dim=2)),
        )
        store.crop(reserve + 100)
        assert store.nbytes() == StoredBytes()

    @EVERY
    def test_rows_of_heads_begin_at_a_multiple_of_16_bytes(self, name: str) -> None:
        """Of codes and of scales, in buffers that grew, lost their newest and oldest tokens and changed their rows."""
        store = new_store(name, block_size=1)
        for start, stop in ((0, 5), (5, 6), (6, 47), (47, 130)):
            store.append(numbers(start, stop))
            if start:
                store.crop(1)
                store.append(numbers(stop - 1, stop))
            if not (ROLES[name].sink_tokens or ROLES[name].residual_length):
                store.drop(stop // 3)
            store.select_rows(torch.tensor([1, 0]))
            for plane in (store.snapshot().payload, store.snapshot().scale):
                if plane is not None:
                    assert not any(stride % 16 for stride in plane.stride()[:2])
                    assert plane.stride()[2:] == (plane.shape[3], 1)

    def test_stored_bytes_add_up_by_part(self) -> None:
        total = StoredBytes(1, 2, 3, 4, 5, 6, 7) + StoredBytes(10, 20, 30, 40, 50, 60, 70)
        assert total == StoredBytes(11, 22, 33, 44, 55, 66, 77)
        assert total.stored == 11 + 22 + 33 + 44 + 55


class TestCrop:
    @EVERY_ROLE
    def test_then_append_equals_never_written(self, name: str) -> None:
        """Every distance up to 70, across the borders of tails and groups; refused beyond the reserve at most."""
        x, later = numbers(0, 160, batch=1), numbers(160, 200, batch=1, seed=1, factor=3)
        full = filled(name, x[:, :, :60], x[:, :, 60:])
        reference = filled(name, x[:, :, :60], x[:, :, 60:89])
        # Roles of one kind differ in their arithmetic alone.
        for distance in range(70, 0, -1) if name in KINDS else (64, 33, 1):
            reference.append(x[:, :, reference.total : 160 - distance])
            store, expected = full.copy(), reference.copy()
            if has_tail(name) and distance > CROP_RESERVE and not cropped(store, distance):
                assert_same_store(store, full)
                continue
            store = full.copy()
            store.crop(distance)
            assert_same_store(store, expected)
            store.append(later)
            expected.append(later)
            assert_same_store(store, expected)
            assert torch.equal(read(store), read(expected))

    @pytest.mark.parametrize("total", [3, 6, 37, 69, 101, 133])
    @pytest.mark.parametrize("name", [n for n in ROLES if ROLES[n].sink_tokens])
    def test_across_the_sinks(self, name: str, total: int) -> None:
        x, later = numbers(0, total), numbers(0, 150, seed=1)
        first = 1 if name in FREEZING else total
        for left in {*range(1, min(total, 7)), *range(max(1, total - CROP_RESERVE), total, 9)} & {
            *range(total - 64, total)
        }:
            store = filled(name, x[:, :, :first], x[:, :, first:])
            store.crop(total - left)
            store.append(later)
            kept = min(first, left)
            assert_same_store(store, filled(name, x[:, :, :kept], x[:, :, kept:left], later))

    @EVERY
    @pytest.mark.parametrize("distance", [65, 100, 150, 199])
    def test_beyond_the_reserve_is_exact_or_refused(self, name: str, distance: int) -> None:
        x, later = numbers(0, 200), numbers(0, 40, seed=1)
        first = 1 if name in FREEZING else 100
        store = filled(name, x[:, :, :first], x[:, :, first:])
        if not cropped(store, distance):
            assert has_tail(name)
            assert_same_store(store, filled(name, x[:, :, :first], x[:, :, first:]))
            return
        store.append(later)
        left = 200 - distance
        assert_same_store(store, filled(name, x[:, :, : min(first, left)], x[:, :, min(first, left) : left], later))

    def test_a_deep_crop_that_leaves_no_tail_needs_no_copies(self) -> None:
        name, x = "kivi_no_residual-keys-full", numbers(0, 300)
        store = filled(name, x)
        with pytest.raises(UnsupportedError, match="only the last 76 tokens are at hand in BF16"):
            store.crop(300 - 97)
        store.crop(300 - 96)
        store.append(x[:, :, 96:140])
        assert_same_store(store, filled(name, x[:, :, :140]))

    @EVERY
    @pytest.mark.parametrize("surplus", [0, 5])
    def test_to_nothing_forgets_what_was_frozen(self, name: str, surplus: int) -> None:
        store = filled(name, numbers(0, 6, factor=100))
        store.crop(6 + surplus)
        assert (store.total, store.nbytes(), store.billed_bytes(), store.parts()) == (0, StoredBytes(), 0, {})
        store.append(numbers(0, 4, batch=3))
        assert_same_store(store, filled(name, numbers(0, 4, batch=3)))

    @pytest.mark.parametrize("name", FREEZING)
    def test_into_the_first_write_is_refused_where_it_froze_something(self, name: str) -> None:
        x = numbers(0, 12)
        store = filled(name, x[:, :, :6], x[:, :, 6:])
        with pytest.raises(
            UnsupportedError, match="last 7 tokens exactly: its scale was frozen from the first 6 tokens"
        ) as caught:
            store.crop(7)
        assert "branch" in str(caught.value.remedy)
        assert_same_store(store, filled(name, x[:, :, :6], x[:, :, 6:]))
        store.crop(6)
        assert_same_store(store, filled(name, x[:, :, :6]))

    @EVERY
    @pytest.mark.parametrize("count", [0, -3])
    def test_of_nothing_changes_nothing(self, name: str, count: int) -> None:
        store = filled(name, numbers(0, 40))
        store.crop(count)
        assert_same_store(store, filled(name, numbers(0, 40)))


class TestSnapshots:
    @EVERY
    def test_restoring_forgets_all_that_was_done_since(self, name: str) -> None:
        x = numbers(0, 90)
        store = filled(name, x)
        before, expected = store.snapshot(), read(store)
        store.append(numbers(0, 300, seed=1, factor=20))  # grows the buffers
        store.select_rows(torch.tensor([1, 1, 0]))
        store.drop(32)
        assert torch.equal(store.read(before, torch.float32), expected)
        store.restore(before)
        assert_same_store(store, filled(name, x))
        store.append(numbers(90, 140))
        assert_same_store(store, filled(name, x, numbers(90, 140)))

    @EVERY
    def test_appending_within_capacity_shares_the_buffers(self, name: str) -> None:
        """A snapshot costs no copy of the codes, and what is written beyond it is not seen through it."""
        store = filled(name, numbers(0, 200))
        before, expected = store.snapshot(), read(store)
        store.append(numbers(0, 10, seed=1, factor=20))
        if before.payload is not None and store.snapshot().payload.shape == before.payload.shape:
            assert store.snapshot().payload.data_ptr() == before.payload.data_ptr()
        assert torch.equal(store.read(before, torch.float32), expected)

    @EVERY
    def test_a_crop_to_the_snapshot_and_new_tokens_leave_it_whole(self, name: str) -> None:
        """What a branch may do inside: crop back to where it started, but no further, and go on."""
        store = filled(name, numbers(0, 200))
        before, expected = store.snapshot(), read(store)
        store.append(numbers(0, 20, seed=1))
        store.crop(20)
        store.append(numbers(0, 50, seed=2, factor=9))
        assert torch.equal(store.read(before, torch.float32), expected)
        store.restore(before)
        assert_same_store(store, filled(name, numbers(0, 200)))


class TestRows:
    @EVERY
    @pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0], [0, 0, 1, 1]])
    def test_selection_moves_everything(self, name: str, rows: list[int]) -> None:
        x = numbers(0, 75) * torch.tensor([1.0, 100.0])[:, None, None, None]
        store, index = filled(name, x), torch.tensor(rows)
        store.select_rows(index)
        assert_same_store(store, filled(name, x[index]))
        store.append(x[index])
        assert_same_store(store, filled(name, x[index], x[index]))

    @EVERY_ROLE
    def test_a_row_in_a_batch_has_the_bytes_that_it_has_alone(self, name: str) -> None:
        x = numbers(0, 75) * torch.tensor([1.0, 100.0])[:, None, None, None]
        batch = filled(name, x[:, :, :20], x[:, :, 20:])
        for row in (0, 1):
            alone = filled(name, x[row : row + 1, :, :20], x[row : row + 1, :, 20:])
            for part, tensor in alone.parts().items():
                assert torch.equal(tensor, batch.parts()[part][row : row + 1]), part

    @EVERY
    def test_copies_are_independent(self, name: str) -> None:
        store = filled(name, numbers(0, 40))
        twin = store.copy()
        assert_same_store(store, twin)
        twin.append(numbers(0, 40, seed=1, factor=50))
        assert_same_store(store, filled(name, numbers(0, 40)))
        store.crop(40)
        store.append(numbers(0, 80, seed=2, factor=0.01))
        assert_same_store(twin, filled(name, numbers(0, 40), numbers(0, 40, seed=1, factor=50)))
        assert_same_store(store, filled(name, numbers(0, 80, seed=2, factor=0.01)))


class TestDrop:
    @WINDOWED
    @pytest.mark.parametrize("oldest", [1, 31, 32, 64, 100])
    def test_the_oldest_go_and_the_rest_stays(self, name: str, oldest: int) -> None:
        role, x = ROLES[name], numbers(0, 150)
        store, whole = filled(name, x), filled(name, x)
        store.drop(oldest)
        unit = role.format.unit
        gone = min(oldest, role.encoded_tokens(150)) // unit * unit
        assert (store.total, store.dropped) == (150, gone)
        assert torch.equal(read(store), read(whole)[:, :, gone:])
        assert store.nbytes().stored == store.billed_bytes()
        assert whole.nbytes().stored - store.nbytes().stored == 2 * HEADS * gone // unit * role.format.unit_bytes(
            HEAD_DIM
        )
        store.append(numbers(150, 250))
        whole.append(numbers(150, 250))
        assert torch.equal(read(store), read(whole)[:, :, gone:])
        store.drop(max(0, oldest - 5))
        assert store.dropped == gone

    @pytest.mark.parametrize("kept", [1, 17, 33, 64])
    def test_what_is_kept_has_room_to_the_next_16_tokens(self, kept: int) -> None:
        store = filled("bf16-keys-sliding", numbers(0, 100))
        store.drop(100 - kept)
        payload = store.snapshot().payload
        assert payload is not None
        assert payload.shape[2] == -(-kept // 16) * 16
        assert store.nbytes().stored == store.billed_bytes()
        store.append(numbers(100, 120))
        assert torch.equal(read(store), numbers(100 - kept, 120).bfloat16().float())

    def test_memory_is_freed(self) -> None:
        store = filled("bf16-keys-sliding", numbers(0, 256), block_size=64)
        store.drop(192)
        payload = store.snapshot().payload
        assert payload is not None
        assert payload.untyped_storage().nbytes() == 2 * HEADS * 64 * 2 * HEAD_DIM

    def test_a_crop_into_dropped_tokens_is_refused(self) -> None:
        store = filled("bf16-keys-sliding", numbers(0, 100))
        store.drop(50)
        with pytest.raises(UnsupportedError, match="its first 50 tokens have left the sliding window"):
            store.crop(51)
        store.crop(50)
        assert (store.total, store.dropped) == (50, 50)


class TestReads:
    @EVERY
    def test_unused_capacity_is_never_read(self, name: str) -> None:
        store, x = filled(name, numbers(0, 75)), numbers(75, 150)
        twin = store.copy()
        state, encoded = twin.snapshot(), ROLES[name].encoded_tokens(75)
        if state.payload is not None:
            state.payload[:, :, encoded:] = 0xFF
        if state.scale is not None:
            state.scale[:, :, encoded // ROLES[name].format.unit :] = 0xFF
        assert torch.equal(read(store), read(twin))
        for s in (store, twin):
            s.append(x)
        assert_same_store(store, twin)
        assert torch.equal(read(store), read(twin))

    @EVERY
    def test_every_live_byte_is_read(self, name: str) -> None:
        """Changing any part that counts as stored changes what is read."""
        store = filled(name, numbers(0, 180))
        for part, tensor in store.parts().items():
            twin = store.copy()
            held = twin.parts()[part]
            held.copy_(tensor.flip(2).roll(1, dims=1) if tensor.shape[2] > 1 else tensor * 2)
            assert not torch.equal(read(twin), read(store)), part

    def test_of_nothing_is_refused(self) -> None:
        store = new_store("bf16-keys-sliding")
        with pytest.raises(MeasurementError, match="keys of layer 3 was read, but stores nothing"):
            store.read(store.snapshot(), torch.float32)

    def test_are_counted(self) -> None:
        store = filled("bf16-keys-sliding", numbers(0, 10))
        early = store.snapshot()
        store.append(numbers(10, 14))
        read(store)
        store.read(early, torch.float32)
        assert store.tokens_read == 24
        assert store.copy().tokens_read == 0

    @EVERY
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_come_in_the_compute_dtype(self, name: str, dtype: torch.dtype) -> None:
        store = filled(name, numbers(0, 180))
        got = store.read(store.snapshot(), dtype)
        assert got.dtype == dtype
        assert torch.allclose(got.float(), read(store), rtol=0.01, atol=1e-3)


@settings(max_examples=120)
@given(
    name=st.sampled_from(KINDS),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 90)),
            st.tuples(st.just("crop"), st.integers(0, 90)),
            st.tuples(st.sampled_from(["swap", "snapshot", "restore"]), st.just(0)),
        ),
        max_size=10,
    ),
)
def test_any_history_equals_writing_what_is_left(name: str, steps: list[tuple[str, int]]) -> None:
    """After any operations the store holds what a store has that was only given what is left.

    The first write is never cropped, so that whatever it freezes is the same in any history. A crop may only be
    refused if it reaches back more than the reserve from the most tokens that were held.
    """
    first = numbers(0, 6)
    store, held, most = filled(name, first), first, 6
    saved = (store.snapshot(), held, most)
    for seed, (action, count) in enumerate(steps, start=1):
        if action == "append":
            x = numbers(0, count, seed=seed)
            store.append(x)
            held = torch.cat([held, x], dim=2)
            most = max(most, held.shape[2])
        elif action == "crop":
            count = min(count, held.shape[2] - 6)
            if held.shape[2] - count < saved[1].shape[2]:
                saved = (None, None, 0)  # type: ignore[assignment]
            left = held.shape[2] - count
            if cropped(store, count):
                held = held[:, :, :left]
            else:
                assert has_tail(name)
                assert left < most - CROP_RESERVE
        elif action == "swap":
            store.select_rows(torch.tensor([1, 0]))
            held = held.flip(0)
        elif action == "snapshot":
            saved = (store.snapshot(), held, most)
        elif saved[0] is not None:
            store.restore(saved[0])
            held, most = saved[1:]
        if saved[1] is None:
            saved = (store.snapshot(), held, most)
    assert_same_store(store, filled(name, held[:, :, :6], held[:, :, 6:]))
    assert store.nbytes().stored == store.billed_bytes()


def test_scales_of_a_role_reach_the_codes() -> None:
    """Calibrated scales are per KV head, and part of the role."""
    name = next(name for name, role in ROLES.items() if role.scales)
    store, x = filled(name, numbers(0, 5)), numbers(0, 5)
    one = PackedStore(replace(ROLES[name], scales=(1.0, 1.0)), HEAD_DIM, where="x")
    one.append(x / torch.tensor([0.01, 0.02])[:, None, None])
    assert torch.equal(store.parts()["payload"], one.parts()["payload"])
