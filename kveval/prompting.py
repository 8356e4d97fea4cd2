"""Turns text into prompt tokens: what surrounds a task's text, with its digest.

A prompt is head + context + tail. `head_ids` is what the chat template puts before the user's words,
the tail holds the question, the end of the user's turn, the assistant's header and an answer prefix
that the model completes:

    <bos> [system turn] [user header]  | context ... | question [end of turn] [assistant header] prefix
    `-------- head_ids --------------'                 `---------------- tail ------------------------'

Pieces are tokenized one by one, so a context can be filled to the exact token. Special tokens are
parsed in the template and never in the text of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from kveval.errors import TaskError, UnsupportedError
from kveval.identity import digest

__all__ = ["ChatMode", "PromptTemplate", "shared_prefix"]

ChatMode = Literal["auto", "none"]

_PLACEHOLDER = "kveval-user-text-5f1d"
_PINNED_DATE = datetime(2024, 7, 1)
_DATE_PARTS = {
    **{f"%{letter}": _PINNED_DATE.strftime(f"%{letter}") for letter in "aAbBdmyYjHIMSp"},
    "%-d": str(_PINNED_DATE.day),
    "%-m": str(_PINNED_DATE.month),
}
_ANCHOR = "\n"


def _clock_stopped(chat_template: str) -> str:
    """The chat template with today's date replaced by a fixed one.

    transformers gives templates a function `strftime_now`; a macro of that name goes before it. (A
    function passed as a variable won't do: transformers turns it into text.)
    """
    if "strftime_now" not in chat_template:
        return chat_template
    replaced = "".join(f" | replace('{part}', '{value}')" for part, value in _DATE_PARTS.items())
    macro = "{%- macro strftime_now(pattern) -%}{{ pattern" + replaced + " }}{%- endmacro %}"
    return macro + "{{ '' }}" + chat_template  # the empty output keeps a first newline from being trimmed


@dataclass(frozen=True)
class PromptTemplate:
    """What surrounds a task's text for one tokenizer.

    Attributes:
        tokenizer: A Hugging Face tokenizer; only its encoding is used.
        mode: "chat" (the tokenizer's own chat template) or "raw" (plain text).
        head_ids: Tokens before the task's text, BOS included where the tokenizer has one.
        tail_text: Text between the question and the answer prefix, special tokens spelled out.
        bos_ids: What the tokenizer itself puts before plain text (usually BOS, or nothing).
        digest: Digest of mode, head and tail; part of a cell's identity.
    """

    tokenizer: Any = field(repr=False, compare=False)
    mode: Literal["chat", "raw"]
    head_ids: tuple[int, ...]
    tail_text: str
    bos_ids: tuple[int, ...]
    digest: str

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, mode: ChatMode = "auto") -> PromptTemplate:
        """Splits the tokenizer's chat template around the user's words.

        Args:
            tokenizer: A Hugging Face tokenizer.
            mode: "auto" uses the chat template if the tokenizer has one; "none" is plain text.

        A template that prints today's date gets a fixed one, and a reasoning switch is off: the same
        config gives the same tokens on any day, and the answer follows the assistant's header.

        Raises:
            UnsupportedError: the template drops, repeats or changes the user's words.
        """
        bos_ids = _bos_ids(tokenizer)
        if mode == "none" or not tokenizer.chat_template:
            head_ids, tail_text, kind = bos_ids, "\n\n", "raw"
        else:
            head_text, tail_text = _split_chat_template(tokenizer)
            head_ids, kind = _ids(tokenizer, head_text, split_special=False), "chat"
        identity = {"mode": kind, "head_ids": head_ids, "tail_text": tail_text}
        return cls(
            tokenizer=tokenizer,
            mode="chat" if kind == "chat" else "raw",
            head_ids=head_ids,
            tail_text=tail_text,
            bos_ids=bos_ids,
            digest=digest("prompt-template", identity),
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of plain text that follows other text. Special tokens in it stay plain characters.

        Raises:
            TaskError: the tokenizer parsed a special token out of the text all the same.
        """
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """`encode` for each text, in one call of the tokenizer."""
        if not texts:
            return []
        # A tokenizer that puts a space before every text (Llama 2) would put one before every piece:
        # there, each piece is encoded behind a newline, whose tokens are then taken off.
        anchor = _ANCHOR if self._adds_space else ""
        skip = len(_ids(self.tokenizer, anchor)) if anchor else 0
        batch = self.tokenizer([anchor + text for text in texts], add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        pieces = [tuple(ids[skip:]) for ids in batch]
        for text, ids in zip(texts, pieces, strict=True):
            self._check_plain(text, ids)
        return pieces

    def tail(self, question: str, answer_prefix: str) -> tuple[int, ...]:
        """Tokens after the context: the question, the turn's end, the header, the answer prefix."""
        return self._before_prefix(question) + self.encode(answer_prefix)

    def tail_and_answer(
        self, question: str, answer_prefix: str, answer: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tail and the answer's tokens, split where the model has to start answering.

        The prefix and the answer are joined by a space. The space belongs to the answer's first token
        where the tokenizer merges it (" quick"), and to the tail where it doesn't (" " + "1").
        """
        whole = self.encode(f"{answer_prefix} {answer}")
        given = self.encode(f"{answer_prefix} ")
        cut = shared_prefix(whole, given)
        return self._before_prefix(question) + whole[:cut], whole[cut:]

    def conversation(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Tokens of a whole conversation up to the assistant's next answer, by the tokenizer's chat template.

        One user's turn gives the same tokens as head, text and tail. The contents may hold anything: special tokens
        in them stay plain characters.

        Args:
            messages: (role, content) of each turn: "system", "user" or "assistant".

        Raises:
            UnsupportedError: there is no chat template, or it refuses the turns or changes their words.
            TaskError: the tokenizer parsed a special token out of a content all the same.
        """
        if self.mode == "raw":
            raise UnsupportedError(
                "a conversation needs a chat template, and this model runs without one.",
                remedy="Use a chat model, without `chat_template: none`; or write the text as `prompt`.",
            )
        roles = tuple(role for role, _ in messages)
        pieces = self._pieces_of(roles)
        contents = _as_shown(self.tokenizer, roles, [text for _, text in messages], [text for text, _ in pieces])
        ids = list(pieces[0][1])
        for content, (_, piece) in zip(self.encode_many(contents), pieces[1:], strict=True):
            ids += [*content, *piece]
        return tuple(ids)

    def _pieces_of(self, roles: tuple[str, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The template's text and tokens around the contents; kept, since many conversations have the same roles."""
        if roles not in self._known_pieces:
            texts = _pieces(self.tokenizer, roles)
            self._known_pieces[roles] = tuple((text, _ids(self.tokenizer, text, split_special=False)) for text in texts)
        return self._known_pieces[roles]

    @cached_property
    def _known_pieces(self) -> dict[tuple[str, ...], tuple[tuple[str, tuple[int, ...]], ...]]:
        return {}

    def _before_prefix(self, question: str) -> tuple[int, ...]:
        if self.mode == "raw":
            return self.encode(question + self.tail_text)
        return self.encode(question) + _ids(self.tokenizer, self.tail_text, split_special=False)

    @cached_property
    def _adds_space(self) -> bool:
        alone = _ids(self.tokenizer, _ANCHOR) + _ids(self.tokenizer, "a")
        return alone != _ids(self.tokenizer, _ANCHOR + "a")

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids that steer a model rather than spell text. A pure unknown-word token is text of a kind."""
        tokenizer = self.tokenizer
        ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids.update(tokenizer.all_special_ids)
        steering = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        if tokenizer.unk_token_id not in steering:
            ids.discard(tokenizer.unk_token_id)
        return frozenset(ids)

    def _check_plain(self, text: str, ids: tuple[int, ...]) -> None:
        found = self.control_ids.intersection(ids)
        if found:
            names = ", ".join(repr(self.tokenizer.convert_ids_to_tokens(i)) for i in sorted(found))
            raise TaskError(
                f"the tokenizer reads special tokens ({names}) in the text of a task: {text[:60]!r}.",
                remedy="Take those strings out of the text, or use a fast tokenizer (tokenizer.json).",
            )


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def _ids(tokenizer: Any, text: str, *, split_special: bool = True) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=split_special)["input_ids"])


def _bos_ids(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer's own call puts before a text."""
    plain = tuple(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = tuple(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    raise UnsupportedError(
        "the tokenizer changes a text's own tokens when it adds special tokens.",
        remedy="Use the model's fast tokenizer (tokenizer.json).",
    )


def _split_chat_template(tokenizer: Any) -> tuple[str, str]:
    before, after = _pieces(tokenizer, ("user",))
    return before, after


def _pieces(tokenizer: Any, roles: Sequence[str]) -> tuple[str, ...]:
    """What the chat template puts before, between and after the contents of messages with these roles."""
    words = [f"{_PLACEHOLDER}-{place}-end" for place in range(len(roles))]
    text = rest = _render(tokenizer, roles, words)
    pieces = []
    for role, word in zip(roles, words, strict=True):
        if text.count(word) != 1 or word not in rest:
            raise UnsupportedError(
                f"the tokenizer's chat template shows the {role}'s words {text.count(word)} times instead of once, "
                "or not in their order.",
                remedy="Set `chat_template: none` under `model:` to use plain text.",
            )
        piece, _, rest = rest.partition(word)
        pieces.append(piece)
    return (*pieces, rest)


def _render(tokenizer: Any, roles: Sequence[str], contents: Sequence[str]) -> str:
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            chat_template=_clock_stopped(tokenizer.get_chat_template()),
            add_generation_prompt=True,
            date_string=_PINNED_DATE.strftime("%d %b %Y"),
            enable_thinking=False,
        )
    except TemplateError as error:
        raise UnsupportedError(
            f"the tokenizer's chat template refuses a conversation of {', '.join(roles)}: {error}",
            remedy="Leave out turns that the model was not made for.",
        ) from error
    return text


_TRIMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.rstrip, str.lstrip)
"""What chat templates do to the ends of a message."""


def _as_shown(tokenizer: Any, roles: Sequence[str], contents: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """The contents as the template shows them: as they are, or without white space at their ends.

    Raises:
        UnsupportedError: the template changes them in another way.
    """
    text = _render(tokenizer, roles, contents)
    at = len(pieces[0])
    shown = []
    for place, (role, content, piece) in enumerate(zip(roles, contents, pieces[1:], strict=True)):
        trimmed = (trim(content) for trim in _TRIMS)
        found = next((words for words in trimmed if text.startswith(words + piece, at)), None)
        if found is None:
            raise UnsupportedError(
                f"the tokenizer's chat template changes message {place + 1} ({role}) or what stands around it.",
                remedy="Write the message as the model is to read it: without a reasoning part, for instance.",
            )
        shown.append(found)
        at += len(found) + len(piece)
    if not text.startswith(pieces[0]) or at != len(text):
        raise UnsupportedError(
            "the tokenizer's chat template adds something that depends on the words of the messages.",
            remedy="Write the messages as the model is to read them.",
        )
    return shown
