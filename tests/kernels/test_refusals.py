"""What ops and caches refuse before a kernel could read or write where it must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulator.emulator import EmulatorLauncher

from kveval.cache import QuantizedCache
from kveval.errors import ConfigError, UnsupportedError
from kveval.formats.layout import BF16
from kveval.kernels import ops
from kveval.kernels.decode import decode_cuda
from kveval.kernels.formats import format_key

KEY = format_key(BF16)


def plane(batch: int = 1, heads: int = 2, tokens: int = 32) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, 64).bfloat16().view(torch.uint8)


def decode(function: Any = ops.decode, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    made = {
        "query": torch.randn(1, 4, 1, 64).bfloat16(), "kq": plane(), "ks": None, "kg": None, "vq": plane(), "vs": None,
        "vg": None, "bounds": None, "sinks": None, "kfmt": KEY, "vfmt": KEY, "length": 20, "position": 19, "window": 0,
        "scaling": 0.125, "softcap": 0.0, "out_dtype": torch.float32, "splits": 0,
    }  # fmt: skip
    return function(*{**made, **changes}.values())


def test_append_takes_keys_and_values_of_the_same_sequences() -> None:
    k, v = torch.randn(2, 2, 1, 64).bfloat16(), torch.randn(1, 2, 1, 64).bfloat16()
    nonfinite = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="other sequences or heads"):
        ops.append(k, v, plane(2), None, None, plane(1), None, None, nonfinite, 0, 0, KEY, KEY)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": 2**31}, {"window": 2**32 + 1}, {"length": -1}, {"scaling": 0.0}, {"scaling": -1.0},
        {"scaling": float("nan")}, {"softcap": float("inf")}, {"out_dtype": torch.float8_e4m3fn},
        {"query": torch.randn(4, 1, 64)},
    ],
)  # fmt: skip
def test_numbers_that_a_kernel_would_take_for_others_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        decode(**changes)


def test_bounds_and_sinks_need_not_be_contiguous(emulator: EmulatorLauncher) -> None:
    query, kq, vq = torch.randn(3, 4, 1, 64).bfloat16(), plane(3), plane(3)
    bounds = torch.tensor([[0, 7, 20], [3, 9, 12], [0, 9, 4]], dtype=torch.int32)[:, ::2]
    sinks = torch.randn(8)[::2]
    changes = {"query": query, "kq": kq, "vq": vq, "bounds": bounds, "sinks": sinks}
    out, lse = decode(decode_cuda, **changes)
    expected, expected_lse = decode(**changes)
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, expected_lse, atol=0.01, rtol=0.01)


def test_no_query_gives_no_result(emulator: EmulatorLauncher) -> None:
    out, lse = decode(decode_cuda, query=torch.empty(1, 4, 0, 64).bfloat16())
    assert (out.shape, lse.shape) == ((1, 0, 4, 64), (1, 4, 0))
    assert not emulator.launches


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "hidden_size": 128,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["nonsense", "Packed", None])
def test_only_the_three_ways_to_attend_exist(mode: Any) -> None:
    with pytest.raises(ConfigError, match="auto, packed, dequant"):
        QuantizedCache(LLAMA, "bf16", attention=mode)


@pytest.mark.parametrize("reserve", [-1, 2.5, True, "8", None])
def test_a_reserve_is_a_number_of_tokens(reserve: Any) -> None:
    with pytest.raises(ConfigError, match="number of tokens"):
        QuantizedCache(LLAMA, "bf16", reserve=reserve)
