"""Are the stored bytes of every format on a GPU those of the CPU? Writes a record, and fails if one byte differs.

    python scripts/check_formats_on_gpu.py --out results/gpu/formats.json

For every preset and role, head size and input, the tensor is encoded on both devices; payload, scales and what is
frozen at the first write must be equal bit for bit, and what the GPU decodes may differ from the CPU by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kveval import env
from kveval.errors import UnsupportedError
from kveval.formats.codec import Codec, Frozen
from kveval.formats.spec import TensorFormat, get_scheme, scheme_names

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 576)
HEADS, TOKENS = 2, 256


def main() -> int:
    """Compare, print, write; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    inputs = dict(tensors())
    results = [compare(fmt, labels, inputs, options.device) for labels, fmt in distinct_formats().items()]
    wrong = [r for r in results if r["different"]]
    record = {
        "what": "bytes of every preset's key and value formats, encoded on the GPU and on the CPU",
        "inputs": list(inputs),
        "head_dims": HEAD_DIMS,
        "formats": results,
        "env": env.collect(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(
        f"{len(results)} formats, {sum(r['tensors'] for r in results)} tensors, {len(wrong)} formats differ\n"
    )
    for r in wrong:
        sys.stdout.write(f"  {r['used_by']}: {r['different']}\n")
    return 1 if wrong else 0


def distinct_formats() -> dict[tuple[str, ...], TensorFormat]:
    """Every format that some preset uses, by its users ("nvfp4 keys")."""
    users: dict[str, list[str]] = {}
    formats: dict[str, TensorFormat] = {}
    for name in scheme_names():
        for role in ("key", "value"):
            fmt = getattr(get_scheme(name), role)
            users.setdefault(fmt.model_dump_json(), []).append(f"{name} {role}s")
            formats[fmt.model_dump_json()] = fmt
    return {tuple(who): formats[key] for key, who in users.items()}


def tensors() -> Iterator[tuple[str, Tensor]]:
    """Named float32 [1, HEADS, TOKENS, 576]: ten random and ten adversarial; smaller heads take their first part."""
    shape = (1, HEADS, TOKENS, max(HEAD_DIMS))
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator) * 10.0 ** (seed - 5)
        x[..., ::17] *= 30
        yield f"random {seed}", x.bfloat16().float() if seed % 2 else x
    base = torch.randn(shape, generator=torch.Generator().manual_seed(10))
    outlier, alternating, one_token = base.clone(), base.abs(), torch.zeros(shape)
    outlier[..., 5] = 3e4
    alternating[..., ::2] *= -1
    one_token[:, :, 7] = base[:, :, 7]
    midpoints = torch.arange(TOKENS * shape[-1]).view(TOKENS, shape[-1]).expand(shape) % 512 / 4 - 64
    yield from {
        "zeros": torch.zeros(shape),
        "constant": torch.full(shape, -3.0),
        "outlier channel": outlier,
        "alternating": alternating,
        "one token": one_token,
        "subnormal": base * 1e-41,
        "tiny": base * 1e-30,
        "huge": base * 1e30,
        "beyond e4m3": base.sign() * torch.linspace(440, 480, shape[-1]),
        "midpoints": midpoints.clone(),
    }.items()


def compare(fmt: TensorFormat, users: tuple[str, ...], inputs: dict[str, Tensor], device: str) -> dict[str, Any]:
    """How many tensors were compared for a format, what differed, and how far decoding lies apart."""
    count, different, furthest = 0, [], 0.0
    for head_dim in HEAD_DIMS:
        try:
            fmt.check(head_dim)
        except UnsupportedError:
            continue
        codec = Codec(fmt, head_dim, (0.02, 0.05) if fmt.granularity == "per_head" else None)
        for name, wide in inputs.items():
            x = wide[..., :head_dim]
            here, there = stored(codec, x), stored(codec, x.to(device))
            count += 1
            unequal = [part for part in here if not torch.equal(here[part], there[part].cpu())]
            if unequal:
                different.append(f"{name}, head {head_dim}: {', '.join(unequal)}")
            ours, theirs = decoded(codec, here), decoded(codec, there).cpu()
            scale = ours.abs().amax().clamp(min=1e-30)
            furthest = max(furthest, float(((ours - theirs).abs() / scale).max()))
    return {
        "used_by": list(users),
        "format": fmt.model_dump(mode="json", exclude_defaults=True),
        "tensors": count,
        "different": different,
        "largest_decode_difference_over_amax": furthest,
    }


def stored(codec: Codec, x: Tensor) -> dict[str, Tensor]:
    """Everything that a first write of `x` stores."""
    frozen = codec.freeze(x)
    payload, scale = codec.encode(x, frozen)
    parts = {"payload": payload, "scale": scale, "frozen scale": frozen.scale, "frozen mean": frozen.mean}
    return {name: part for name, part in parts.items() if part is not None}


def decoded(codec: Codec, parts: dict[str, Tensor]) -> Tensor:
    """float32 [1, HEADS, TOKENS, D] from `stored`."""
    frozen = Frozen(parts.get("frozen scale"), parts.get("frozen mean"))
    return codec.decode(parts["payload"], parts.get("scale"), frozen)


if __name__ == "__main__":
    sys.exit(main())
