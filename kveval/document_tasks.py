"""What the question-answering tasks share: documents that answer a question, among others that don't.

The answers' documents lie whole at evenly spread depths, as needles; other documents fill the context. They come from
made-up worlds (`kveval.facts`), or from a user's rows (`kveval.question_rows`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from kveval.corpora import Corpus
from kveval.errors import TaskError
from kveval.facts import make_world
from kveval.haystack import Haystack, Needle, Question, build_samples, depth_of
from kveval.question_rows import Columns, Row, check_rows_name, load_rows, rows_identity
from kveval.tasks import Sample, TaskContext, TaskParams, seeded_random

__all__ = ["DocumentParams", "document_samples"]

Describe = Callable[[int, random.Random], Haystack]

_DOCUMENT_TOKENS = 24
"""No document of a made-up world has fewer tokens, so that none is needed twice."""

_INSTRUCTION = "Answer the question at the end from these documents, with the answer alone."


class DocumentParams(TaskParams):
    """Where questions and documents come from.

    `queries`: questions about the same documents, one prefill for all. `rows`: your own questions, as file:<path>.jsonl
    or datasets:<name>[:config[:split]]; made-up facts unless given. `question`, `answers`, `context`: their columns
    (context: the documents that answer the question). `supporting`: the column with the titles of those that do, if
    the context has others too.
    """

    queries: int = Field(1, ge=1, le=100)
    rows: Annotated[str, AfterValidator(check_rows_name)] | None = None
    question: str = "question"
    answers: str = "answers"
    context: str = "context"
    supporting: str | None = None

    @model_validator(mode="after")
    def _columns_are_of_rows(self) -> DocumentParams:
        named = sorted({"question", "answers", "context", "supporting"} & self.model_fields_set)
        if self.rows is None and named:
            raise ValueError(
                f"{', '.join(named)}: made-up facts have no columns; name your own `rows`, or leave it out"
            )
        return self

    @property
    def columns(self) -> Columns:
        """The columns of `rows`."""
        return Columns(self.question, self.answers, self.context, self.supporting)

    def identity(self) -> dict[str, Any]:
        """The rows' content stands for them, wherever they lie."""
        own = {} if self.rows is None else {"rows": rows_identity(self.rows, self.columns)}
        return super().identity() | own


class _Documents(Corpus):
    """Documents that are read whole: each is one unit of a haystack."""

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The documents."""
        return self.documents


def document_samples(params: DocumentParams, ctx: TaskContext, task: str, *, hops: int) -> list[Sample]:
    """Samples of a question-answering task.

    The first needed document of question i lies at the depth that is asked of i, and the others at depths of their
    own, each of them evenly spread over all samples too.

    Args:
        params: The task's parameters.
        ctx: What to make samples for.
        task: The task's name.
        hops: Documents of a made-up chain of facts. A row has to need one document if this is 1, else two or more.

    Raises:
        LengthError: the context length can't hold the needed documents and the question.
        TaskError: the rows can't be read, or are too few.
    """
    describe = _of_facts(params, ctx, task, hops) if params.rows is None else _of_rows(params, ctx, task, hops)
    return build_samples(ctx, task, filler=None, queries=params.queries, describe=describe)


def _of_facts(params: DocumentParams, ctx: TaskContext, task: str, hops: int) -> Describe:
    size = max(ctx.context_length // _DOCUMENT_TOKENS, 32 * params.queries * hops)

    def describe(number: int, rng: random.Random) -> Haystack:
        world = make_world(rng, size)
        rows = []
        for chain in islice(world.chains(rng, hops), params.queries):
            needed = tuple(world.documents[name] for name in chain.names[:-1])
            rows.append(Row(chain.question, (chain.answer,), needed, ()))
        return _haystack(ctx, task, number * params.queries, rows, world.documents.values(), rng)

    return describe


def _of_rows(params: DocumentParams, ctx: TaskContext, task: str, hops: int) -> Describe:
    assert params.rows is not None
    rows = load_rows(params.rows, params.columns)
    for number, row in enumerate(rows):
        if (len(row.needed) > 1) != (hops > 1):
            raise TaskError(
                f"task {task!r}: question {number} of {params.rows!r} ({row.question[:60]!r}) needs {len(row.needed)} "
                f"{'document' if len(row.needed) == 1 else 'documents'}.",
                remedy="qa_single takes questions that need one document, qa_multi_hop those that need several; "
                "`supporting` names the column with the titles of the needed ones.",
            )
    wanted = -(-ctx.samples // params.queries) * params.queries
    if len(rows) < wanted:
        raise TaskError(
            f"task {task!r}: {wanted} questions are needed, and {params.rows!r} has {len(rows)}.",
            remedy="Ask for fewer samples, or name a source with more rows.",
        )
    asked = seeded_random(ctx, task, 0, "rows").sample(rows, len(rows))
    documents = dict.fromkeys(text for row in rows for text in (*row.needed, *row.others))

    def describe(number: int, rng: random.Random) -> Haystack:
        first = number * params.queries
        return _haystack(ctx, task, first, asked[first : first + params.queries], documents, rng)

    return describe


def _haystack(
    ctx: TaskContext, task: str, first: int, rows: Sequence[Row], documents: Iterable[str], rng: random.Random
) -> Haystack:
    """Questions number `first` and on, about the documents that they need, hidden among all others."""
    needles: dict[str, Needle] = {}
    questions = []
    for index, row in enumerate(rows, first):
        for hop, text in enumerate(row.needed):
            depth = depth_of(ctx, f"{task}-{hop}" if hop else task, index)
            needles.setdefault(text, Needle(text, depth))
        places = {text: place for place, text in enumerate(needles)}
        questions.append(
            Question(
                f"Question: {row.question.strip()}",
                "Answer:",
                row.answers[0].strip(),
                needles=tuple(places[text] for text in row.needed),
                references=row.answers,
            )
        )
    others = [text for text in documents if text not in needles]
    if not others:
        raise TaskError(
            f"task {task!r}: there are no documents but those that the questions need.",
            remedy="Name rows with more different contexts: those of other questions are what to look through.",
        )
    rng.shuffle(others)
    return Haystack(
        instruction=_INSTRUCTION,
        needles=tuple(needles.values()),
        questions=tuple(questions),
        filler=_Documents("documents", tuple(others), joiner="\n\n"),
    )
