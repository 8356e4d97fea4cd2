"""Bridges to other evaluation harnesses. Each needs its package, which an extra of kveval installs."""

from __future__ import annotations

from importlib.util import find_spec

from kveval.errors import ConfigError

__all__ = ["require_lm_eval"]


def require_lm_eval() -> None:
    """See that lm-evaluation-harness is installed.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "lm-evaluation-harness (the package lm-eval) is not installed.",
            remedy="Install it with `pip install 'kveval[lm-eval]'`.",
        )
