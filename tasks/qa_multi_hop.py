"""A question that takes several documents to answer, each naming what the next one is about."""

from pydantic import Field, model_validator

from kveval.document_tasks import DocumentParams, document_samples
from kveval.tasks import Sample, TaskContext

VERSION = 1
MAX_NEW_TOKENS = 32
TEXT_METRIC = "string_match_part"


class Params(DocumentParams):
    """`hops`: documents that a made-up question takes. `queries`: questions about the same documents.

    `rows` and the names of its columns: questions of your own.
    """

    hops: int = Field(2, ge=2, le=3)

    @model_validator(mode="after")
    def _hops_are_of_facts(self) -> "Params":
        if self.rows is not None and "hops" in self.model_fields_set:
            raise ValueError(
                "hops is for made-up facts: with rows, each question takes as many as its own context says"
            )
        return self


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """Depths of the first document, of the second, ... spread evenly over all samples."""
    return document_samples(params, ctx, "qa_multi_hop", hops=params.hops)
