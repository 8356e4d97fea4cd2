"""Canonical JSON and its digest: the only hasher of cells, samples, plans and gates."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["IDENTITY_VERSION", "canonical_json", "digest"]

IDENTITY_VERSION = 1
"""Part of every digest. Raised when the meaning of an identity changes."""


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; refuses NaN and infinity (they have no canonical form)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(kind: str, value: Any, *, length: int = 16) -> str:
    """First `length` hex digits of sha256 over (identity version, kind, canonical JSON of `value`).

    `kind` keeps two different things with equal content apart ("cell", "sample", "gate", ...).
    """
    text = canonical_json([IDENTITY_VERSION, kind, value])
    return hashlib.sha256(text.encode()).hexdigest()[:length]
