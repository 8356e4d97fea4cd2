"""What a storage format is, for people: `kveval show-format`, `kveval formats`, and the reference page. No torch.

`describe` gathers the facts as plain data; everything else here only lays them out. Sizes are in bytes, D is the head
size, and examples count 32 layers with 8 KV heads each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kveval.errors import ConfigError
from kveval.formats.element_types import Element
from kveval.formats.hardware import GPUS, native
from kveval.formats.layout import LayerFormat, RoleFormat, layer_formats
from kveval.formats.scales import StaticScales
from kveval.formats.spec import TRANSFORMS, KVScheme, TensorFormat
from kveval.geometry import LayerGeometry
from kveval.report.format_diagram import byte_diagram, parts, token_diagram

__all__ = ["describe", "format_markdown", "format_renderable", "formats_table", "levels_text"]

LAYERS, KV_HEADS = 32, 8
LENGTHS = (1024, 8192, 131072)
FEW_LEVELS = 16


def describe(scheme: KVScheme, *, head_dim: int = 128) -> dict[str, Any]:
    """Everything that is known of a scheme, as plain data.

    Args:
        scheme: The scheme.
        head_dim: D, of keys and values alike.

    Raises:
        UnsupportedError: if a format can't store heads of this size.
    """
    sides = [_side(title, fmt, scheme, head_dim) for title, fmt in _formats(scheme)]
    elements = dict.fromkeys(side["element"]["name"] for side in sides)
    return {
        "name": scheme.name,
        "summary": scheme.summary,
        "engines": list(scheme.engines),
        "head_dim": head_dim,
        "sides": sides,
        "where": _where(scheme),
        "bytes": _bytes(scheme, head_dim),
        "append_invariant": scheme.append_invariant,
        "append_invariance": _invariance(scheme),
        "hardware": {name: _hardware(name) for name in elements},
        "read_now": _read_now(scheme),
    }


def _formats(scheme: KVScheme) -> Iterator[tuple[str, TensorFormat]]:
    """Each format of a scheme with what it is for; one entry where keys and values share it."""
    yield from _named(scheme.key, scheme.value, "")
    for override in scheme.layers:
        yield from _named(override.key, override.value, f" of layers {_selected(override.layers)}")


def _named(key: TensorFormat | None, value: TensorFormat | None, where: str) -> Iterator[tuple[str, TensorFormat]]:
    if key is not None and key == value:
        yield f"keys and values{where}", key
        return
    if key is not None:
        yield f"keys{where}", key
    if value is not None:
        yield f"values{where}", value


def _selected(selectors: Sequence[int | str]) -> str:
    return ", ".join(map(str, selectors))


def _side(title: str, fmt: TensorFormat, scheme: KVScheme, head_dim: int) -> dict[str, Any]:
    fmt.check(head_dim)
    count, found = parts(fmt, head_dim)
    info = fmt.info
    return {
        "for": title,
        "element": {
            "name": info.name,
            "bits": info.bits,
            "levels": levels_text(info),
            "max": info.max,
            "source": info.source,
        },
        "shared_by": _shared_by(fmt, head_dim),
        "scale": _scale(fmt, scheme),
        "transform": TRANSFORMS[fmt.transform] or None,
        "bits_per_element": fmt.bits_per_element(head_dim),
        "token_bytes": float(fmt.token_bytes(head_dim)),
        "unit_tokens": fmt.unit,
        "unit_bytes": fmt.unit_bytes(head_dim),
        "repeats": count,
        "parts": [{"name": part.name, "content": part.content, "bytes": part.nbytes} for part in found],
        "diagram": byte_diagram(fmt, head_dim),
        "token_diagram": token_diagram(RoleFormat(fmt, scheme.sink_tokens, scheme.residual_length)),
    }


def levels_text(element: Element) -> str:
    """The numbers that an element holds: all of them if they are few, else their range."""
    if element.wide:
        return f"every bfloat16 number, up to {element.max:.3g}"
    numbers = sorted(set(element.numbers))
    if len(numbers) > FEW_LEVELS:
        above = min(v for v in numbers if v > 0)
        return f"{len(numbers)} numbers from {numbers[0]:g} to {numbers[-1]:g}, the smallest above 0 is {above:.3g}"
    if numbers == [-v for v in reversed(numbers)]:
        return ", ".join("0" if v == 0 else f"±{v:g}" for v in numbers if v >= 0)
    return ", ".join(f"{v:g}" for v in numbers)


def _shared_by(fmt: TensorFormat, head_dim: int) -> str:
    """What shares one scale."""
    return {
        "none": "no scale",
        "per_tensor": "all tokens and heads of a layer share a scale",
        "per_head": "all tokens of a head share a scale",
        "per_token": f"the {head_dim} elements of a token and head share a scale",
        "per_group": f"{fmt.group_size} adjacent elements of a token and head share a scale",
        "per_channel": f"a channel of a head shares a scale over {fmt.group_size} adjacent tokens",
    }[fmt.granularity]


def _scale(fmt: TensorFormat, scheme: KVScheme) -> str | None:
    """How a scale is found and kept; None where there is none."""
    if not fmt.lossy:
        return None
    text = fmt.rule.summary
    if fmt.scale_rule == "fixed":
        text = f"the constant {fmt.fixed_scale:g}, or calibrated scales if some are given"
    if fmt.takes_scales and isinstance(scheme.scales, StaticScales):
        text = f"calibrated, from {scheme.scales.source}"
    if fmt.rule.stored:
        text += f", {'both ' if fmt.rule.stored == 2 else ''}stored as {fmt.scale_dtype}"
    if fmt.global_divisor is not None:
        text += (
            f" in units of an fp32 scale per sequence: amax of its first write / {fmt.global_divisor:g}, frozen "
            "(later groups beyond its range saturate)"
        )
    return text


def _where(scheme: KVScheme) -> list[str]:
    """Which tokens and layers the formats do not apply to, or apply to in another way."""
    lines = []
    if scheme.sink_tokens:
        lines.append(f"The first {scheme.sink_tokens} tokens of a sequence stay BF16.")
    if scheme.residual_length:
        lines.append(f"Up to {scheme.residual_length} of the last tokens of a sequence stay BF16.")
    if scheme.skip_layers:
        lines.append(f"Layers {_selected(scheme.skip_layers)} stay BF16.")
    lines += [f"Layers {_selected(o.layers)} have formats of their own." for o in scheme.layers]
    kept = "stay BF16" if scheme.sliding == "bf16" else "take the formats too, without sinks and residual"
    return [*lines, f"Sliding-window layers {kept}."] if scheme.lossy else lines


def _bytes(scheme: KVScheme, head_dim: int) -> dict[str, Any]:
    """Of one token and head in the scheme's own formats, and of sequences in an example model."""
    key, value = scheme.key, scheme.value
    shape = LayerGeometry(kind="full", kv_heads=KV_HEADS, head_dim_k=head_dim, head_dim_v=head_dim)
    layers, problem = _example(scheme, shape)
    sides = [role for layer in layers for role in (layer.key, layer.value)]
    token = sum(KV_HEADS * role.format.token_bytes(head_dim) for role in sides)
    totals = [{"tokens": n, "bytes": sum(layer.nbytes(n, shape) for layer in layers)} for n in LENGTHS]
    return {
        "bits_per_element": {"key": key.bits_per_element(head_dim), "value": value.bits_per_element(head_dim)},
        "token_and_head": float(key.token_bytes(head_dim) + value.token_bytes(head_dim)),
        "example": {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": head_dim},
        "example_token": float(token),
        "fewer_than_bf16": float(4 * head_dim * LAYERS * KV_HEADS / token),
        "example_constants": sum(role.format.constant_bytes(head_dim, KV_HEADS) for role in sides),
        "example_wide_tokens": sum(KV_HEADS * 2 * head_dim * _wide_tokens(role) for role in sides),
        "example_sequences": None if problem else totals,
        "no_example": problem,
    }


def _example(scheme: KVScheme, shape: LayerGeometry) -> tuple[list[LayerFormat], str]:
    """Layers of the example model, and '' or why they leave out which layers the scheme treats otherwise."""
    scheme = scheme.model_copy(update={"scales": None})  # They belong to another model, and take no bytes of a cache.
    try:
        found, problem = layer_formats(scheme, [shape] * LAYERS), ""
    except ConfigError as error:
        everywhere = scheme.model_copy(update={"skip_layers": (), "layers": ()})
        found, problem = layer_formats(everywhere, [shape] * LAYERS), error.message
    return [layer for layer in found if layer is not None], problem


def _wide_tokens(role: RoleFormat) -> int:
    """Most tokens of a sequence that a lossy side keeps in BF16: its sinks and its tail."""
    return role.sink_tokens + role.longest_tail if role.format.lossy else 0


def _invariance(scheme: KVScheme) -> str:
    """Whether the bytes of a token depend on how a prompt is split into chunks, and why."""
    reasons = []
    formats = [fmt for _, fmt in _formats(scheme)]
    if any(fmt.freezes_scale for fmt in formats):
        reasons.append("an fp32 scale")
    if any(fmt.transform == "mean_shift" for fmt in formats):
        reasons.append("the mean of every key channel")
    if reasons:
        frozen = f"{' and '.join(reasons)} {'is' if len(reasons) == 1 else 'are'} frozen"
        return f"no: {frozen} at a sequence's first write, so the prefill chunk is part of the result"
    if any(fmt.unit > 1 for fmt in formats):
        return (
            "yes: tokens wait in BF16 until their group is full, and groups are counted from the start of the sequence"
        )
    return "yes: the bytes of a token depend on nothing but the token"


def _hardware(element: str) -> dict[str, dict[str, str]]:
    found = native(element)
    return {
        gpu: {"convert": convert, "multiply": multiply}
        for gpu, convert, multiply in zip(GPUS, found.convert, found.multiply, strict=True)
    }


def _read_now(scheme: KVScheme) -> str:
    if not scheme.lossy:
        return "the stored bytes are viewed as bfloat16 on every read; attention runs in the model's dtype."
    return (
        "every read decodes the stored codes; nothing decoded is kept. On an NVIDIA GPU a kernel does so within "
        "attention, for most formats (`kveval doctor` says which, and how). Elsewhere codes go through a table of the "
        "element's values, are scaled in float32, and attention gets the model's dtype."
    )


def format_renderable(facts: Mapping[str, Any]) -> RenderableType:
    """`describe`'s facts for a terminal."""
    found: list[RenderableType] = [Text(facts["name"], style="bold")]
    found += [Text(facts["summary"])] if facts["summary"] else []
    for side in facts["sides"]:
        found += [Text(), Text(side["for"].capitalize(), style="bold"), _pairs(_side_rows(side))]
        for drawing in (side["diagram"], side["token_diagram"]):
            found += [Text(), Text(drawing, no_wrap=True)] if drawing else []
    found += [Text(), Text(_byte_title(facts), style="bold"), _pairs(_byte_rows(facts))]
    found += [Text(), Text("Use", style="bold"), _pairs(_use_rows(facts))]
    found += [Text(), Text("What hardware does with the codes themselves", style="bold"), _hardware_table(facts)]
    return Group(*found)


def _side_rows(side: Mapping[str, Any]) -> list[tuple[str, str]]:
    element = side["element"]
    rows = [
        ("element", f"{element['name']}, {element['bits']} bits: {element['levels']}"),
        ("defined by", element["source"]),
        ("shared", side["shared_by"]),
        ("scale", side["scale"]),
        ("transform", side["transform"]),
        ("size", f"{side['bits_per_element']:g} bits per element, {side['token_bytes']:g} bytes per token and head"),
    ]
    return [(label, text) for label, text in rows if text]


def _byte_title(facts: Mapping[str, Any]) -> str:
    return f"Bytes, counted for {LAYERS} layers with {KV_HEADS} heads of {facts['head_dim']}"


def _byte_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    sizes, head_dim = facts["bytes"], facts["head_dim"]
    bits = sizes["bits_per_element"]
    rows = [
        ("per element", f"{bits['key']:g} bits of keys, {bits['value']:g} of values, scales included"),
        ("per token and head", f"{sizes['token_and_head']:g} bytes, keys and values together"),
        ("per token", f"{sizes['example_token']:,.10g} bytes, {sizes['fewer_than_bf16']:.2f}x fewer than BF16"),
    ]
    if sizes["example_constants"]:
        rows.append(("once per sequence", f"{sizes['example_constants']:,} bytes of what is frozen at its first write"))
    if sizes["example_wide_tokens"]:
        rows.append(("BF16 tokens", f"at most {sizes['example_wide_tokens']:,} bytes per sequence"))
    if sizes["no_example"]:
        rows.append(("whole sequences", f"not counted for this example: {sizes['no_example']}"))
    else:
        wide = 4 * head_dim * LAYERS * KV_HEADS
        for found in sizes["example_sequences"]:
            length, total = found["tokens"], found["bytes"]
            rows.append((f"{length:,} tokens", f"{total:,} bytes, {length * wide / total:.2f}x fewer than BF16"))
    return rows


def _use_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("append-invariant", facts["append_invariance"]),
        *[("where", line) for line in facts["where"]],
        ("engines", "\n".join(facts["engines"]) or "none that kveval knows stores exactly this"),
        ("read by kveval", facts["read_now"]),
    ]


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Label and text, the label written once for equal ones in a row."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", max_width=26)
    table.add_column(overflow="fold")
    last = None
    for label, text in rows:
        table.add_row("" if label == last else label, Text(text))
        last = label
    return table


def _hardware_table(facts: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for gpu in GPUS:
        table.add_column(gpu, overflow="fold")
    for element, answers in facts["hardware"].items():
        for question in ("convert", "multiply"):
            table.add_row(f"{element}: {question}", *(Text(answers[gpu][question]) for gpu in GPUS))
    return table


def formats_table(schemes: Sequence[KVScheme], *, head_dim: int = 128) -> RenderableType:
    """One row per scheme: its bits, its bytes against BF16, what it is."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("format", no_wrap=True)
    table.add_column("bits K / V", no_wrap=True)
    table.add_column("vs BF16", justify="right", no_wrap=True)
    table.add_column("summary", overflow="fold")
    for scheme in schemes:
        bits = [f"{side.bits_per_element(head_dim):g}" for side in (scheme.key, scheme.value)]
        sizes = scheme.key.token_bytes(head_dim) + scheme.value.token_bytes(head_dim)
        fewer = f"{float(4 * head_dim / sizes):.2f}x"
        table.add_row(scheme.name, " / ".join(dict.fromkeys(bits)), fewer, Text(scheme.summary))
    return Group(table, Text(), Text("`kveval show-format NAME` says all about one.", style="dim"))


def format_markdown(facts: Mapping[str, Any]) -> str:
    """`describe`'s facts as a section of a Markdown page."""
    found = [f"## `{facts['name']}`", "", facts["summary"].rstrip(".") + "." if facts["summary"] else ""]
    for side in facts["sides"]:
        found += ["", f"**{side['for'].capitalize()}**", ""]
        found += [f"- {label}: {text}" for label, text in _side_rows(side)]
        for drawing in (side["diagram"], side["token_diagram"]):
            found += ["", "```", drawing, "```"] if drawing else []
    found += ["", f"**{_byte_title(facts)}**", ""]
    found += [f"- {label}: {text}" for label, text in _byte_rows(facts)]
    rows = [row for row in _use_rows(facts) if row[0] != "read by kveval"]
    found += ["", "**Use**", ""]
    found += [f"- {label}: {text.replace(chr(10), '; ')}" for label, text in rows]
    return "\n".join(found) + "\n"
