"""Codes in bytes: exact positions of every bit, in a stream and in llama.cpp's blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.formats.packing import pack, unpack

EVERY_WIDTH = pytest.mark.parametrize("bits", range(1, 9))


def as_bytes(codes: list[int], bits: int) -> bytes:
    """A stream of bits as one large number: the first code in its lowest bits."""
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return number.to_bytes(-(-len(codes) * bits // 8), "little")


@EVERY_WIDTH
@settings(max_examples=30)
@given(codes=st.lists(st.integers(0, 255), min_size=1, max_size=70))
def test_a_stream_holds_every_code_and_puts_the_first_in_the_low_bits(bits: int, codes: list[int]) -> None:
    codes = [c % 2**bits for c in codes]
    packed = pack(torch.tensor([codes], dtype=torch.uint8), bits)
    assert packed.dtype == torch.uint8
    assert bytes(packed[0].tolist()) == as_bytes(codes, bits)
    assert unpack(packed, bits, len(codes))[0].tolist() == codes


@EVERY_WIDTH
def test_every_code_survives_at_every_place(bits: int) -> None:
    codes = torch.arange(2**bits, dtype=torch.uint8)[:, None].repeat(1, 11).roll(3, 0)
    rolled = torch.stack([codes[:, i].roll(i * 7) for i in range(11)], dim=1)
    assert torch.equal(unpack(pack(rolled, bits), bits, 11), rolled)


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (1, [1, 0, 0, 1, 1, 0, 0, 0, 1], [0b00011001, 0b1]),
        (2, [1, 3, 0, 2, 3], [0b10001101, 0b11]),
        # Three bits straddle bytes: 7 6 5 | 4 3 2 1 0 from the low end.
        (3, [7, 6, 5, 4, 3, 2, 1, 0], [0b01110111, 0b00111001, 0b00000101]),
        (3, [1, 2, 3], [0b11010001, 0b0]),
        (4, [0x1, 0xF, 0xA], [0xF1, 0x0A]),
        (5, [1, 2, 3, 4, 5, 6, 7, 31], [0x41, 0x0C, 0x52, 0xCC, 0xF9]),
        (8, [1, 255, 0], [1, 255, 0]),
    ],
)
def test_golden_streams(bits: int, codes: list[int], expected: list[int]) -> None:
    assert pack(torch.tensor([codes], dtype=torch.uint8), bits).tolist() == [expected]
    assert unpack(torch.tensor([expected], dtype=torch.uint8), bits, len(codes)).tolist() == [codes]


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_llama_blocks(bits: int) -> None:
    """block_q4_0 and block_q5_0 of ggml-common.h: qs[j] is code j and code j + 16; bit j of qh is a fifth bit."""
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 4, 96), dtype=np.uint8)
    packed = pack(torch.from_numpy(codes), bits, "ggml")
    assert packed.shape == (3, 4, 96 * bits // 8)
    expected = []
    for block in codes.reshape(-1, 32).astype(int):
        if bits == 8:
            expected += block.tolist()
            continue
        if bits == 5:
            fifth = sum(int(code >> 4) << j for j, code in enumerate(block))
            expected += fifth.to_bytes(4, "little")
        expected += [int(block[j] & 15 | (block[j + 16] & 15) << 4) for j in range(16)]
    assert packed.flatten().tolist() == expected
    assert np.array_equal(unpack(packed, bits, 96, "ggml").numpy(), codes)


@pytest.mark.parametrize(
    ("bits", "packing"), [*((bits, "sequential") for bits in range(1, 9)), (4, "ggml"), (5, "ggml"), (8, "ggml")]
)
def test_views_pack_as_their_copies(bits: int, packing: str) -> None:
    codes = torch.randint(0, 2**bits, (5, 64, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8).mT
    assert not codes.is_contiguous()
    packed = pack(codes, bits, packing)
    assert torch.equal(packed, pack(codes.contiguous(), bits, packing))
    wide = torch.stack([packed, packed], dim=-1)[..., 0]
    assert torch.equal(unpack(wide, bits, 64, packing), codes)


@EVERY_WIDTH
def test_packing_leaves_its_input_alone(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 16), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    before = codes.clone()
    packed = pack(codes, bits)
    kept = packed.clone()
    unpack(packed, bits, 16)
    assert torch.equal(codes, before)
    assert torch.equal(packed, kept)
