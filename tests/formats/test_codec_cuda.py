"""A GPU stores the bytes that a CPU stores, and reads them back as the CPU does."""

from __future__ import annotations

import pytest
import torch
from format_contract import can_store, write
from preset_formats import FORMATS
from torch import Tensor

from kveval.formats.codec import Codec, Frozen
from kveval.formats.spec import TensorFormat


def inputs() -> dict[str, Tensor]:
    """float32 [B, H, T, D]: plain values, large channels on an offset, every magnitude, ties, a rotation of 512."""
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn((1, 3, 256, 64), generator=draw)
    keys = torch.randn((2, 2, 320, 80), generator=draw)
    keys[..., ::17] *= 40
    keys[..., 5::23] += 90
    spread = torch.randn((1, 2, 256, 128), generator=draw) * torch.logspace(-42, 30, 256)[:, None]
    ties = torch.randint(-96, 97, (1, 2, 128, 64), generator=draw) / 16
    latent = torch.randn((2, 1, 64, 512), generator=draw)
    transposed = torch.randn((2, 96, 3, 96), generator=draw).transpose(1, 2)
    return {
        "plain": plain, "keys": keys.bfloat16().float(), "spread": spread, "ties": ties, "latent": latent,
        "transposed": transposed,
    }  # fmt: skip


def stored(fmt: TensorFormat, codec: Codec, x: Tensor, frozen: Frozen) -> dict[str, Tensor | None]:
    payload, scale = codec.encode(x, frozen)
    first = slice(None, None), slice(None, None), slice(0, fmt.unit)
    one, one_scale = codec.encode(x[first], frozen)
    read = {
        f"read as {dtype}": codec.decode(payload, scale, frozen, dtype) for dtype in (torch.float32, torch.bfloat16)
    }
    frozen_parts = {"frozen scale": frozen.scale, "frozen mean": frozen.mean}
    return {**frozen_parts, "payload": payload, "scale": scale, "one": one, "its scale": one_scale, **read}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", inputs())
@pytest.mark.parametrize("side", FORMATS)
def test_a_gpu_stores_and_reads_what_a_cpu_does(side: str, kind: str) -> None:
    fmt, x = FORMATS[side], inputs()[kind]
    if not can_store(fmt, x.shape[-1]):
        pytest.skip(f"{side} refuses heads of {x.shape[-1]}")
    codec = write(fmt, x).codec
    there = x.to("cuda")
    on_cpu = stored(fmt, codec, x, codec.freeze(x))
    on_gpu = stored(fmt, codec, there, codec.freeze(there))
    for part, expected in on_cpu.items():
        found = on_gpu[part]
        assert (found is None) == (expected is None), part
        if expected is None or found is None:
            continue
        assert found.is_cuda, part
        differing = int((found.cpu().contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum())
        assert differing == 0, f"{part}: {differing} bytes of {expected.nbytes} differ"
