"""Your own requests with their right answers, from a JSONL file, in buckets by their length in tokens."""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from kveval.tasks import Sample, TaskContext, TaskFile, TaskParams, beside_config
from kveval.text_metrics import text_metric
from kveval.traffic import Template, traffic_identity, traffic_samples

VERSION = 1
EXACT_LENGTH = False
MAX_NEW_TOKENS = 256
TEXT_METRIC = "text_f1"


class Params(TaskParams):
    """`file`: the requests (`kveval traffic check` says what is in it). `template`: none for plain text behind BOS.

    `metric`: scores every line without one of its own. `per_cluster`: most requests of one cluster in a cell.
    """

    file: TaskFile
    template: Template = "auto"
    metric: str | None = None
    per_cluster: int = Field(1, ge=1)

    @field_validator("metric")
    @classmethod
    def _is_a_metric(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and ":" in name:
            name = beside_config(name, info)
        if name is not None:
            text_metric(name)
        return name

    def identity(self) -> dict[str, Any]:
        """The file's content stands for the file, wherever it lies."""
        own = traffic_identity(Path(self.file), self.metric)
        named = self.metric if self.metric is None or ":" not in self.metric else "own"
        return super().identity() | own | {"metric": named}


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """Requests of more than the next shorter context length and at most this one, one cluster after the other."""
    return traffic_samples(
        ctx,
        Path(params.file),
        template=params.template,
        metric=params.metric,
        per_cluster=params.per_cluster,
    )
