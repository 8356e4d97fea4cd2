"""Where a scheme's error comes from, in words: its worst layer, and what keys and values have to do with it.

Every sentence is read off the rows of `kveval.layer_note.LayerError`; none says more than they do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kveval.layer_note import LayerError, LayerErrors

__all__ = ["BIAS_LIMIT", "LayerRow", "bias_sentence", "layer_rows", "layer_sentences", "percent", "probed"]

BIAS_LIMIT = 15
"""From here on a key channel counts as far off zero: its mean, over the median channel's standard deviation.

A four-bit code has 15 steps. In a group of channels that share one scale, a channel this far from the others makes a
step as wide as their whole standard deviation.
"""

HALF = 0.5
"""From here on a layer's attention counts as lost: the error of its output is half as large as the output."""

NAMED_LAYERS = 6
"""Most layers that are named; more are counted."""


@dataclass(frozen=True)
class LayerRow:
    """One scheme; errors in percent. `median` and `lost` are over the layers that it narrows, the rest is of the worst.

    The worst layer is the one whose attention output moves most. `lost` counts the layers in which it moves by half or
    more of itself.
    """

    scheme: str
    role: str
    median: str
    lost: str
    layer: str
    output: str
    from_keys: str
    from_values: str
    kl: str
    key: str
    key_difference: str
    value: str
    bias: str


def percent(fraction: float) -> str:
    """A fraction as percent to about two digits: "109 %", "8.4 %", "0.65 %", "0 %"; the space doesn't break."""
    number = 100 * fraction
    digits = 0 if number >= 10 or number == 0 else 1 if number >= 1 else 2
    text = f"{number:.{digits}f}" if number == 0 or number >= 0.01 else "< 0.01"
    return f"{text}\N{NO-BREAK SPACE}%"


def layer_rows(layers: LayerErrors) -> list[LayerRow]:
    """One row per scheme that moves anything, the largest median error of attention's output first; crush is last."""
    return [_row(rows) for rows in _by_scheme(layers, "scheme") + _by_scheme(layers, "crush")]


def layer_sentences(layers: LayerErrors) -> list[str]:
    """One sentence per scheme, in the order of `layer_rows`. Controls have none."""
    return [_sentence(rows) for rows in _by_scheme(layers, "scheme")]


def bias_sentence(layers: LayerErrors) -> str:
    """What the keys look like, whatever the scheme: the layers with a channel far off zero, or that there is none."""
    ratios = {row.layer: row.key_bias_ratio for row in layers.rows if row.key_bias_ratio is not None}
    if not ratios:
        return ""
    largest = max(ratios, key=lambda layer: ratios[layer])
    top = f"{ratios[largest]:.3g} in layer {largest}"
    far = sorted(layer for layer, ratio in ratios.items() if ratio >= BIAS_LIMIT)
    what = f"a key channel's mean lies {BIAS_LIMIT} or more times the median channel's spread from zero"
    where = f"In {_layers(far, of=len(ratios))}" if far else f"In none of {len(ratios)} layers"
    return f"{where} {what} (at most {top})."


def probed(layers: LayerErrors) -> str:
    """On which tokens the figures were measured."""
    return (
        f"Measured on the first {layers.tokens:,} tokens of one sample of {layers.task}; attention is that of the last "
        f"{layers.queries} of them."
    )


def _by_scheme(layers: LayerErrors, role: str) -> list[list[LayerError]]:
    """The rows of every scheme in a role, the largest median error first.

    Layers that a scheme stores exactly (sliding windows, skipped layers) are left out, as is a scheme without others.
    """
    rows: dict[str, list[LayerError]] = {}
    for row in layers.rows:
        if row.role == role and (row.key_error or row.value_error):
            rows.setdefault(row.scheme, []).append(row)
    return sorted(rows.values(), key=lambda of: (_median(of), _worst(of).output_error), reverse=True)


def _worst(rows: Iterable[LayerError]) -> LayerError:
    return max(rows, key=lambda row: row.output_error)


def _median(rows: Iterable[LayerError]) -> float:
    return statistics.median(row.output_error for row in rows)


def _lost(rows: Iterable[LayerError]) -> list[int]:
    return [row.layer for row in rows if row.output_error >= HALF]


def _row(rows: Sequence[LayerError]) -> LayerRow:
    worst = _worst(rows)
    return LayerRow(
        scheme=worst.scheme,
        role=worst.role,
        median=percent(_median(rows)),
        lost=f"{len(_lost(rows))} of {len(rows)}",
        layer=str(worst.layer),
        output=percent(worst.output_error),
        from_keys=percent(worst.output_error_keys),
        from_values=percent(worst.output_error_values),
        kl=f"{worst.attention_kl:.2g}",
        key=percent(worst.key_error),
        key_difference=percent(worst.key_difference_error),
        value=percent(worst.value_error),
        bias="–" if worst.key_bias_ratio is None else f"{worst.key_bias_ratio:.3g}",
    )


def _sentence(rows: Sequence[LayerError]) -> str:
    """As "nvfp4: attention's output is off by 17 % in the median layer and by 96 % in the worst, layer 0 (...)"."""
    worst, lost = _worst(rows), _lost(rows)
    alone = f"keys alone {percent(worst.output_error_keys)}, values alone {percent(worst.output_error_values)}"
    parts = [
        f"{worst.scheme}: attention's output is off by {percent(_median(rows))} in the median layer and by "
        f"{percent(worst.output_error)} in the worst, layer {worst.layer} ({alone})"
    ]
    if lost:
        parts.append(f"by half or more in {_layers(lost, of=len(rows))}")
    if worst.output_error_keys >= worst.output_error_values:
        there = f"the keys of layer {worst.layer} are off by {percent(worst.key_difference_error)} of what tells "
        there += "tokens apart"
        if _far_off(worst):
            there += f", and one channel's mean is {worst.key_bias_ratio:.3g} times the median channel's spread"
    else:
        there = f"the values of layer {worst.layer} are off by {percent(worst.value_error)}"
    return "; ".join([*parts, there])


def _far_off(row: LayerError) -> bool:
    return row.key_bias_ratio is not None and row.key_bias_ratio >= BIAS_LIMIT


def _layers(numbers: Sequence[int], *, of: int) -> str:
    """As "layer 3", "layers 0, 1 and 8", "16 of 24 layers" or "all 24 layers"."""
    if len(numbers) == of:
        return f"all {of} layers"
    if len(numbers) > NAMED_LAYERS:
        return f"{len(numbers)} of {of} layers"
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    return f"layers {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
