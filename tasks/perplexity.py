"""How well the model predicts real text: the last tokens of a long passage, given all before them."""

from pydantic import Field

from kveval.corpora import Corpus, CorpusName, load_corpus, rotation_blocks
from kveval.errors import LengthError, TaskError
from kveval.tasks import Sample, TaskContext, TaskParams, make_sample, seeded_random

VERSION = 1
PASSAGE = True
NAME = "perplexity"


class Params(TaskParams):
    """`corpus`: the text to read. `scored_tokens`: how many tokens at the end of it are scored."""

    corpus: CorpusName = "python-docs"
    scored_tokens: int = Field(256, ge=1)


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """One passage per sample, as plain text behind the tokenizer's own BOS.

    A passage starts at a fixed place whatever the length, so a longer one begins with the shorter
    one. Places are spread evenly over the corpus; no passage repeats any text.
    """
    bos = ctx.prompt.bos_ids
    least = len(bos) + 1 + params.scored_tokens
    if ctx.context_length < least:
        raise LengthError(
            f"task {NAME!r} needs at least {least} tokens to score {params.scored_tokens}; "
            f"the context length is {ctx.context_length}.",
            remedy="Ask for longer contexts or fewer `scored_tokens`.",
        )
    corpus = load_corpus(params.corpus)
    made = []
    for index, start in enumerate(corpus.spread(seeded_random(ctx, NAME, 0).random(), ctx.samples)):
        ids = bos + _tokens(ctx, corpus, start, ctx.context_length - len(bos))
        prompt, answer = ids[: -params.scored_tokens], ids[-params.scored_tokens :]
        where = {"corpus": corpus.name, "start_char": start}
        made.append(make_sample(ctx, index, prompt, answer, cluster=f"{NAME}-{start}", metadata=where))
    return made


def _tokens(ctx: TaskContext, corpus: Corpus, start: int, count: int) -> tuple[int, ...]:
    ids: list[int] = []
    for block in rotation_blocks(corpus.text, start):
        ids.extend(ctx.prompt.encode(block))
        if len(ids) >= count:
            return tuple(ids[:count])
    raise TaskError(
        f"the text source {corpus.name!r} has only {len(ids)} tokens, {count} are needed; "
        "perplexity never repeats text.",
        remedy="Name a longer source, such as file:<glob> or datasets:<name>, or ask for shorter contexts.",
    )
