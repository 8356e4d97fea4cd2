"""The formats of all presets, keys and values, each once; a new preset is tested without an edit."""

from __future__ import annotations

from kveval.formats.spec import TensorFormat, get_scheme, scheme_names

ROLES = ("key", "value")

SIDES: dict[str, TensorFormat] = {
    f"{name}.{role}": getattr(get_scheme(name), role) for name in scheme_names() for role in ROLES
}
"""Every side of every preset, as "nvfp4.key"."""


def _distinct() -> dict[str, TensorFormat]:
    first: dict[TensorFormat, str] = {}
    for side, fmt in SIDES.items():
        first.setdefault(fmt, side)
    return {side: fmt for fmt, side in first.items()}


FORMATS: dict[str, TensorFormat] = _distinct()
"""Every format that some side has, under the first side that has it."""


def format_of(name: str) -> TensorFormat:
    """The key format of a preset."""
    return get_scheme(name).key
