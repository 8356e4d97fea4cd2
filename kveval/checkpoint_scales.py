"""Scales of keys and values that a model's checkpoint carries beside its weights, as quantization tools write them.

Layer N's may be called, after `...layers.N.` and the names of modules:

    k_scale, v_scale                            of the attention, of a module in it, or of the projections
    k_proj.output_scale, v_proj.output_scale    of the projections' outputs
    kv_scale                                    one for both (older)

Each is a number, or one per KV head; a stored code times its scale is the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from kveval.errors import ModelError, first_problem
from kveval.formats.scales import StaticScales
from kveval.geometry import LayerGeometry
from kveval.model_cache import weight_files, weight_names

__all__ = ["find", "has_scales", "hub_tensor_names", "is_scale", "is_unused_scale", "tensor_names"]

_KINDS = {
    "k_scale": ("key",), "k_proj.output_scale": ("key",),
    "v_scale": ("value",), "v_proj.output_scale": ("value",),
    "kv_scale": ("key", "value"),
}  # fmt: skip
_SCALE = re.compile(rf"(?:^|\.)(?P<kind>{'|'.join(map(re.escape, _KINDS))})$")
_LAYER = re.compile(r"(?P<stack>(?:.+\.)?(?:layers|blocks|h))\.(?P<index>\d+)\.")
_ZERO_POINT = re.compile(r"(?:^|\.)(?:[kv]_zero_point|[kv]_proj\.output_zero_point)$")
_UNUSED = re.compile(r"(?:^|\.)(?:q_scale|q_proj\.output_scale|prob_scale|prob_output_scale)$")
_LEAVE_OUT = "Mend the checkpoint, calibrate with `kveval calibrate`, or write `scales: none` to store without scales."


def is_scale(name: str) -> bool:
    """Whether a tensor of this name says how keys or values are stored."""
    return bool(_SCALE.search(name) or _ZERO_POINT.search(name))


def is_unused_scale(name: str) -> bool:
    """Whether a tensor of this name is a scale for narrow queries or probabilities, which kveval keeps wide."""
    return bool(_UNUSED.search(name))


def has_scales(names: Iterable[str]) -> bool:
    """Whether a checkpoint with tensors of these names carries scales of keys or values."""
    return any(map(is_scale, names))


def tensor_names(folder: Path) -> tuple[str, ...]:
    """Names of all tensors in a model folder's safetensors files. Reads their headers only."""
    from safetensors import safe_open

    names: list[str] = []
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            names.extend(tensors.keys())
    return tuple(names)


def hub_tensor_names(repo: str, folder: Path) -> tuple[str, ...]:
    """Names of a hub model's tensors: from its index or its weights if they are in `folder`, else as the hub says.

    Args:
        repo: Owner and name.
        folder: Of the hub client's cache; its name is the commit.

    Raises:
        ModelError: the hub can't be asked, or holds no readable safetensors file.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return tuple(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    (name,) = weight_names(folder)
    if (folder / name).is_file():
        return tensor_names(folder)
    try:
        return tuple(HfApi().parse_safetensors_file_metadata(repo, name, revision=folder.name).tensors)
    except (OSError, SafetensorsParsingError) as error:
        raise ModelError(
            f"can't learn whether the weights of {repo!r} carry scales: {error}",
            remedy="Check the network, or download the model first.",
        ) from error


def find(folder: Path, layers: Sequence[LayerGeometry]) -> StaticScales | None:
    """The scales that the checkpoint in `folder` carries, or None if it carries none.

    Args:
        folder: A transformers folder with one or several safetensors files.
        layers: The model's geometry. Scales of layers that store nothing of their own are left out: a layer that reads
            another's keys and values reads them with that layer's scales.

    Raises:
        ModelError: a side or a layer is missing, a scale is no positive number, there are several for one thing, or
            their layer can't be told.
    """
    found: dict[tuple[str, int], dict[str, tuple[float, ...]]] = {}
    stacks: dict[str, str] = {}
    for name, numbers in _read(folder).items():
        if _ZERO_POINT.search(name):
            if any(numbers):
                raise ModelError(f"{folder}: {name} is not 0: its scales go with a zero point.", remedy=_LEAVE_OUT)
            continue
        scale, layer = _SCALE.search(name), _LAYER.match(name)
        if scale is None or layer is None:
            raise ModelError(f"{folder}: can't tell which layer the scale {name} is of.", remedy=_LEAVE_OUT)
        stacks.setdefault(layer["stack"], name)
        for role in _KINDS[scale["kind"]]:
            found.setdefault((role, int(layer["index"])), {})[name] = numbers
    if not found:
        return None
    if len(stacks) > 1:
        names = " and ".join(list(stacks.values())[:2])
        raise ModelError(f"{folder} has scales in {len(stacks)} stacks of layers: {names}.", remedy=_LEAVE_OUT)
    storing = [i for i, layer in enumerate(layers) if layer.stores_kv]
    sides = {role: {i: _numbers(folder, found, role, i, layers[i].kv_heads) for i in storing} for role in _ROLES}
    try:
        return StaticScales(source="checkpoint", **sides)
    except ValidationError as error:
        raise ModelError(f"{folder}: {first_problem(error)}.", remedy=_LEAVE_OUT) from error


_ROLES = ("key", "value")


def _read(folder: Path) -> dict[str, tuple[float, ...]]:
    """Numbers of every scale and zero point, by tensor name."""
    from safetensors import safe_open

    numbers: dict[str, tuple[float, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            numbers |= {
                name: tuple(tensors.get_tensor(name).float().flatten().tolist())
                for name in tensors.keys()  # noqa: SIM118 - not a mapping
                if is_scale(name)
            }
    return numbers


def _numbers(
    folder: Path, found: Mapping[tuple[str, int], Mapping[str, tuple[float, ...]]], role: str, layer: int, heads: int
) -> tuple[float, ...]:
    named = found.get((role, layer))
    if named is None:
        raise ModelError(f"{folder} carries scales, but no {role} scale for layer {layer}.", remedy=_LEAVE_OUT)
    if len(set(named.values())) > 1:
        raise ModelError(
            f"{folder}: the {role} scales of layer {layer} contradict each other: {', '.join(named)}.",
            remedy=_LEAVE_OUT,
        )
    numbers = next(iter(named.values()))
    if len(numbers) not in (1, heads):
        raise ModelError(
            f"{folder}: layer {layer} has {len(numbers)} {role} scales ({next(iter(named))}); "
            f"it should have 1, or one for each of its {heads} heads.",
            remedy=_LEAVE_OUT,
        )
    return numbers
