"""Scales for static formats, from the largest keys and values that a model makes of a text.

Shape legend: B batch, H KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kveval.backends.hf import HFBackend
from kveval.cache import QuantizedCache
from kveval.config import ModelConfig
from kveval.errors import ConfigError, LengthError, UnsupportedError
from kveval.files import sha256
from kveval.formats.arithmetic import or_one, over
from kveval.formats.layout import RoleFormat, layer_formats
from kveval.formats.scales import StaticScales
from kveval.formats.spec import KVScheme, TensorFormat
from kveval.geometry import LayerGeometry
from kveval.models import describe, load, load_tokenizer
from kveval.progress import Progress
from kveval.prompting import PromptTemplate

__all__ = ["Calibration", "calibrate", "read_text"]

PREFILL_CHUNK = 2048
"""Most tokens of a sequence that one forward takes."""


@dataclass(frozen=True)
class Calibration:
    """Scales, and what they were made from.

    Attributes:
        scales: The scales.
        model: The model's id, as given.
        scheme: Name of the scheme.
        granularity: Of the scaled formats: per_tensor or per_head.
        tokens: Tokens that the model ran over.
        length: Tokens of each sequence.
        text_sha256: Of the text.
    """

    scales: StaticScales
    model: str
    scheme: str
    granularity: str
    tokens: int
    length: int
    text_sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `StaticScales.read` takes it."""
        numbers = self.scales.model_dump(mode="json", exclude={"source"})
        about = {name: value for name, value in vars(self).items() if name != "scales"}
        return {**about, **numbers}

    def summary(self) -> str:
        """Lines for people: how many scales there are, and their range."""
        lines = [f"{self.model}: {self.scheme} over {self.tokens:,} tokens in sequences of {self.length:,}."]
        for role, layers in (("key", self.scales.key), ("value", self.scales.value)):
            if numbers := [n for layer in layers.values() for n in layer]:
                lines.append(
                    f"{role} scales: {len(numbers)} in {len(layers)} layers, {min(numbers):.3g} to {max(numbers):.3g}"
                )
        return "\n".join(lines) + "\n"


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        ConfigError: it can't be read, is not UTF-8 or holds nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}", remedy="Give a UTF-8 text file.") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty.", remedy="Give a text like what the model will read.")
    return text


def calibrate(
    model: ModelConfig,
    text: str,
    scheme: KVScheme,
    *,
    tokens: int = 4096,
    length: int = 2048,
    progress: Progress | None = None,
) -> Calibration:
    """Run the model with a BF16 cache over the start of a text; scale = largest magnitude / the element's largest.

    The text is cut into sequences of `length` tokens, each started with what the tokenizer puts before any text. They
    run one by one, so nothing is ever padded. Sliding-window layers are calibrated too, for schemes that narrow them.
    A layer or head whose values are all zero gets the scale 1.

    Args:
        model: Which model.
        text: What it reads.
        scheme: Whose static and fixed formats are to get scales.
        tokens: Tokens in all; a multiple of `length`.
        length: Tokens of each sequence.
        progress: Where to report progress, in tokens.

    Raises:
        UnsupportedError: no format of the scheme takes scales, or those that do differ in element or granularity.
        ConfigError: `tokens` is no multiple of `length`, or the text is too short for them.
        LengthError: `length` is more than the model takes.
    """
    info = describe(model, device=model.device)
    sides = _scaled_sides(scheme, info.geometry)
    (fmt,) = {side.format for side in sides.values()}
    if info.max_context is not None and length > info.max_context:
        raise LengthError(
            f"sequences of {length} tokens are longer than the {info.max_context} that {model.id} takes.",
            remedy=f"Use --length {info.max_context} or less.",
        )
    sequences = _sequences(load_tokenizer(model), text, tokens, length)
    backend = HFBackend(load(model, device=model.device))
    largest = _largest(backend, sequences, progress or Progress())
    numbers: dict[str, dict[int, tuple[float, ...]]] = {"key": {}, "value": {}}
    for role, layer in sides:
        numbers[role][layer] = _scales(largest[role, layer], fmt)
    scales = StaticScales(
        source=f"{model.id}, {tokens} tokens", **numbers, element=fmt.element, weights_digest=info.weights_digest
    )
    return Calibration(scales, model.id, scheme.name, fmt.granularity, tokens, length, sha256(text.encode()))


def _scaled_sides(scheme: KVScheme, layers: Sequence[LayerGeometry]) -> dict[tuple[str, int], RoleFormat]:
    """The sides that take scales, by (role, layer); one format for all of them."""
    formats = layer_formats(scheme.model_copy(update={"sliding": "quantized", "scales": None}), layers)
    sides = {
        (role, i): side
        for i, fmt in enumerate(formats)
        if fmt is not None
        for role, side in (("key", fmt.key), ("value", fmt.value))
        if side.format.takes_scales
    }
    if not sides:
        raise UnsupportedError(
            f"scheme {scheme.name!r} finds its scales by itself; there is nothing to calibrate.",
            remedy="Calibrate for a scheme with static or fixed scales: fp8_per_head, fp8_e4m3, fp8_e5m2.",
        )
    if len({side.format for side in sides.values()}) > 1:
        raise UnsupportedError(
            f"scheme {scheme.name!r} scales several formats; one file of scales is for one.",
            remedy="Calibrate for a scheme whose keys and values are scaled alike.",
        )
    return sides


def _sequences(tokenizer: Any, text: str, tokens: int, length: int) -> list[tuple[int, ...]]:
    """The first `tokens` tokens of the text in sequences of `length`, what starts each of them included."""
    if tokens % length:
        raise ConfigError(
            f"{tokens} tokens are no whole number of sequences of {length}.",
            remedy=f"Use --tokens {-(-tokens // length) * length}, or another --length.",
        )
    template = PromptTemplate.from_tokenizer(tokenizer, "none")
    start, ids = template.bos_ids, template.encode(text)
    fresh = length - len(start)
    whole = len(ids) // fresh if fresh > 0 else 0
    if whole == 0:
        raise ConfigError(
            f"the text has {len(ids)} tokens, less than one sequence of {length}.",
            remedy="Use a longer text, or a shorter --length.",
        )
    if whole < tokens // length:
        raise ConfigError(
            f"the text has {len(ids)} tokens, enough for {whole} sequences of {length} and not for {tokens // length}.",
            remedy=f"Use a longer text, or --tokens {whole * length}.",
        )
    return [start + ids[at * fresh : (at + 1) * fresh] for at in range(tokens // length)]


@torch.inference_mode()
def _largest(
    backend: HFBackend, sequences: Sequence[tuple[int, ...]], progress: Progress
) -> dict[tuple[str, int], Tensor]:
    """Largest magnitude of each head, float32 [H], by (role, layer), over all sequences."""
    progress.total = sum(map(len, sequences))
    largest: dict[tuple[str, int], Tensor] = {}
    for ids in sequences:
        cache = _WatchedCache(backend.loaded.model.config, largest)
        for at in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[at : at + PREFILL_CHUNK]
            backend.forward(chunk, cache, keep=1)
            progress.advance(len(chunk), "calibrating")
    return largest


class _WatchedCache(QuantizedCache):
    """A BF16 cache that notes the largest magnitude of what each layer hands to it, before it is rounded."""

    def __init__(self, config: Any, largest: dict[tuple[str, int], Tensor]) -> None:
        super().__init__(config, "bf16")
        self._largest = largest

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, H, T, D] as `QuantizedCache` does."""
        handles = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        for role, states in (("key", key_states), ("value", value_states)):
            peak = states.detach().float().abs().amax((0, 2, 3))
            before = self._largest.get((role, layer_idx), peak)
            self._largest[role, layer_idx] = torch.maximum(before, peak)
        return handles


def _scales(largest: Tensor, fmt: TensorFormat) -> tuple[float, ...]:
    """Scales from the largest magnitudes [H] of a layer's heads."""
    if fmt.granularity != "per_head":
        largest = largest.amax(0, keepdim=True)
    return tuple(or_one(over(largest, fmt.info.max)).tolist())
