"""A completion that has to repeat an identifier defined far above it, in real Python files."""

from collections.abc import Iterator
from dataclasses import dataclass

from kveval.corpora import load_corpus
from kveval.errors import LengthError, TaskError
from kveval.haystack import depth_of
from kveval.prompting import shared_prefix
from kveval.source_files import Definition, SourceParams, SourceText, definitions, source_text
from kveval.tasks import Sample, TaskContext, make_sample, seeded_random

VERSION = 1
NAME = "code_identifier"
MAX_NEW_TOKENS = 32
STOP = ("\n",)

CALLS = {
    "function": '# The function whose docstring begins with "{clue}":\nresult = ',
    "method": '# The method whose docstring begins with "{clue}":\nresult = self.',
    "class": '# The class whose docstring begins with "{clue}":\nresult = ',
    "constant": "# The constant that is {clue}:\nresult = ",
}
"""The sample's last lines, up to the identifier."""

LEAST_TOKENS = 3
"""A shorter identifier could be guessed."""

CHARS_PER_TOKEN = 3
"""Fewer than real code has: a name that is not alone in so much text is turned away before anything is tokenized."""


class Params(SourceParams):
    """`corpus`: where the Python files come from."""


def samples(params: Params, ctx: TaskContext) -> list[Sample]:
    """Files behind one another, a definition at the asked depth, and a line at the end that calls for its name.

    The name occurs nowhere else in a sample. The last lines quote the first line of its docstring, or a constant's
    value, which occurs nowhere else either. Plain text behind the tokenizer's own BOS.
    """
    source = source_text(load_corpus(params.corpus))
    made: list[Sample] = []
    taken: dict[int, None] = {}
    least = 0
    for index in range(ctx.samples):
        for start, definition in _candidates(ctx, source, index):
            asked = _Asked.of(ctx, source, start, definition)
            if start in taken or len(asked.answer) < LEAST_TOKENS or not asked.probably_alone(index):
                continue
            if asked.minimum <= ctx.context_length:
                sample = asked.sample(index)
                if sample is None:
                    continue
                made.append(sample)
            least = max(least, asked.minimum)
            taken[start] = None
            break
        else:
            raise TaskError(
                f"the text source {source.corpus.name!r} has only {index} definitions that {NAME} can ask for at "
                f"{ctx.context_length} tokens, {ctx.samples} are needed.",
                remedy="Name more Python files, such as file:<folder>/**/*.py, or ask for fewer samples.",
            )
    if least > ctx.context_length:
        raise LengthError(
            f"task {NAME!r} needs at least {least} tokens; the context length is {ctx.context_length}.",
            remedy=f"Ask for context lengths of {least} or more.",
        )
    return made


def _candidates(ctx: TaskContext, source: SourceText, index: int) -> Iterator[tuple[int, Definition]]:
    """Every definition with its offset in the running text; files in random order, so that no large one dominates."""
    rng = seeded_random(ctx, NAME, index)
    documents = source.corpus.documents
    for number in rng.sample(range(len(documents)), len(documents)):
        found = definitions(documents[number])
        for definition in rng.sample(found, len(found)):
            yield source.starts[number] + definition.start, definition


@dataclass(frozen=True)
class _Asked:
    """A definition with all that has to be in the sample, in tokens."""

    ctx: TaskContext
    source: SourceText
    start: int
    definition: Definition
    shown: tuple[int, ...]
    tail: tuple[int, ...]
    answer: tuple[int, ...]

    @classmethod
    def of(cls, ctx: TaskContext, source: SourceText, start: int, definition: Definition) -> "_Asked":
        encode = ctx.prompt.encode
        call = "\n\n" + CALLS[definition.kind].format(clue=definition.clue)
        whole = encode(call + definition.name)
        cut = shared_prefix(whole, encode(call))
        shown = encode(source.part(start, start + definition.end - definition.start))
        return cls(ctx, source, start, definition, shown, whole[:cut], whole[cut:])

    @property
    def around(self) -> int:
        """Tokens of the sample besides the files."""
        return len(self.ctx.prompt.bos_ids) + len(self.tail) + self.ctx.answer_room(len(self.answer))

    @property
    def minimum(self) -> int:
        return self.around + len(self.shown)

    @property
    def room(self) -> int:
        """Tokens for the files."""
        return self.ctx.context_length - self.around

    def after(self, index: int) -> int:
        """Tokens from the definition on, at most."""
        return max(len(self.shown), self.room - round(depth_of(self.ctx, NAME, index) * self.room))

    def probably_alone(self, index: int) -> bool:
        after = self.after(index)
        before = max(0, self.room - after)
        return self._alone(CHARS_PER_TOKEN * before, max(self._shown_chars, CHARS_PER_TOKEN * after))

    def sample(self, index: int) -> Sample | None:
        """None if the name or the clue isn't alone in it."""
        encode = self.ctx.prompt.encode
        first = self.start + self._shown_chars
        more, chars = self.source.lines_after(encode, first, self.after(index) - len(self.shown))
        chars += self._shown_chars
        count = self.room - len(self.shown) - len(more)
        before, chars_before = self.source.before(encode, self.start, count, kept=chars, task=NAME)
        if not self._alone(chars_before, chars):
            return None
        return make_sample(
            self.ctx,
            index,
            (*self.ctx.prompt.bos_ids, *before, *self.shown, *more, *self.tail),
            self.answer,
            cluster=f"{NAME}-{index:05d}",
            depth=count / self.room,
            metadata={"corpus": self.source.corpus.name, "kind": self.definition.kind, "clue": self.definition.clue},
            references=(self.definition.name,),
        )

    @property
    def _shown_chars(self) -> int:
        return self.definition.end - self.definition.start

    def _alone(self, chars_before: int, chars_after: int) -> bool:
        """Whether name and clue occur once in so many characters around the definition's start."""
        text = self.source.part(self.start - chars_before, self.start + chars_after)
        return text.count(self.definition.name) == text.count(self.definition.clue) == 1
