"""How each scheme ran, as rows and sentences for every kind of report. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kveval.capacity import format_tokens
from kveval.native_note import LayerPath, NativePaths, RolePath, SchemePath, Widening

__all__ = [
    "NativeRow",
    "hardware_sentences",
    "native_rows",
    "native_table",
    "ran_on",
    "reason_sentences",
    "widening_sentence",
]


@dataclass(frozen=True)
class NativeRow:
    """One way of keys, of values or of both, in some layers of a scheme.

    What holds for both roles (`attention`) or for the scheme (`scheme`, `widening`) stands in its first row only.
    """

    scheme: str
    what: str
    stored: str
    read: str
    scaled: str
    products: str
    appended: str
    attention: str
    widening: str


def native_rows(paths: NativePaths, recorded: Mapping[str, Sequence[str]] | None = None) -> list[NativeRow]:
    """The rows of a table.

    Args:
        paths: What was found out.
        recorded: By scheme, the attention paths that the run's records name; they stand in place of what was expected.
    """
    return [row for scheme in paths.schemes for row in _rows(scheme, (recorded or {}).get(scheme.scheme))]


def _rows(scheme: SchemePath, recorded: Sequence[str] | None) -> list[NativeRow]:
    rows: list[NativeRow] = []
    for i, layer in enumerate(scheme.layers):
        attention = layer.attention
        if recorded:
            attention = "; ".join(recorded) if i == 0 else ""
        for what, role in _roles(layer):
            rows.append(
                NativeRow(
                    scheme=scheme.scheme if not rows else "",
                    what=what,
                    stored=role.stored,
                    read=role.read,
                    scaled=role.scaled or "–",
                    products=role.products,
                    appended=role.appended,
                    attention=attention,
                    widening=_widening_text(scheme.widening) if not rows else "",
                )
            )
            attention = ""
    return rows


def _roles(layer: LayerPath) -> list[tuple[str, RolePath]]:
    where = f", {layer.layers}" if layer.layers else ""
    if layer.keys == layer.values:
        return [(f"K and V{where}", layer.keys)]
    return [(f"K{where}", layer.keys), ("V", layer.values)]


def _widening_text(found: Widening | None) -> str:
    return "–" if found is None else f"{100 * found.share:.0f}\N{NO-BREAK SPACE}%"


def ran_on(paths: NativePaths) -> str:
    """The device, and what the model computed in."""
    place = "a CPU" if paths.device == "cpu" else paths.device
    known = f" ({paths.generation})" if paths.generation else ""
    return f"On {place}{known}; the model computes in {paths.dtype}."


def widening_sentence(paths: NativePaths) -> str:
    """What the figures of widening mean, or why there are none."""
    found = next((scheme.widening for scheme in paths.schemes if scheme.widening), None)
    if found is not None:
        heads = f"{found.query_heads} query heads on {found.kv_heads} of keys and values, {found.head_dim} wide"
        return (
            "Widening: share of the decode kernel's time that is gone when it loads the same bytes and computes "
            f"nothing, measured over {format_tokens(found.length)} tokens of {found.batch} sequences at once ({heads})."
        )
    return next((scheme.not_widened for scheme in paths.schemes if scheme.not_widened), "")


def reason_sentences(paths: NativePaths) -> list[str]:
    """Why schemes are not attended to by kernels, each reason once."""
    found: dict[str, dict[str, None]] = {}
    for scheme in paths.schemes:
        for layer in scheme.layers:
            if layer.reason:
                found.setdefault(layer.reason, {})[scheme.scheme] = None
    return [f"No kernel attends to {_listed(list(names))}: {reason}" for reason, names in found.items()]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def hardware_sentences(paths: NativePaths) -> list[str]:
    """What this GPU could do with the codes of each element, whatever the kernels do."""
    roles = (role for scheme in paths.schemes for layer in scheme.layers for role in (layer.keys, layer.values))
    found = {role.element: role for role in roles if role.converts and role.element != "bf16"}
    return [
        f"{element} on {paths.generation}: conversion {role.converts}; products of codes themselves: {role.multiplies}"
        for element, role in found.items()
    ]


def native_table(paths: NativePaths) -> RenderableType:
    """The rows on a terminal; a column that is the same in all is told once. On a CPU, where all are, no rows."""
    if paths.device == "cpu":
        lines = (
            ran_on(paths),
            "Every format is read into float32 by a table, and torch attends to that.",
            widening_sentence(paths),
        )
        return Group(Text(), *map(Text, filter(None, lines)))
    rows = native_rows(paths)
    table = Table(title="How each format runs here", title_justify="left", box=None, pad_edge=False)
    table.add_column("format", no_wrap=True)
    table.add_column("of", no_wrap=True)
    columns = {"read": "read through", "products": "products in", "appended": "append by", "attention": "attention by"}
    told = {}
    for name, heading in columns.items():
        values = {value for row in rows if (value := getattr(row, name))}
        if len(values) == 1:
            told[heading] = values.pop()
        else:
            table.add_column(heading)
    with_widening = any(scheme.widening for scheme in paths.schemes)
    if with_widening:
        table.add_column("widening", justify="right", no_wrap=True)
    for row in rows:
        cells = [getattr(row, name) for name, heading in columns.items() if heading not in told]
        table.add_row(row.scheme, row.what, *cells, *([row.widening] if with_widening else []))
    same = "; ".join(f"{heading}: {value}" for heading, value in told.items())
    notes = [ran_on(paths), f"All have {same}." if same else "", widening_sentence(paths)]
    notes += [f"{sentence}." for sentence in (*reason_sentences(paths), *hardware_sentences(paths))]
    return Group(Text(), table, *(Text(note, style="dim") for note in notes if note))
