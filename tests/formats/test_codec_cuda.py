"""A GPU stores the bytes that a CPU stores, and reads them back as the CPU does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kveval.formats.codec import Codec
from kveval.formats.spec import get_scheme, scheme_names

PURE = [name for name in scheme_names() if get_scheme(name).key == get_scheme(name).value]


def inputs() -> dict[str, Tensor]:
    """float32 [B, H, T, D]: plain values, values with large channels and of every magnitude, and ties."""
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn((1, 3, 257, 64), generator=draw)
    keys = torch.randn((2, 2, 300, 80), generator=draw)
    keys[..., ::17] *= 40
    spread = torch.randn((1, 2, 256, 128), generator=draw) * torch.logspace(-42, 30, 256)[:, None]
    ties = torch.randint(-96, 97, (1, 2, 128, 64), generator=draw) / 16
    return {"plain": plain, "keys": keys.bfloat16().float(), "spread": spread, "ties": ties}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", inputs())
@pytest.mark.parametrize("name", PURE)
def test_a_gpu_stores_and_reads_what_a_cpu_does(name, kind):
    x = inputs()[kind]
    codec = Codec(get_scheme(name).key, x.shape[-1])
    stored = {}
    for device in ("cpu", "cuda"):
        there = x.to(device)
        constant = codec.constant(there)
        payload, scale = codec.encode(there, constant)
        back = codec.decode(payload, scale, constant, torch.bfloat16)
        stored[device] = {"constant": constant, "payload": payload, "scale": scale, "back": back}
    for part, on_cpu in stored["cpu"].items():
        on_gpu = stored["cuda"][part]
        assert (on_gpu is None) == (on_cpu is None), part
        if on_cpu is not None:
            differing = int((on_gpu.cpu().view(torch.uint8) != on_cpu.view(torch.uint8)).sum())
            assert differing == 0, f"{part}: {differing} bytes of {on_cpu.nbytes} differ"
