"""What every reference is asked to store: named cases of rows, each a tensor of its own.

Values are bfloat16-representable unless the case says `float32`: keys and values reach a cache in bfloat16.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def bf16(x: NDArray[np.floating]) -> F32:
    """Round to the nearest bfloat16, ties to even; finite input."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def e4m3_midpoints() -> list[float]:
    """Midpoints of neighbouring positive e4m3 values, subnormal ones included, up to 432 (between 416 and 448)."""
    values = [m * 2.0**-9 for m in range(8)]
    values += [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return [(a + b) / 2 for a, b in itertools.pairwise(values)]


def _midpoints(levels: tuple[float, ...]) -> list[float]:
    return [(a + b) / 2 for a, b in itertools.pairwise(levels)]


def _ties(extremes: tuple[float, ...], between: list[float], head_dim: int, rng: np.random.Generator) -> F32:
    """Rows whose every block of 16 holds the extremes that fix its scale, and halfway points elsewhere."""
    rows = rng.choice(between, size=(6, head_dim))
    rows[:, ::16] = extremes[0]
    rows[:, 1::16] = extremes[-1]
    power = 2.0 ** np.array([0, 0, 0, -7, 5, -20])[:, None]
    return (rows * power).astype(np.float32)


def cases(head_dim: int) -> dict[str, F32]:
    """Named tensors float32 [rows, head_dim]; equal on every run."""
    rng = np.random.default_rng(head_dim)
    channels = np.ones(head_dim)
    channels[[3, head_dim // 2, head_dim - 5]] = (25.0, 8.0, 60.0)
    out: dict[str, F32] = {
        "normal": bf16(rng.standard_normal((48, head_dim))),
        "large_channels": bf16(rng.standard_normal((48, head_dim)) * channels),
        "biased_channels": bf16(rng.standard_normal((16, head_dim)) + channels),
        "magnitudes": bf16(rng.standard_normal((48, head_dim)) * 10.0 ** rng.uniform(-5, 3, (48, 1))),
        "float32": (rng.standard_normal((48, head_dim)) * channels).astype(np.float32),
        "zero": np.zeros((2, head_dim), np.float32),
        "constant": bf16(np.repeat([[1.5], [-0.7], [3.1e-3]], head_dim, axis=1)),
        "powers_of_two": bf16(2.0 ** rng.integers(-8, 8, (8, head_dim)) * rng.choice([-1, 1], (8, head_dim))),
        "opposite_extremes": bf16(np.where(np.arange(head_dim) % 2, 3.0, -3.0) * np.array([[1.0], [-1.0], [0.37]])),
        "tiny": bf16(rng.standard_normal((4, head_dim)) * np.array([[1e-7], [1e-9], [1e-16], [1e-30]])),
        "subnormal": bf16(rng.standard_normal((4, head_dim)) * 1e-39),
        "at_448": bf16(rng.standard_normal((4, head_dim)).clip(-1, 1) * 448),
        "at_464": bf16(rng.standard_normal((4, head_dim)).clip(-1, 1) * 464),
        "at_1e5": bf16(rng.standard_normal((4, head_dim)).clip(-1, 1) * 1e5),
        "ties_q4_0": _ties((-8.0,), [k + 0.5 for k in range(-8, 7)], head_dim, rng),
        "ties_q5_0": _ties((-16.0,), [k + 0.5 for k in range(-16, 15)], head_dim, rng),
        "ties_uint4": _ties((0.0, 15.0), [k + 0.5 for k in range(15)], head_dim, rng),
        "ties_uint5": _ties((0.0, 31.0), [k + 0.5 for k in range(31)], head_dim, rng),
        "ties_uint8": _ties((0.0, 255.0), [k + 0.5 for k in range(128)], head_dim, rng),
        "ties_int8": _ties((127.0,), [k + 0.5 for k in range(-127, 127)], head_dim, rng),
        "ties_iq4_nl": _ties((-127.0,), _midpoints(IQ4_NL), head_dim, rng),
        "ties_e2m1": _ties((6.0,), [s * m for m in _midpoints(E2M1) for s in (-1, 1)], head_dim, rng),
        "ties_e4m3": _ties((448.0,), [s * m for m in e4m3_midpoints() for s in (-1, 1)], head_dim, rng),
    }
    outlier = np.zeros((6, head_dim))
    outlier[np.arange(6), rng.integers(0, head_dim, 6)] = (1.0, -1.0, 300.0, -2.7e-4, 5e4, -0.1)
    out["one_outlier"] = bf16(outlier)
    noisy = rng.standard_normal((6, head_dim)) * 0.01
    out["outlier_in_noise"] = bf16(noisy + 100 * np.sign(outlier))
    for name, x in out.items():
        assert name == "float32" or np.array_equal(bf16(x), x), f"case {name} is not bfloat16"
    return out
