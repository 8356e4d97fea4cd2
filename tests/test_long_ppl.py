"""long_ppl: the same tokens are scored at every length, and the short prompt is the end of the long one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_tokenizer import tiny_tokenizer

from kveval.corpora import load_corpus
from kveval.errors import LengthError, TaskError
from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, TaskContext, load_task

TOKENIZER = tiny_tokenizer()
PROMPT = PromptTemplate.from_tokenizer(TOKENIZER)
BOS = len(PROMPT.bos_ids)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "book.txt"
    path.write_text("\n\n".join(f"The sun shines on hill {i * i}. We walk home by road {i}." for i in range(400)))
    return f"file:{path}"


def make(corpus: str, length: int, n: int = 4, seed: int = 0) -> list[Sample]:
    task = load_task("long_ppl", {"corpus": corpus, "scored_tokens": 64, "short_window": 32})
    return task.samples(TaskContext(TOKENIZER, PROMPT, length, n, seed))


def test_lengths_share_their_scored_tokens_and_what_stands_before(book: str) -> None:
    for short, long in zip(make(book, 300), make(book, 5000), strict=True):
        assert len(short.prompt_ids) + len(short.answer_ids) == 300
        assert len(long.prompt_ids) + len(long.answer_ids) == 5000
        assert short.answer_ids == long.answer_ids
        assert len(short.answer_ids) == 64
        assert short.prompt_ids[BOS:] == long.prompt_ids[-len(short.prompt_ids) + BOS :]
        assert (short.cluster, short.short_prompt_ids) == (long.cluster, long.short_prompt_ids)


def test_the_short_prompt_is_bos_and_the_end_of_the_prompt(book: str) -> None:
    for sample in make(book, 1000):
        assert sample.short_prompt_ids == PROMPT.bos_ids + sample.prompt_ids[-32:]
        assert sample.prompt_ids[:BOS] == PROMPT.bos_ids


def test_passages_are_running_text(book: str) -> None:
    text = load_corpus(book).text
    samples = make(book, 2000, n=8)
    for sample in samples:
        assert TOKENIZER.decode(sample.prompt_ids[BOS:] + sample.answer_ids) in text + text
        assert (text + text)[sample.metadata["start_char"] :].startswith(TOKENIZER.decode(sample.answer_ids))
    assert len({sample.cluster for sample in samples}) == 8


def test_the_number_of_samples_changes_none_and_the_seed_all(book: str) -> None:
    assert make(book, 500, n=3) == make(book, 500, n=8)[:3]
    assert not {s.id for s in make(book, 500)} & {s.id for s in make(book, 500, seed=1)}


def test_the_least_length_is_exact(book: str) -> None:
    with pytest.raises(LengthError, match=r"long_ppl.*at least \d+ tokens.*\b20\b") as caught:
        make(book, 20)
    found = re.search(r"at least (\d+) tokens", str(caught.value))
    assert found
    least = int(found[1])
    assert all(len(s.short_prompt_ids) < len(s.prompt_ids) for s in make(book, least))
    with pytest.raises(LengthError):
        make(book, least - 1)


def test_a_text_that_is_too_short_is_told(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("The sun shines on the hill. " * 20)
    with pytest.raises(TaskError, match=r"has only \d+ tokens, .* long_ppl never repeats text[\s\S]*longer source"):
        make(f"file:{tmp_path}/short.txt", 1000, n=1)
    size = sum(len(PROMPT.encode(word)) for word in re.findall(r"\s*\S+", "The sun shines on the hill. " * 20))
    (sample,) = make(f"file:{tmp_path}/short.txt", size - 20, n=1)
    assert len(sample.prompt_ids) + 64 == size - 20
