"""When a written answer ends, and what of it counts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from tiny_tokenizer import tiny_tokenizer

from kveval.errors import MeasurementError
from kveval.generation import Generated, end_tokens, write_answer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def written(ids: Sequence[int], *, budget: int = 50, stop: Sequence[str] = (), prompt: str = "Question") -> Generated:
    """What comes of a model that would write these tokens, then the end token."""
    script = [*ids, END]
    fed: list[int] = []

    def logits() -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(script[len(fed)]), len(TOKENIZER)).float()

    def step(token: int) -> torch.Tensor:
        assert token == script[len(fed)], "what was chosen is what is fed"
        fed.append(token)
        return logits()

    return write_answer(
        logits(), step, TOKENIZER, prompt_ids=encoded(prompt), max_new_tokens=budget, stop=stop, end_ids={END}
    )


def encoded(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_the_end_token_ends_it_and_is_no_text() -> None:
    ids = encoded("the answer is 42")
    assert written(ids) == Generated(tuple(ids), "the answer is 42", "stop")
    assert written([]) == Generated((), "", "stop")


def test_the_budget_ends_it() -> None:
    ids = encoded("the answer is 42")
    found = written(ids, budget=len(ids))
    assert (found.token_ids, found.finish_reason) == (tuple(ids), "length")
    assert written(ids, budget=3).text == TOKENIZER.decode(ids[:3])


@pytest.mark.parametrize("stop", [["\n\n"], ["##", "\n\n"], ["\n", "never"], ["é"]])
def test_the_first_stop_string_ends_it_and_is_left_out(stop: list[str]) -> None:
    text = "one é two\n\nthree ## four"
    found = written(encoded(text), stop=stop)
    ends = [text.find(s) for s in stop if s in text]
    assert (found.text, found.finish_reason) == (text[: min(ends)], "stop")
    assert len(found.token_ids) < len(encoded(text))


def test_thoughts_are_no_answer() -> None:
    found = written(encoded("<think>\n\nthe 1 or 2?\n\n</think>it is 2\n\nmore"), stop=["\n\n"])
    assert (found.text, found.finish_reason) == ("it is 2", "stop")
    opened = written(encoded("the 1 or 2?</think>it is 2"), prompt="Question <think>\n")
    assert (opened.text, opened.finish_reason) == ("it is 2", "stop")


@pytest.mark.parametrize(("text", "prompt"), [("<think>the 1 or 2?", "Question"), ("the 1 or 2?", "Q <think>\n")])
def test_cut_thoughts_are_told(text: str, prompt: str) -> None:
    ids = encoded(text)
    assert written(ids, budget=len(ids), prompt=prompt) == Generated(tuple(ids), "", "thinking")
    assert written(ids, prompt=prompt).finish_reason == "stop"  # it ended, without an answer


def test_words_about_thinking_are_an_answer() -> None:
    assert written(encoded("write <think> here"), budget=9).finish_reason == "length"


def test_special_tokens_are_no_text() -> None:
    user = TOKENIZER.convert_tokens_to_ids("<|user|>")
    assert written([*encoded("it is 2"), user]).text == "it is 2"


def test_logits_that_are_no_numbers() -> None:
    with pytest.raises(MeasurementError, match="NaN or infinity"):
        write_answer(
            torch.full((9,), float("nan")), lambda _: torch.zeros(9), TOKENIZER, prompt_ids=[1], max_new_tokens=1
        )


@pytest.mark.parametrize(("named", "expected"), [(7, {7, END}), ([7, 8], {7, 8, END}), (None, {END})])
def test_end_tokens(named: object, expected: set[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=named))
    assert end_tokens(model, TOKENIZER) == expected
