"""Codes of 2 to 8 bits in bytes.

`sequential`: a stream of bits, the first code in the low bits of the first byte; a row ends on a whole byte.
`ggml`: llama.cpp's blocks of 32 codes (struct block_q4_0 and its kin in ggml-common.h): for 5-bit codes first the fifth
bits of all 32, little-endian; then 16 bytes of which byte j holds the low four bits of codes j and j + 16. 8-bit codes
are bytes as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]

BLOCK = 32


def pack(codes: Tensor, bits: int, packing: str = "sequential") -> Tensor:
    """uint8 [..., D] codes to uint8 [..., ceil(D * bits / 8)] bytes."""
    if bits == 8:
        return codes
    return _pack_blocks(codes, bits) if packing == "ggml" else _pack_stream(codes, bits)


def unpack(packed: Tensor, bits: int, count: int, packing: str = "sequential") -> Tensor:
    """The inverse of `pack`: uint8 [..., bytes] to uint8 [..., count] codes."""
    if bits == 8:
        return packed
    return _unpack_blocks(packed, bits) if packing == "ggml" else _unpack_stream(packed, bits, count)


def _pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Codes are laid side by side in words of the fewest whole bytes that hold whole codes."""
    count, size = codes.shape[-1], math.lcm(bits, 8)
    per_word, total = size // bits, -(-codes.shape[-1] * bits // 8)
    if short := -count % per_word:
        codes = torch.nn.functional.pad(codes, (0, short))
    words = codes.reshape(*codes.shape[:-1], -1, per_word)
    if size == 8:
        out = words[..., 0].clone()
        for i in range(1, per_word):
            out |= words[..., i] << (bits * i)
        return out
    places = torch.arange(0, size, bits, dtype=torch.int64, device=codes.device)
    word = (words.long() << places).sum(-1, keepdim=True)
    out_bytes: Tensor = word >> torch.arange(0, size, 8, device=codes.device) & 0xFF
    return out_bytes.to(torch.uint8).flatten(-2)[..., :total]


def _unpack_stream(packed: Tensor, bits: int, count: int) -> Tensor:
    size = math.lcm(bits, 8)
    if size == 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        each: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
        return each.flatten(-2)[..., :count]
    if short := -packed.shape[-1] % (size // 8):
        packed = torch.nn.functional.pad(packed, (0, short))
    words = packed.reshape(*packed.shape[:-1], -1, size // 8).long()
    word = (words << torch.arange(0, size, 8, device=packed.device)).sum(-1, keepdim=True)
    codes: Tensor = word >> torch.arange(0, size, bits, device=packed.device) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :count]


def _pack_blocks(codes: Tensor, bits: int) -> Tensor:
    blocks = codes.reshape(*codes.shape[:-1], -1, BLOCK)
    low, high = (blocks & 0xF).chunk(2, dim=-1)
    nibbles: Tensor = low | high << 4
    if bits == 4:
        return nibbles.flatten(-2)
    return torch.cat([_pack_stream(blocks >> 4, 1), nibbles], dim=-1).flatten(-2)


def _unpack_blocks(packed: Tensor, bits: int) -> Tensor:
    blocks = packed.reshape(*packed.shape[:-1], -1, BLOCK * bits // 8)
    nibbles = blocks[..., -BLOCK // 2 :]
    codes = torch.cat([nibbles & 0xF, nibbles >> 4], dim=-1)
    if bits == 5:
        codes = codes | _unpack_stream(blocks[..., : BLOCK // 8], 1, BLOCK) << 4
    return codes.flatten(-2)
