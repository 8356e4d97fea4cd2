"""What kernels are used for, by what is asked for, the layer's formats and shape, the dtype and the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kveval import kernel_use as module
from kveval.errors import UnsupportedError
from kveval.formats.layout import layer_formats
from kveval.formats.spec import get_scheme
from kveval.geometry import LayerGeometry
from kveval.kernel_use import KernelUse, kernel_use

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def use(
    scheme: str = "fp8_per_token_head",
    mode: Any = "auto",
    *,
    device: torch.device = CUDA,
    dtype: torch.dtype = torch.bfloat16,
    raw_chunk: bool = False,
    changes: dict[str, Any] | None = None,
    **shape: Any,
) -> KernelUse:
    layer = LayerGeometry(**{"kind": "full", "kv_heads": 2, "head_dim_k": 128, "head_dim_v": 128, **shape})
    (fmt,) = layer_formats(get_scheme(scheme).model_copy(update=changes or {}), [layer])
    assert fmt is not None
    return kernel_use(mode, fmt, layer, index=3, dtype=dtype, device=device, raw_chunk=raw_chunk)


@pytest.fixture(autouse=True)
def gpu_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_missing", lambda device: "")


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "per channel": ({"scheme": "kivi4"}, "keys: kernels store a token by itself"),
    "llama.cpp": ({"scheme": "q4_0"}, "keys: kernels have no element offset4"),
    "head size": ({"head_dim_k": 96, "head_dim_v": 96}, "takes heads of 64, 128, 192, 256, not 96"),
    "two head sizes": ({"head_dim_v": 64}, "keys have 128 numbers per head and values 64"),
    "float32": ({"dtype": torch.float32}, "the model computes in float32, and kernels multiply in bfloat16"),
    "wide keys in float16": ({"scheme": "k16v8", "dtype": torch.float16}, "stay bfloat16 are not multiplied"),
    "wide first keys in float16": (
        {"changes": {"sink_tokens": 4}, "dtype": torch.float16}, "stay bfloat16 are not multiplied",
    ),
    "raw chunks in float16": ({"dtype": torch.float16, "raw_chunk": True}, "read raw, in float16"),
    "latents": ({"kind": "mla", "kv_heads": 1, "head_dim_k": 512, "head_dim_v": 64}, "of the latents that it stores"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_what_the_kernels_lack_is_said_or_refused(name: str) -> None:
    options, reason = REASONS[name]
    assert reason in use(**options).problem
    with pytest.raises(UnsupportedError, match="layer 3 can't be attended to as packed bytes: ") as refused:
        use(**options, mode="packed")
    assert reason in refused.value.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["fp8_per_token_head", "int4_g64", "nvfp4", "nvfp4_mean_shift", "mxfp4"])
def test_what_they_have(scheme: str, dtype: torch.dtype) -> None:
    for mode in ("auto", "packed"):
        found = use(scheme, mode, dtype=dtype)
        assert (found.problem, found.stores, found.mode, found.where) == ("", (True, True), mode, "layer 3")
        assert found.keys_lack_mean == (scheme == "nvfp4_mean_shift")


def test_storage_is_theirs_wherever_they_know_the_format() -> None:
    """Also for attention that decodes first: they give the bytes and numbers that the codec gives."""
    assert use("k8v4", "dequant").stores == (True, True)
    assert use("kivi4").stores == (False, True)
    assert use("q4_0").stores == (False, False)
    assert use(head_dim_k=96, head_dim_v=96).stores == (True, True)


def test_a_gpu_without_kernels_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_missing", lambda device: "cuda-core is missing")
    found = use()
    assert (found.problem, found.stores) == ("cuda-core is missing", (False, False))
    with pytest.raises(UnsupportedError, match="layer 3 can't be attended to as packed bytes: cuda-core is missing"):
        use(mode="packed")


def test_a_cpu_has_their_reference_for_whoever_asks() -> None:
    assert use(device=CPU).stores == use(device=CPU, mode="dequant").stores == (False, False)
    found = use(device=CPU, mode="packed", dtype=torch.float32, head_dim_k=96, head_dim_v=64)
    assert (found.problem, found.stores) == ("", (True, True))
    with pytest.raises(UnsupportedError, match="not on mps"):
        use(device=torch.device("mps"), mode="packed")
    assert use(device=torch.device("mps")).stores == (False, False)
