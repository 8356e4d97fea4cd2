"""Our bytes against those of implementations that are not ours: the golden vectors of tests/oracles, bit for bit."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles.golden_file import Arrays, read
from torch import Tensor

from kveval.formats.codec import NOTHING_FROZEN, Codec, Frozen
from kveval.formats.element_types import get_element
from kveval.formats.spec import TensorFormat, get_scheme

GOLDEN = Path(__file__).parents[1] / "oracles" / "golden"
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128])
BLOCK = 32
LLAMA_SCALE_BYTES = {"q8_0": 2, "q5_1": 4, "q5_0": 2, "q4_1": 4, "q4_0": 2, "iq4_nl": 2}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS = np.array([(a + b) / 2 for a, b in itertools.pairwise(E2M1)])


@cache
def golden(name: str) -> Arrays:
    return read(GOLDEN / f"{name}.xz")[0]


def cases(name: str, head_dim: int, field: str) -> list[tuple[str, NDArray]]:
    """(case, input [rows, head_dim]) for every case that has `field`."""
    arrays = golden(name)
    found = [key.split(".")[1] for key in arrays if key.startswith(f"{head_dim}.") and key.endswith(f".{field}")]
    assert len(found) > 10, f"{name} has only {found} for {field}"
    return [(case, arrays[f"{head_dim}.{case}.x"]) for case in found]


def tokens(x: NDArray) -> Tensor:
    """[rows, D] as one sequence of one head: [1, 1, rows, D]."""
    return torch.tensor(x)[None, None]


def preset(name: str) -> TensorFormat:
    return get_scheme(name).key


def encode(fmt: TensorFormat, x: NDArray, frozen: Frozen | None = None) -> tuple[NDArray, NDArray]:
    """Payload [rows, P] and scale bytes [rows, S] of one sequence of one head."""
    codec = Codec(fmt, x.shape[1])
    payload, scale = codec.encode(tokens(x), codec.freeze(tokens(x)) if frozen is None else frozen)
    return payload[0, 0].numpy(), np.empty((len(x), 0), np.uint8) if scale is None else scale[0, 0].numpy()


def decode(fmt: TensorFormat, payload: NDArray, scale: NDArray | None, head_dim: int) -> NDArray:
    stored = None if scale is None else tokens(scale)
    return Codec(fmt, head_dim).decode(tokens(payload), stored, NOTHING_FROZEN, torch.float32)[0, 0].numpy()


def nibbles(codes: NDArray) -> NDArray:
    """Codes of one byte each to two a byte, the first in the low bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


@dataclass(frozen=True)
class Nvfp4:
    """A case as we store it in an NVFP4 preset; codes [rows, blocks, 16]."""

    scheme: str
    x: NDArray

    @cached_property
    def frozen(self) -> Frozen:
        return Codec(preset(self.scheme), self.x.shape[1]).freeze(tokens(self.x))

    @cached_property
    def stored(self) -> tuple[NDArray, NDArray]:
        return encode(preset(self.scheme), self.x, self.frozen)

    @property
    def global_scale(self) -> float:
        assert self.frozen.scale is not None
        return self.frozen.scale.item()

    @property
    def scale(self) -> NDArray:
        return self.stored[1]

    def blocks(self, payload: NDArray) -> NDArray:
        return np.stack([payload & 15, payload >> 4], axis=-1).reshape(*self.scale.shape, 16)

    def steps(self, scale: NDArray) -> NDArray:
        """float64 [rows, blocks, 1]: what a code of 1.0 stands for."""
        return golden("cuda")["decode.e4m3"].astype(np.float64)[scale][..., None] * self.global_scale

    def errors(self, payload: NDArray | None = None, scale: NDArray | None = None) -> NDArray:
        """Squared error of each block, of what we store or of another payload and scale."""
        codes = self.blocks(self.stored[0] if payload is None else payload)
        values = golden("cuda")["decode.e2m1"].astype(np.float64)[codes]
        return ((values * self.steps(self.scale if scale is None else scale) - self.x.reshape(codes.shape)) ** 2).sum(
            -1
        )

    def assert_same_but_for_ties(self, payload: NDArray, compared: NDArray, case: str) -> int:
        """Codes are equal in the `compared` blocks, but where a quotient is within rounding of a tie.

        Others multiply by a reciprocal where we divide. Returns how many elements that moves.
        """
        ours, theirs = self.blocks(self.stored[0]), self.blocks(payload)
        apart = (ours != theirs) & compared[..., None]
        quotients = np.abs(
            self.x.reshape(ours.shape)[apart] / np.broadcast_to(self.steps(self.scale), ours.shape)[apart]
        )
        distance = np.abs(quotients[:, None] / E2M1_MIDPOINTS - 1).min(-1)
        assert (distance < 4 * 2**-23).all(), case
        return int(apart.sum())


def assert_same(ours: NDArray, theirs: NDArray, case: str) -> None:
    assert ours.shape == theirs.shape, case
    differing = np.argwhere(ours != theirs)
    assert not len(differing), f"{case}: {len(differing)} of {ours.size} differ, first at {differing[0]}"


class TestNvidiaHeaders:
    """cuda_fp8.h and cuda_fp4.h, compiled for the host."""

    @pytest.mark.parametrize(("element", "scheme"), [("e4m3", "fp8_e4m3"), ("e5m2", "fp8_e5m2")])
    def test_fp8_codes_of_every_finite_bfloat16(self, element: str, scheme: str) -> None:
        bits = np.arange(65536, dtype=np.uint32)
        finite = (bits & 0x7F80) != 0x7F80
        x = (bits << 16).view(np.float32)[finite].reshape(-1, 128)
        codes, _ = encode(preset(scheme), x)
        assert_same(codes, golden("cuda")[f"bf16.{element}"][finite].reshape(-1, 128), element)

    @pytest.mark.parametrize(("element", "scheme"), [("e4m3", "fp8_e4m3"), ("e5m2", "fp8_e5m2")])
    def test_fp8_codes_of_float32_midpoints_subnormals_and_overflow(self, element: str, scheme: str) -> None:
        x = golden("cuda")["float32"][None]
        codes, _ = encode(preset(scheme), x)
        assert_same(codes, golden("cuda")[f"float32.{element}"][None], element)

    @pytest.mark.parametrize(("element", "scheme"), [("e4m3", "fp8_e4m3"), ("e5m2", "fp8_e5m2")])
    def test_fp8_values_of_every_code(self, element: str, scheme: str) -> None:
        values = golden("cuda")[f"decode.{element}"]
        ours = decode(preset(scheme), np.arange(256, dtype=np.uint8)[None], None, 256)[0]
        finite = np.isfinite(values)
        assert finite.sum() == {"e4m3": 254, "e5m2": 248}[element]
        assert_same(ours[finite].view(np.uint32), values[finite].view(np.uint32), element)

    @pytest.mark.parametrize("source", ["bf16", "float32"])
    def test_e2m1_codes(self, source: str) -> None:
        # A block whose largest value is 6 has the power-of-two scale 1, so its codes are those of its values.
        arrays = golden("cuda")
        x = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32) if source == "bf16" else arrays["float32"]
        with np.errstate(invalid="ignore"):
            below = np.abs(x) < 8
        x, codes = x[below], arrays[f"{source}.e2m1"][below]
        count = len(x) // 31 * 31
        assert count > 3000
        blocks = np.concatenate([np.full((count // 31, 1), 6, np.float32), x[:count].reshape(-1, 31)], axis=1)
        expected = np.concatenate([np.full((count // 31, 1), 7, np.uint8), codes[:count].reshape(-1, 31)], axis=1)
        payload, scale = encode(preset("mxfp4"), blocks)
        assert (scale == 127).all()
        assert_same(payload, nibbles(expected), source)

    def test_e2m1_values_of_every_code(self) -> None:
        payload = nibbles(np.arange(16, dtype=np.uint8))[None]
        ours = decode(preset("mxfp4"), payload, np.full((1, 1), 127, np.uint8), 16)
        assert_same(ours[0].view(np.uint32), golden("cuda")["decode.e2m1"].view(np.uint32), "e2m1")

    @pytest.mark.parametrize("source", ["bf16", "float32"])
    @pytest.mark.parametrize(("scheme", "emax"), [("mxfp4", 2), ("mxfp8", 8)])
    def test_floor_exponents(self, source: str, scheme: str, emax: int) -> None:
        arrays = golden("cuda")
        amax = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
        amax = amax if source == "bf16" else np.abs(arrays["float32"])
        x = np.zeros((len(amax), BLOCK), np.float32)
        x[np.arange(len(x)), np.arange(len(x)) % BLOCK] = amax * np.where(np.arange(len(x)) % 3, 1, -1)
        _, scale = encode(preset(scheme), x)
        floor = arrays[f"{source}.e8m0_floor"].astype(int)
        assert_same(scale[:, 0], np.maximum(floor - emax, 0).astype(np.uint8), scheme)

    def test_e8m0_values_of_every_scale(self) -> None:
        values = golden("cuda")["decode.e8m0"][:255]  # code 255 is NaN
        one = np.full((255, 16), 0x22, np.uint8)  # 32 times the code of 1.0
        ours = decode(preset("mxfp4"), one, np.arange(255, dtype=np.uint8)[:, None], 32)
        assert_same(ours[:, 0].view(np.uint32), values.view(np.uint32), "e8m0")

    @HEAD_DIMS
    def test_fp8_per_token_head(self, head_dim: int) -> None:
        for case, x in cases("cuda", head_dim, "fp8_per_token_head.codes"):
            codes, scale = encode(preset("fp8_per_token_head"), x)
            key = f"{head_dim}.{case}.fp8_per_token_head"
            assert_same(scale, golden("cuda")[f"{key}.scale"].view(np.uint8).reshape(-1, 4), f"scale of {case}")
            assert_same(codes, golden("cuda")[f"{key}.codes"], case)

    @HEAD_DIMS
    @pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
    def test_mx(self, head_dim: int, scheme: str) -> None:
        for case, x in cases("cuda", head_dim, f"{scheme}.codes"):
            payload, scale = encode(preset(scheme), x)
            key, codes = f"{head_dim}.{case}.{scheme}", golden("cuda")[f"{head_dim}.{case}.{scheme}.codes"]
            assert_same(scale, golden("cuda")[f"{key}.scale"], f"scale of {case}")
            assert_same(payload, nibbles(codes) if scheme == "mxfp4" else codes, case)

    @HEAD_DIMS
    def test_nvfp4(self, head_dim: int) -> None:
        for case, x in cases("cuda", head_dim, "nvfp4.codes"):
            key = f"{head_dim}.{case}.nvfp4"
            frozen = Codec(preset("nvfp4"), head_dim).freeze(tokens(x))
            assert frozen.scale is not None
            assert frozen.scale.item() == golden("cuda")[f"{key}.global"].item(), case
            payload, scale = encode(preset("nvfp4"), x, frozen)
            assert_same(scale, golden("cuda")[f"{key}.scale"], f"scale of {case}")
            assert_same(payload, nibbles(golden("cuda")[f"{key}.codes"]), case)

    @HEAD_DIMS
    def test_nvfp4_beyond_its_frozen_scale(self, head_dim: int) -> None:
        arrays = golden("cuda")
        frozen = Codec(preset("nvfp4"), head_dim).freeze(tokens(arrays[f"{head_dim}.normal.x"]))
        payload, scale = encode(preset("nvfp4"), arrays[f"{head_dim}.large_channels.x"], frozen)
        assert (scale == 0x7E).any()  # 448
        assert_same(scale, arrays[f"saturating.{head_dim}.nvfp4.scale"], "scale")
        assert_same(payload, nibbles(arrays[f"saturating.{head_dim}.nvfp4.codes"]), "codes")


class TestLlamaCpp:
    """ggml's reference quantizers; gguf-python gives the same bytes."""

    @HEAD_DIMS
    @pytest.mark.parametrize("name", LLAMA_SCALE_BYTES)
    def test_blocks(self, head_dim: int, name: str) -> None:
        for case, x in cases("ggml", head_dim, name):
            theirs = golden("ggml")[f"{head_dim}.{case}.{name}"]
            ours = self.joined(name, *encode(preset(name), x))
            unscaled = LLAMA_SCALE_BYTES[name]
            overflowed = ~np.isfinite(theirs[..., :unscaled].copy().view(np.float16)).all(-1)
            assert not overflowed.any() or case == "at_1e5"
            if name == "iq4_nl":
                # ggml leaves the codes of such blocks uninitialised; their scale is 0.
                ours[np.abs(x.reshape(*ours.shape[:2], BLOCK)).max(-1) < 1e-15, unscaled:] = 0
            assert_same(ours[~overflowed], theirs[~overflowed], case)
            # Where ggml's fp16 scale or minimum overflows to infinity ours saturates; the codes are the same.
            assert_same(ours[overflowed][:, unscaled:], theirs[overflowed][:, unscaled:], f"{case}, overflowed")
            assert np.isfinite(ours[..., :unscaled].copy().view(np.float16)).all()

    @pytest.mark.parametrize("name", LLAMA_SCALE_BYTES)
    def test_values(self, name: str) -> None:
        for case, x in cases("ggml", 64, name):
            blocks, unscaled = golden("ggml")[f"64.{case}.{name}"], LLAMA_SCALE_BYTES[name]
            scale, payload = (part.reshape(len(x), -1) for part in np.split(blocks, [unscaled], axis=-1))
            finite = np.isfinite(scale.copy().view(np.float16)).all(-1)
            if not finite.any():
                continue
            ours = decode(preset(name), payload[finite], scale[finite], 64)
            theirs = golden("ggml")[f"64.{case}.{name}.decoded"][finite]
            np.testing.assert_allclose(ours, theirs, rtol=2**-23, atol=0, err_msg=case)

    @HEAD_DIMS
    def test_q8_0_kernel_for_x86_differs_only_in_ties(self, head_dim: int) -> None:
        # On x86 llama.cpp rounds half to even and multiplies by 127 / amax; its scales are the same.
        differing = 0
        for case, x in cases("ggml", head_dim, "q8_0_x86"):
            ours = self.joined("q8_0", *encode(preset("q8_0"), x))
            theirs = golden("ggml")[f"{head_dim}.{case}.q8_0_x86"]
            assert_same(ours[..., :2], theirs[..., :2], f"scale of {case}")
            apart = ours[..., 2:].view(np.int8).astype(int) - theirs[..., 2:].view(np.int8)
            assert np.abs(apart).max() <= 1, case
            blocks = x.reshape(apart.shape)
            peak = np.abs(blocks).max(-1, keepdims=True).astype(np.float64)
            scaled = np.abs(
                blocks[apart != 0] * np.broadcast_to(127 / np.maximum(peak, 1e-300), apart.shape)[apart != 0]
            )
            np.testing.assert_allclose(scaled % 1, 0.5, atol=2e-5, err_msg=case)
            differing += int((apart != 0).sum())
        assert differing > 0

    @staticmethod
    def joined(name: str, payload: NDArray, scale: NDArray) -> NDArray:
        """ggml's structs [rows, blocks, bytes]: the numbers of a block in front of its codes."""
        rows = len(payload)
        parts = (
            scale.reshape(rows, -1, LLAMA_SCALE_BYTES[name]),
            payload.reshape(rows, scale.shape[1] // LLAMA_SCALE_BYTES[name], -1),
        )
        return np.concatenate(parts, axis=-1)


class TestTorchao:
    @HEAD_DIMS
    @pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
    def test_mx(self, head_dim: int, scheme: str) -> None:
        smallest = 0
        for case, x in cases("torchao", head_dim, f"{scheme}.codes"):
            payload, scale = encode(preset(scheme), x)
            key = f"{head_dim}.{case}.{scheme}"
            assert_same(scale, golden("torchao")[f"{key}.scale"].reshape(scale.shape), f"scale of {case}")
            # Where the scale is e8m0's smallest, 2^-127, torchao divides by 2^-126, yet reads 2^-127 back: half of what
            # it was given. NVIDIA's headers read 2^-127 too (TestNvidiaHeaders).
            halved, _ = encode(preset(scheme), x / 2)
            at_smallest = np.repeat(scale == 0, payload.shape[1] // scale.shape[1], axis=1)
            smallest += int((at_smallest & (payload != 0)).sum())
            expected = np.where(at_smallest, halved, payload)
            assert_same(expected, golden("torchao")[f"{key}.codes"], case)
        assert smallest > 0

    @pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
    def test_mx_values(self, scheme: str) -> None:
        for case, x in cases("torchao", 64, f"{scheme}.codes"):
            key = f"64.{case}.{scheme}"
            scale = golden("torchao")[f"{key}.scale"].reshape(len(x), -1)
            ours = decode(preset(scheme), golden("torchao")[f"{key}.codes"], scale, 64)
            assert_same(ours.view(np.uint32), golden("torchao")[f"{key}.decoded"].view(np.uint32), case)

    @HEAD_DIMS
    def test_nvfp4(self, head_dim: int) -> None:
        differing = total = 0
        for case, x in cases("torchao", head_dim, "nvfp4.codes"):
            key, stored = f"{head_dim}.{case}.nvfp4", Nvfp4("nvfp4", x)
            assert stored.global_scale == golden("torchao")[f"{key}.global"].item(), case
            # torchao stores no block scale below e4m3's smallest normal number, 2^-6 (code 8).
            assert_same(np.maximum(stored.scale, 8), golden("torchao")[f"{key}.scale"], f"scale of {case}")
            differing += stored.assert_same_but_for_ties(golden("torchao")[f"{key}.codes"], stored.scale >= 8, case)
            total += x.size
        assert differing < 0.01 * total


class TestFourOverSix:
    @HEAD_DIMS
    def test_blocks(self, head_dim: int) -> None:
        blocks = elsewhere = differing = 0
        for case, x in cases("fouroversix", head_dim, "codes"):
            key, stored = f"{head_dim}.{case}", Nvfp4("nvfp4_4over6", x)
            their_scale, their_codes = (golden("fouroversix")[f"{key}.{field}"] for field in ("scale", "codes"))
            assert stored.global_scale == np.float32(golden("fouroversix")[f"{key}.amax"].item()) / np.float32(1536)
            # Another choice of scale: errors alike to rounding, or theirs is worse. Their reference does not clamp to
            # 6: a block scale that rounds down far (among e4m3's subnormals) gives it quotients of 7 and more, which
            # its e2m1 codes can't hold.
            same = stored.scale == their_scale
            held = np.abs(x.reshape(*same.shape, 16)).max(-1) < 7 * stored.steps(stored.scale)[..., 0]
            assert (stored.errors()[~same] <= (1 + 1e-6) * stored.errors(their_codes, their_scale)[~same]).all(), case
            differing += stored.assert_same_but_for_ties(their_codes, same & held, case)
            elsewhere += int((~same).sum())
            blocks += same.size
        assert blocks > 1000
        assert elsewhere < blocks * 0.005
        assert differing <= 4


class TestQuanto:
    """optimum-quanto, which transformers' quantized cache calls."""

    @HEAD_DIMS
    @pytest.mark.parametrize("name", ["int4", "int4_row", "int4_channel"])
    def test_int4_with_float32_numbers(self, head_dim: int, name: str) -> None:
        grouping: dict[str, dict[str, Any]] = {
            "int4": {"granularity": "per_group", "group_size": 64},
            "int4_row": {"granularity": "per_token"},
            "int4_channel": {"granularity": "per_channel", "group_size": 64},
        }
        fmt = TensorFormat(element="uint4", scale_rule="minmax", scale_dtype="fp32", **grouping[name])
        for case in self.cases_of(head_dim, name):
            key = f"{head_dim}.{case}.{name}"
            x = golden("quanto").get(f"{key}.x", golden("quanto")[f"{head_dim}.{case}.x"])
            payload, stored = encode(fmt, x)
            step, zero = stored.copy().view(np.float32).reshape(-1, 2).T
            assert_same(step, golden("quanto")[f"{key}.scale"].reshape(-1), f"scale of {case}")
            assert_same(zero, -golden("quanto")[f"{key}.shift"].reshape(-1), f"zero point of {case}")
            assert_same(payload, nibbles(golden("quanto")[f"{key}.codes"].reshape(x.shape)), case)
            if head_dim == 64:
                ours = decode(fmt, payload, stored, 64)
                theirs = golden("quanto")[f"{key}.decoded"].reshape(x.shape)
                largest = np.abs(x).max()  # one rounding more or less in scale * code + zero
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=4 * 2**-24 * largest, err_msg=case)

    @HEAD_DIMS
    def test_int4_g64_is_near_quanto_on_bfloat16_tensors(self, head_dim: int) -> None:
        # There quanto rounds max - min, x - min and the quotient to bfloat16; we round only what is stored.
        codes_apart = total = 0
        for case in self.cases_of(head_dim, "int4.bf16"):
            key, x = f"{head_dim}.{case}.int4.bf16", golden("quanto")[f"{head_dim}.{case}.x"]
            payload, stored = encode(preset("int4_g64"), x)
            numbers = torch.from_numpy(stored.copy()).view(torch.bfloat16).float().numpy()
            step, zero = numbers.reshape(-1, 2).T
            assert_same(zero, -golden("quanto")[f"{key}.shift"].reshape(-1), f"zero point of {case}")
            np.testing.assert_allclose(step, golden("quanto")[f"{key}.scale"].reshape(-1), rtol=2**-7, err_msg=case)
            codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(-1, 64)
            apart = np.abs(codes.astype(int) - golden("quanto")[f"{key}.codes"])
            assert apart.max() <= 1, case
            codes_apart += int(apart.sum())
            total += apart.size
        assert 0 < codes_apart < 0.03 * total

    @HEAD_DIMS
    def test_int8_per_token_head(self, head_dim: int) -> None:
        for case in self.cases_of(head_dim, "int8"):
            codes, scale = encode(preset("int8_per_token_head"), golden("quanto")[f"{head_dim}.{case}.x"])
            key = f"{head_dim}.{case}.int8"
            assert_same(scale.copy().view(np.float32), golden("quanto")[f"{key}.scale"], f"scale of {case}")
            assert_same(codes.view(np.int8), golden("quanto")[f"{key}.codes"], case)

    @staticmethod
    def cases_of(head_dim: int, name: str) -> list[str]:
        found = [
            key.split(".")[1]
            for key in golden("quanto")
            if key.startswith(f"{head_dim}.") and key.endswith(f".{name}.codes")
        ]
        assert len(found) >= 3, found
        return found


@pytest.mark.parametrize("name", ["lloyd_max3", "lloyd_max4"])
def test_lloyd_max_levels_are_the_means_of_their_cells(name: str) -> None:
    # What makes levels optimal for a unit normal variable: each is the mean of what is nearest to it.
    levels = get_element(name).values
    edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
    for level, (low, high) in zip(levels, itertools.pairwise(edges), strict=True):
        density = [math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) for edge in (low, high)]
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        assert level == pytest.approx((density[0] - density[1]) / mass, abs=2e-4)
