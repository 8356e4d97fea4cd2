"""What is known of each layer's storage error: the rows, and the note beside a run's records that holds them.

`kveval.layer_errors` measures, `kveval.report.layers` explains; neither needs the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kveval.files import read_versioned

__all__ = ["NOTE", "LayerError", "LayerErrors", "read_layer_errors"]

NOTE = "layer_errors.json"
"""Name of the note in a run's folder."""

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LayerError:
    """What storing one attention layer's keys and values under one scheme does to them and to its attention.

    x is what the baseline's attention reads, x' what the scheme's would read of the same keys or values, and ||.||
    the root of the sum of squares. Errors are fractions: 0.1 is an error a tenth as large as the thing itself.

    Attributes:
        scheme, role, layer, kind: Whose error this is; `kind` is the layer's ("full", "sliding", ...).
        key_error: ||k - k'|| / ||k|| over all heads and tokens.
        key_difference_error: The same of what tells tokens apart: with the mean over tokens taken from k, and that of
            k - k' from k - k'. Softmax sees nothing else: a constant added to every key moves no probability.
        value_error: ||v - v'|| / ||v||.
        attention_kl: Mean over the probed queries and heads of KL(p || p') between the attention probabilities
            p = softmax(q k / sqrt(d)) and p' = softmax(q k' / sqrt(d)), in nats.
        output_error: ||p v - p' v'|| / ||p v|| over the probed queries.
        output_error_keys, output_error_values: What narrow keys alone, ||p v - p' v||, and narrow values alone,
            ||p v - p v'||, would do, over ||p v||.
        key_bias_ratio: The largest |mean over tokens| of a key channel over the median channel's standard deviation.
            None where more than half of the channels never change.
    """

    scheme: str
    role: Literal["scheme", "crush"]
    layer: int
    kind: str
    key_error: float
    key_difference_error: float
    value_error: float
    attention_kl: float
    output_error: float
    output_error_keys: float
    output_error_values: float
    key_bias_ratio: float | None


@dataclass(frozen=True)
class LayerErrors:
    """Every scheme's errors in every attention layer, on the first `tokens` tokens of one sample.

    `queries` of them, the last ones, were probed. `problem` says why there are no rows, else it is None.
    """

    task: str
    sample_id: str
    tokens: int
    queries: int
    rows: tuple[LayerError, ...]
    problem: str | None = None

    @property
    def measured(self) -> bool:
        """Whether the measurement ran to its end."""
        return self.problem is None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the note."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, note: Mapping[str, Any]) -> LayerErrors:
        """The inverse of `to_dict`."""
        fields = {key: value for key, value in note.items() if key != "schema_version"}
        return cls(**{**fields, "rows": tuple(LayerError(**row) for row in fields["rows"])})


def read_layer_errors(path: str | Path) -> LayerErrors | None:
    """The layer errors of the run in the folder `path`; None for a run that recorded none.

    Raises:
        StoreError: the note is damaged or of another schema version.
    """
    file = Path(path) / NOTE
    if not file.exists():
        return None
    remedy = f"Delete {NOTE}: the report is then made without its section."
    return read_versioned(file, LayerErrors.from_dict, version=SCHEMA_VERSION, remedy=remedy)
