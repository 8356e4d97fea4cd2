"""What a narrower KV cache costs in quality, and what it buys in sessions per GPU.

The names below are the public API. Each is imported when it is first used, so that `import kveval` needs
neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kveval.cache import QuantizedCache
    from kveval.config import load_config
    from kveval.formats.spec import KVScheme, TensorFormat, get_scheme
    from kveval.gate import decide
    from kveval.records import Record
    from kveval.run import run_sweep
    from kveval.stats import compare
    from kveval.store import read_records

__version__ = "0.1.0"

__all__ = [
    "KVScheme",
    "QuantizedCache",
    "Record",
    "TensorFormat",
    "__version__",
    "compare",
    "decide",
    "get_scheme",
    "load_config",
    "read_records",
    "run_sweep",
]

_HOME = {
    "KVScheme": "kveval.formats.spec",
    "QuantizedCache": "kveval.cache",
    "Record": "kveval.records",
    "TensorFormat": "kveval.formats.spec",
    "compare": "kveval.stats",
    "decide": "kveval.gate",
    "get_scheme": "kveval.formats.spec",
    "load_config": "kveval.config",
    "read_records": "kveval.store",
    "run_sweep": "kveval.run",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
