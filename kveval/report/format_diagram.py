"""Where the bytes of a storage format lie, drawn in plain characters. No torch.

Every drawing names the bytes of each of its parts; they add up to `TensorFormat.unit_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveval.formats.layout import RoleFormat
from kveval.formats.spec import SCALE_SIZES, TensorFormat

__all__ = ["Part", "byte_diagram", "parts", "token_diagram"]

GGML_BLOCK = 32


@dataclass(frozen=True)
class Part:
    """One run of bytes: what it is, what it holds, how many bytes it takes."""

    name: str
    content: str
    nbytes: int


def parts(fmt: TensorFormat, head_dim: int) -> tuple[int, tuple[Part, ...]]:
    """How often the parts repeat in one (unit of tokens, head), and the parts: `count * sum(nbytes)` is its size."""
    if fmt.packing == "ggml":
        return head_dim // GGML_BLOCK, _block_parts(fmt)
    elements = f"{head_dim} x {fmt.info.bits} bits"
    content = elements if fmt.unit == 1 else f"{fmt.unit} tokens x {elements}"
    found = [Part("codes" if fmt.lossy else "bfloat16", content, fmt.unit * fmt.payload_bytes(head_dim))]
    if fmt.rule.stored:
        name, each = "scale", fmt.scale_dtype
        if fmt.rule.stored == 2:
            name, each = "scale and zero point", f"({each}, {each})"
        found.append(Part(name, f"{fmt.groups(head_dim)} x {each}", fmt.scale_bytes(head_dim)))
    return 1, tuple(found)


def _block_parts(fmt: TensorFormat) -> tuple[Part, ...]:
    """The fields of llama.cpp's block structs."""
    size = SCALE_SIZES[fmt.scale_dtype or ""]
    found = [Part("d", f"scale, {fmt.scale_dtype}", size)]
    if fmt.rule.stored == 2:
        found.append(Part("m", f"minimum, {fmt.scale_dtype}", size))
    if fmt.info.bits == 5:
        found.append(Part("qh", "fifth bits", GGML_BLOCK // 8))
    low = min(fmt.info.bits, 4) if fmt.info.bits < 8 else 8
    found.append(Part("qs", f"{GGML_BLOCK} x {low} bits", GGML_BLOCK * low // 8))
    return tuple(found)


def byte_diagram(fmt: TensorFormat, head_dim: int) -> str:
    """The bytes of one token and head; of one block for llama.cpp's formats, of one group of tokens per channel."""
    count, found = parts(fmt, head_dim)
    total = fmt.unit_bytes(head_dim)
    if fmt.packing == "ggml":
        block = sum(part.nbytes for part in found)
        title = (
            f"one block of {GGML_BLOCK} elements: {block} bytes; one token of one head: {count} blocks, {total} bytes"
        )
    elif fmt.unit > 1:
        title = f"{fmt.unit} tokens of one head, encoded together: {total:,} bytes, {total / fmt.unit:g} a token"
    else:
        title = f"one token of one head, {head_dim} elements: {total} bytes"
    boxes = _boxes([[f"{part.name}: {part.content}", f"{part.nbytes:,} bytes"] for part in found])
    return "\n".join([title, *boxes, *_order(fmt), *_sharing(fmt, head_dim), *_constants(fmt, head_dim)])


def _order(fmt: TensorFormat) -> list[str]:
    """Which code is in which bits."""
    bits = fmt.info.bits
    if fmt.packing == "ggml":
        scales = "d and m" if fmt.rule.stored == 2 else "d"
        lines = [f"llama.cpp's block; kveval keeps the {scales} of all blocks apart from the codes"]
        if bits == 5:
            lines.append("qh bit j: the fifth bit of code j, little-endian")
        if bits < 8:
            lines.append("qs byte j: code j in its low half, code j + 16 in its high half, j = 0 to 15")
        return lines
    if not fmt.lossy or bits == 8:
        return []
    if 8 % bits == 0:
        shifted = " | ".join(f"code {i} << {i * bits}" if i else "code 0" for i in range(8 // bits))
        return [f"byte 0 = {shifted}, and so on"]
    return [f"a stream of {bits}-bit codes, low bits first: codes 0 to 7 in bytes 0 to {bits - 1}, and so on"]


def _sharing(fmt: TensorFormat, head_dim: int) -> list[str]:
    """Which elements share a scale, where one vector or one group of tokens has several."""
    if fmt.unit > 1:
        return [f"channel c of all {fmt.unit} tokens shares scale c" + _with_zero(fmt)]
    count = fmt.groups(head_dim)
    if fmt.packing == "ggml" or fmt.group_size is None or count < 2:
        return []
    shown: list[int | None] = [*range(count)] if count <= 5 else [0, 1, 2, None, count - 1]
    columns = [("elements", "scale")]
    for group in shown:
        if group is None:
            columns.append(("...", "..."))
        else:
            end = min(head_dim, (group + 1) * fmt.group_size) - 1
            columns.append((f"{group * fmt.group_size}-{end}", str(group)))
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(c[i].ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip() for i in (0, 1)]


def _with_zero(fmt: TensorFormat) -> str:
    return " and zero point c" if fmt.rule.stored == 2 else ""


def _constants(fmt: TensorFormat, head_dim: int) -> list[str]:
    """What is stored once per sequence."""
    lines = []
    if fmt.freezes_scale:
        lines.append("once per sequence, layer and side: an fp32 scale, 4 bytes")
    if fmt.transform == "mean_shift":
        lines.append(f"once per sequence, layer and head: {head_dim} channel means in fp32, {4 * head_dim} bytes")
    return lines


def token_diagram(role: RoleFormat) -> str:
    """Which tokens of a sequence are encoded and which stay BF16; '' if all are encoded as they come."""
    tail = role.longest_tail
    if not role.format.lossy or not (tail or role.sink_tokens):
        return ""
    cells = [[f"encoded, {role.format.element}", f"{role.step} at a time" if role.format.unit > 1 else "one by one"]]
    if role.sink_tokens:
        cells.insert(0, [f"first {role.sink_tokens}", "BF16"])
    if role.format.unit > 1:
        cells.append([f"last 0 to {tail}", f"BF16 until they are {role.step}"])
    elif tail:
        cells.append([f"last {tail}", "BF16"])
    return "\n".join(["tokens of a sequence, oldest first", *_boxes(cells)])


def _boxes(cells: Sequence[Sequence[str]]) -> list[str]:
    """Boxes side by side, a list of lines in each, all of one height."""
    widths = [max(map(len, cell)) for cell in cells]
    edge = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    rows = [
        "|" + "|".join(f" {line.ljust(width)} " for line, width in zip(row, widths, strict=True)) + "|"
        for row in zip(*cells, strict=True)
    ]
    return [edge, *rows, edge]
