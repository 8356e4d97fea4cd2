"""Perplexity of the tokens that need the far context: LongPPL (Fang et al. 2024, arXiv:2410.23771).

The same tokens are scored at every context length, with more and more text before them. Key tokens are those that the
baseline predicts from the whole prompt and not from its last `short_window` tokens; they alone count.
"""

from pydantic import Field

from kveval.corpora import CorpusName, ids_after, ids_before, load_corpus
from kveval.errors import LengthError, TaskError
from kveval.tasks import Sample, TaskContext, TaskParams, make_sample, seeded_random

VERSION = 1
NAME = "long_ppl"
MAX_NEW_TOKENS = 1024


class Params(TaskParams):
    """`corpus`: the text to read. `scored_tokens`: how many tokens at the end of it are candidates.

    `short_window`: tokens before them that don't count as far.
    """

    corpus: CorpusName = "python-code"
    scored_tokens: int = Field(1024, ge=1)
    short_window: int = Field(256, ge=1)


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """One passage per sample, as plain text behind the tokenizer's own BOS.

    The scored tokens begin at a fixed place whatever the length, so they are the same at every length. Places are
    spread evenly over the corpus; no passage repeats any text.
    """
    bos = ctx.prompt.bos_ids
    least = len(bos) + params.short_window + 1 + ctx.answer_room(params.scored_tokens)
    if ctx.context_length < least:
        raise LengthError(
            f"task {NAME!r} needs at least {least} tokens to score {params.scored_tokens} behind more than "
            f"{params.short_window}; the context length is {ctx.context_length}.",
            remedy="Ask for longer contexts, fewer `scored_tokens` or a smaller `short_window`.",
        )
    corpus = load_corpus(params.corpus)
    count = ctx.context_length - len(bos) - ctx.answer_room(params.scored_tokens)
    made = []
    for index, place in enumerate(corpus.spread(seeded_random(ctx, NAME, 0).random(), ctx.samples)):
        answer, read = ids_after(ctx.prompt.encode, corpus.text, place, params.scored_tokens)
        before, _ = ids_before(ctx.prompt.encode, corpus.text, place, count, chars=len(corpus.text) - read)
        if len(before) < count:
            raise TaskError(
                f"the text source {corpus.name!r} has only {len(before) + len(answer)} tokens, "
                f"{count + params.scored_tokens} are needed; {NAME} never repeats text.",
                remedy="Name a longer source, such as file:<glob> or datasets:<name>, or ask for shorter contexts.",
            )
        made.append(
            make_sample(
                ctx,
                index,
                bos + before,
                answer,
                cluster=f"{NAME}-{place}",
                metadata={"corpus": corpus.name, "start_char": place},
                references=(ctx.prompt.tokenizer.decode(answer),),
                short_prompt_ids=bos + before[-params.short_window :],
            )
        )
    return made
