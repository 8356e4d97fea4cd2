"""How a scheme runs on the device at hand: what its codes are read through, what multiplies them, and what that costs.

The answers on hardware are data (`kveval.formats.hardware`), those on kernels follow from kernels/fragments.cuh, and
widening is measured: the decode kernel is timed as it is and with its loads alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kveval.attention import ATTENTION_PATH
from kveval.bench.caches import hollow_cache, make_caches, random_query, rounds_of
from kveval.bench.record import ShapeRow, Spread
from kveval.bench.shapes import Case
from kveval.bench.timers import GraphTimer, Round, Timer
from kveval.bench.warm import compile_ahead
from kveval.errors import KvevalError
from kveval.formats.hardware import GPUS, native
from kveval.formats.layout import RoleFormat, layer_formats
from kveval.formats.spec import KVScheme, TensorFormat
from kveval.geometry import LayerGeometry
from kveval.kernel_use import KernelUse, kernel_use
from kveval.kernels import decode
from kveval.kernels.compiler import sources_digest
from kveval.kernels.formats import format_key
from kveval.native_note import NOTE, LayerPath, NativePaths, RolePath, SchemePath, Widening, read_native_paths
from kveval.plan import Arm

if TYPE_CHECKING:
    from kveval.backends.hf import HFBackend
    from kveval.store import RunStore

__all__ = ["native_paths", "note", "widening"]

log = logging.getLogger(__name__)

LENGTH, BATCH, REPLAYS, QUICK_US = 32768, 4, 5, 500.0
"""Of the quick measurement of widening: tokens, sequences, samples, and microseconds of a sample."""

NO_GPU = "Widening is time of the decode kernel, which runs on NVIDIA GPUs alone."

_GENERATIONS = {(8, 0): "Ampere", (8, 6): "Ampere", (8, 7): "Ampere", (8, 9): "Ada", (9, 0): "Hopper"}
_CONVERTS_E4M3 = (8, 9)
"""From this compute capability on, an instruction converts a pair of e4m3 codes."""

_READ = {
    "bf16": "as stored",
    "e5m2": "fp16 pairs by byte moves",
    "int8": "fp16 pairs by byte moves",
    "uint8": "fp16 pairs by byte moves",
    "uint4": "fp16 pairs by masks",
    "e2m1": "fp16 pairs by bit operations",
}
"""How the decode kernel widens an element; e4m3 depends on the GPU."""


def generation(capability: tuple[int, int]) -> str | None:
    """Name of a GPU's generation from its compute capability; None for one that is not known."""
    return "Blackwell" if capability >= (10, 0) else _GENERATIONS.get(capability)


def native_paths(
    schemes: Iterable[KVScheme],
    layers: Sequence[LayerGeometry],
    *,
    device: torch.device,
    dtype: torch.dtype,
    shape: ShapeRow | None,
    arms: Mapping[str, Arm] | None = None,
    timer: Timer | None = None,
) -> NativePaths:
    """How `schemes` run on `device`, in layers of these shapes.

    Args:
        schemes: The schemes, each with the scales that it needs.
        layers: Of the model.
        device: Where it runs.
        dtype: What it computes in.
        shape: Of the attention on which widening is measured; None: it is not.
        arms: By scheme name, how a run was asked to attend; without it, kernels are used wherever they can be.
        timer: Takes the time of widening on a GPU; a quick one if None.

    Raises:
        UnsupportedError: a scheme can't be stored in these layers, or not attended to as was asked.
    """
    wanted = list(schemes)
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    found = {
        scheme.name: _layer_paths(scheme, layers, device, dtype, (arms or {}).get(scheme.name)) for scheme in wanted
    }
    shares: dict[str, Widening | str] = dict.fromkeys(found, NO_GPU)
    if on_gpu:
        shares = (
            widening(wanted, shape, device, timer=timer) if shape else dict.fromkeys(found, "No layer has a kernel.")
        )
    return NativePaths(
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        generation=generation(capability) if on_gpu else None,
        dtype=str(dtype).removeprefix("torch."),
        kernel_hash=sources_digest(),
        schemes=tuple(_scheme_path(name, paths, shares[name]) for name, paths in found.items()),
    )


def _scheme_path(name: str, layers: tuple[LayerPath, ...], share: Widening | str) -> SchemePath:
    return SchemePath(name, layers, None, share) if isinstance(share, str) else SchemePath(name, layers, share, "")


def _layer_paths(
    scheme: KVScheme, layers: Sequence[LayerGeometry], device: torch.device, dtype: torch.dtype, arm: Arm | None
) -> tuple[LayerPath, ...]:
    """One entry for all layers that go the same way."""
    same: dict[tuple[RolePath, RolePath, str, str], list[int]] = {}
    own = [(i, fmt) for i, fmt in enumerate(layer_formats(scheme, layers)) if fmt is not None]
    for i, fmt in own:
        use = kernel_use(
            arm.attention if arm else "auto", fmt, layers[i], index=i, dtype=dtype, device=device,
            raw_chunk=arm is not None and arm.reads == "fresh_chunk",
        )  # fmt: skip
        path = (
            _role(fmt.key, use, 0, device, dtype),
            _role(fmt.value, use, 1, device, dtype),
            *_attention(use, device),
        )
        same.setdefault(path, []).append(i)
    return tuple(LayerPath(_layers_text(indices, of=len(own)), *path) for path, indices in same.items())


def _layers_text(indices: Sequence[int], *, of: int) -> str:
    """As "" for all, "layer 3", "layers 0, 1, 29" or "22 of 26 layers"."""
    if len(indices) == of:
        return ""
    if len(indices) > 4:
        return f"{len(indices)} of {of} layers"
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _role(role: RoleFormat, use: KernelUse, at: int, device: torch.device, dtype: torch.dtype) -> RolePath:
    fmt, name = role.format, str(dtype).removeprefix("torch.")
    packed = _is_packed(use, device)
    found = native(fmt.element)
    column = GPUS.index(gpu) if (gpu := _generation_of(device)) else None
    return RolePath(
        element=fmt.element,
        stored=stored_text(role),
        appended="kernel" if use.stores[at] and device.type == "cuda" else "torch",
        read=_read(fmt, device) if packed else _read_by_torch(fmt, name),
        scaled=_scaled(fmt, packed),
        products=f"{'bf16' if fmt.element == 'bf16' else 'fp16'}, fp32 sums" if packed else f"torch, {name}",
        converts="" if column is None else found.convert[column],
        multiplies="" if column is None else found.multiply[column],
    )


def _read_by_torch(fmt: TensorFormat, dtype: str) -> str:
    if not fmt.lossy:
        return "as stored" if dtype == "bfloat16" else f"converted to {dtype}"
    return "float32 by a table"


def _is_packed(use: KernelUse, device: torch.device) -> bool:
    return use.mode != "dequant" and not use.problem and device.type == "cuda"


def _attention(use: KernelUse, device: torch.device) -> tuple[str, str]:
    """What attends, and on a GPU why that is not a kernel."""
    if _is_packed(use, device):
        return "kernel", ""
    if use.mode == "packed":
        return "the kernel's reference, torch", ""
    reason = "asked for" if use.mode == "dequant" else use.problem
    return ATTENTION_PATH, reason if device.type == "cuda" else ""


def _generation_of(device: torch.device) -> str | None:
    return generation(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


def _read(fmt: TensorFormat, device: torch.device) -> str:
    """How the decode kernel turns codes into 16-bit pairs."""
    if fmt.element != "e4m3":
        return _READ[fmt.element]
    direct = torch.cuda.get_device_capability(device) >= _CONVERTS_E4M3
    return f"fp16 pairs by {'conversion' if direct else 'bit operations'}"


def _scaled(fmt: TensorFormat, packed: bool) -> str:
    if not fmt.rule.stored:
        return ""
    return "outside the products" if packed and fmt.scale_dtype != "e4m3" else "on every number"


def stored_text(role: RoleFormat) -> str:
    """As "e4m3, one fp32 scale per token and head"."""
    fmt = role.format
    shared = {
        "none": "",
        "per_tensor": "one scale per layer",
        "per_head": "one scale per head",
        "per_token": "per token and head",
        "per_group": f"per {fmt.group_size} elements",
        "per_channel": f"per channel over {fmt.group_size} tokens",
    }[fmt.granularity]
    if fmt.rule.stored:
        shared = f"one {fmt.scale_dtype} scale {'and zero point ' if fmt.rule.stored == 2 else ''}{shared}"
    parts = [fmt.element, shared]
    parts += ["one fp32 scale per sequence"] if fmt.global_divisor is not None else []
    parts += [{"hadamard": "rotated", "mean_shift": "less channel means"}.get(fmt.transform, "")]
    parts += [f"first {role.sink_tokens} tokens bf16"] if role.sink_tokens else []
    parts += [f"last {role.residual_length} tokens bf16"] if role.residual_length else []
    return ", ".join(filter(None, parts))


def _shape(layers: Sequence[LayerGeometry], query_heads: int) -> ShapeRow | None:
    """Of the first layer whose heads the decode kernel takes."""
    for layer in layers:
        if layer.stores_kv and layer.kind != "mla" and layer.head_dim_k == layer.head_dim_v in decode.HEAD_DIMS:
            return ShapeRow("", query_heads, layer.kv_heads, layer.head_dim_k, 1)
    return None


def widening(
    schemes: Iterable[KVScheme], shape: ShapeRow, device: torch.device, *, timer: Timer | None = None
) -> dict[str, Widening | str]:
    """By scheme, how much of the decode kernel's time is not loading; or why it was not measured.

    Schemes that store equal bytes are measured once; their transforms, sinks and tails play no part.
    """
    case = Case(shape, BATCH, LENGTH)
    found: dict[str, Widening | str] = {}
    named: dict[tuple[str, str], list[KVScheme]] = {}
    for scheme in schemes:
        key, value = scheme.key, scheme.value
        if reason := decode.misfit(key, value, shape.head_dim, shape.head_dim):
            found[scheme.name] = f"No decode kernel: {reason}."
        else:
            named.setdefault((format_key(key), format_key(value)), []).append(scheme)
    try:
        measured = {key: _widening(of[0], case, device, timer) for key, of in _compiled(named, case, device).items()}
    except (KvevalError, RuntimeError) as error:
        # It explains figures and decides none of them.
        log.exception("measuring widening failed")
        problem = f"{type(error).__name__}: {error}"
        return found | {scheme.name: problem for of in named.values() for scheme in of}
    return found | {scheme.name: measured[key] for key, of in named.items() for scheme in of}


def _compiled(
    named: Mapping[tuple[str, str], list[KVScheme]], case: Case, device: torch.device
) -> Mapping[tuple[str, str], list[KVScheme]]:
    """`named`, once all kernels that will be timed are compiled, on all cores."""
    query = random_query(case, device, torch.Generator())
    caches = [hollow_cache(of[0], case, device) for of in named.values()]
    compile_ahead((cache.decode(query, loads_only=loads) for cache in caches for loads in (False, True)), device)
    return named


@torch.inference_mode()
def _widening(scheme: KVScheme, case: Case, device: torch.device, timer: Timer | None) -> Widening:
    generator = torch.Generator().manual_seed(0)
    caches, query = make_caches(scheme, case, device, generator), random_query(case, device, generator)
    rounds: dict[str, Round] = {
        "whole": rounds_of(caches, query),
        "loads": rounds_of(caches, query, loads_only=True),
    }
    us = (timer or GraphTimer(device, QUICK_US)).microseconds(rounds, REPLAYS)
    whole, loads = (Spread.of(us[name]).median for name in ("whole", "loads"))
    share = Spread.of(1 - a / b for a, b in zip(us["loads"], us["whole"], strict=True)).median
    shape = case.shape
    return Widening(share, whole, loads, case.length, case.batch, shape.query_heads, shape.kv_heads, shape.head_dim)


def note(arms: Iterable[Arm], backend: HFBackend, store: RunStore) -> None:
    """Write how a run's schemes run on this machine, unless the run has that already.

    It explains the run's figures and decides none of them: if it fails, the note says why.
    """
    known = read_native_paths(store.path)
    if known is not None and known.problem is None:
        return
    model, info = backend.loaded.model, backend.loaded.info
    by_scheme = {arm.scheme.name: arm for arm in arms if arm.role in ("baseline", "scheme")}
    text = model.config.get_text_config()
    try:
        found = native_paths(
            [arm.scheme for arm in by_scheme.values()],
            info.geometry,
            device=backend.loaded.device,
            dtype=getattr(torch, info.compute_dtype),
            shape=_shape(info.geometry, int(text.num_attention_heads)),
            arms=by_scheme,
        )
    except (KvevalError, RuntimeError) as error:
        log.exception("finding out how the schemes run failed")
        found = NativePaths(
            str(backend.loaded.device),
            None,
            info.compute_dtype,
            sources_digest(),
            (),
            f"{type(error).__name__}: {error}",
        )
    store.write_note(NOTE, found.to_dict())
