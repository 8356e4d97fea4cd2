"""A question that one document answers, among many documents that don't."""

from kveval.document_tasks import DocumentParams, document_samples
from kveval.tasks import Sample, TaskContext

VERSION = 1
MAX_NEW_TOKENS = 32
TEXT_METRIC = "string_match_part"


class Params(DocumentParams):
    """`queries`: questions about the same documents. `rows` and the names of its columns: questions of your own."""


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """The needed document's depth spread evenly over all samples."""
    return document_samples(params, ctx, "qa_single", hops=1)
