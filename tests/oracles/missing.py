"""The error of a reference whose tool is not installed."""

from __future__ import annotations


class MissingToolError(Exception):
    """Says what to install."""
