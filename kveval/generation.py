"""Greedy decoding: when an answer that a model writes ends, and which of its text counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kveval.errors import MeasurementError
from kveval.records import FinishReason

__all__ = ["Generated", "end_tokens", "write_answer"]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""What reasoning models put around the thoughts before their answer."""

_PROMPT_END = 64
"""Tokens of the prompt that are searched for an opening of thoughts."""


@dataclass(frozen=True)
class Generated:
    """What a model wrote.

    Attributes:
        token_ids: All of it, without the end token.
        text: What counts as the answer: neither thoughts nor special tokens, up to the first stop string.
        finish_reason: See `FinishReason`. With "thinking" there is no answer, and `text` is empty.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: those of the model's generation config, and the tokenizer's own."""
    named = model.generation_config.eos_token_id
    ids = named if isinstance(named, (list, tuple)) else [named]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)


def write_answer(
    logits: Tensor,
    step: Callable[[int], Tensor],
    tokenizer: Any,
    *,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop: Sequence[str] = (),
    end_ids: Collection[int] = (),
) -> Generated:
    """Take the likeliest token until one of `end_ids`, a string of `stop` or the budget ends the answer.

    Args:
        logits: float [V] after the prompt.
        step: Feeds a token to the model, and gives the float [V] logits after it.
        tokenizer: The model's.
        prompt_ids: The prompt; a template may open thoughts at its end.
        max_new_tokens: Most tokens that are written, thoughts included; at least 1.
        stop: Strings that end the answer; they do not count inside thoughts.
        end_ids: Tokens that end it.

    Raises:
        MeasurementError: if logits are not finite.
    """
    thinking = _opens_thoughts(tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False))
    written: list[int] = []
    while True:
        if not torch.isfinite(logits).all():
            raise MeasurementError("logits hold NaN or infinity.", remedy="Check the model's dtype and weights.")
        token = int(logits.argmax())
        if token in end_ids:
            return _generated(tokenizer, written, stop, thinking, "stop")
        written.append(token)
        if stop and _stopped(tokenizer, written, stop, thinking):
            return _generated(tokenizer, written, stop, thinking, "stop")
        if len(written) == max_new_tokens:
            return _generated(tokenizer, written, stop, thinking, "length")
        logits = step(token)


def _opens_thoughts(text: str) -> bool:
    return text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)


def _stopped(tokenizer: Any, written: Sequence[int], stop: Sequence[str], thinking: bool) -> bool:
    # A token may be a byte of a character of up to four.
    tail = tokenizer.decode(written[-4 * max(map(len, stop)) - 4 :], skip_special_tokens=False)
    if not any(text in tail for text in stop):
        return False
    answer, open_thoughts = _answer(tokenizer.decode(written, skip_special_tokens=False), thinking)
    return not open_thoughts and any(text in answer for text in stop)


def _answer(text: str, thinking: bool) -> tuple[str, bool]:
    """What follows the thoughts, and whether they have not ended."""
    if THINK_CLOSE in text:
        text, thinking = text.rpartition(THINK_CLOSE)[2], False
    before, opened, _ = text.partition(THINK_OPEN)
    return ("", True) if thinking or (opened and not before.strip()) else (text, False)


def _generated(
    tokenizer: Any, written: Sequence[int], stop: Sequence[str], thinking: bool, reason: FinishReason
) -> Generated:
    text, open_thoughts = _answer(tokenizer.decode(written, skip_special_tokens=False), thinking)
    if open_thoughts and reason == "length":
        return Generated(tuple(written), "", "thinking")
    ends = [at for at in map(text.find, stop) if at >= 0]
    text = text[: min(ends)] if ends else text
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return Generated(tuple(written), text, reason)
