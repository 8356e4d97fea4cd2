"""The next lines of a real Python file: how many of their tokens the model would write itself."""

from collections.abc import Iterator

from pydantic import Field

from kveval.corpora import load_corpus
from kveval.errors import LengthError, TaskError
from kveval.prompting import shared_prefix
from kveval.source_files import SourceParams, SourceText, source_text, statements
from kveval.tasks import Sample, TaskContext, make_sample, seeded_random
from kveval.text_metrics import edit_similarity

VERSION = 1
NAME = "code_completion"
MAX_NEW_TOKENS = 128
STOP = ("\n\n\n",)

LEAST_TOKENS = 4
"""Shorter answers are left out: they are closing words, not code."""


class Params(SourceParams):
    """`corpus`: where the Python files come from. `lines`: lines to complete."""

    lines: int = Field(2, ge=1, le=20)


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """The text up to a statement of a function in the later two thirds of a file: this file, and the files before it.

    Plain text behind the tokenizer's own BOS.
    """
    source = source_text(load_corpus(params.corpus))
    bos = ctx.prompt.bos_ids
    made: list[Sample] = []
    taken: dict[int, None] = {}
    least = 0
    for index in range(ctx.samples):
        for start, end in _candidates(params, ctx, source, index):
            shown, answer, carried, shown_start = _split(ctx, source, start, end)
            if start in taken or len(answer) < LEAST_TOKENS:
                continue
            taken[start] = None
            around = len(bos) + len(shown) + ctx.answer_room(len(answer))
            least = max(least, around + 1)
            if around < ctx.context_length:
                room = ctx.context_length - around
                before, _ = source.before(ctx.prompt.encode, shown_start, room, kept=end - shown_start, task=NAME)
                made.append(
                    make_sample(
                        ctx,
                        index,
                        (*bos, *before, *shown),
                        answer,
                        cluster=f"{NAME}-{index:05d}",
                        metadata={"corpus": source.corpus.name, "start_char": start, "carried": carried},
                        references=(source.text[start:end],),
                    )
                )
            break
        else:
            raise TaskError(
                f"the text source {source.corpus.name!r} has only {index} places that {NAME} can ask for, "
                f"{ctx.samples} are needed.",
                remedy="Name more Python files, such as file:<folder>/**/*.py, or ask for fewer samples.",
            )
    if least > ctx.context_length:
        raise LengthError(
            f"task {NAME!r} needs at least {least} tokens; the context length is {ctx.context_length}.",
            remedy=f"Ask for context lengths of {least} or more, or for fewer `lines`.",
        )
    return made


def score(params: Params, sample: Sample, text: str) -> dict[str, float]:
    """Edit similarity of as many lines as were asked for, whatever the model wrote behind them."""
    lines = text.removeprefix(sample.metadata["carried"]).split("\n")[: params.lines]
    return {"task_score": edit_similarity("\n".join(lines), sample.references)}


def _candidates(params: Params, ctx: TaskContext, source: SourceText, index: int) -> Iterator[tuple[int, int]]:
    """(start, end) of every answer in the running text; files in random order, so that no large one dominates."""
    rng = seeded_random(ctx, NAME, index)
    documents = source.corpus.documents
    for number in rng.sample(range(len(documents)), len(documents)):
        found = statements(documents[number], params.lines)
        for start, end in rng.sample(found, len(found)):
            yield source.starts[number] + start, source.starts[number] + end


def _split(
    ctx: TaskContext, source: SourceText, start: int, end: int
) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """The line above with the answer, split where a tokenizer allows it.

    Some join a newline with the indent behind it: their answer begins with the newline.

    Returns:
        Tokens of the line above, tokens of the answer, the end of the line above that the answer begins with, and
        where the line above starts.
    """
    above = source.text.rfind("\n", 0, len(source.text[:start].rstrip())) + 1
    given = ctx.prompt.encode(source.text[above:start])
    whole = ctx.prompt.encode(source.text[above:end])
    cut = shared_prefix(whole, given)
    return whole[:cut], whole[cut:], ctx.prompt.tokenizer.decode(given[cut:]), above
