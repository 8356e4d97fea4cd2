"""The records of near_duplicate_keys: families of keys that share four digits, all members in the text."""

from __future__ import annotations

import re

from tiny_tokenizer import tiny_tokenizer

from kveval.prompting import PromptTemplate
from kveval.tasks import TaskContext, load_task


def test_the_asked_records_family_is_in_the_text_with_codes_of_its_own() -> None:
    tokenizer = tiny_tokenizer()
    prompt = PromptTemplate.from_tokenizer(tokenizer)
    task = load_task("near_duplicate_keys", {"mates": 3, "queries": 2})
    samples = task.samples(TaskContext(tokenizer, prompt, 3000, 6, 0))
    assert len({sample.cluster for sample in samples}) == 3
    for sample in samples:
        text = tokenizer.decode(sample.prompt_ids)
        records = dict(re.findall(r"The code of record (\d{6}) is (\d{5})\.", text))
        assert len(set(records.values())) == len(records)
        asked = re.search(r"What is the code of record (\d{6})", text)
        assert asked
        key = asked[1]
        assert records[key] == sample.metadata["answer"]
        differing = [sum(a != b for a, b in zip(key, other, strict=True)) for other in records if other != key]
        assert sum(count <= 2 for count in differing) >= 3
        # Every key has near-duplicates, not the asked one alone.
        some = sorted(records)[:20]
        near = [
            sum(sum(a != b for a, b in zip(one, other, strict=True)) <= 2 for other in records if other != one)
            for one in some
        ]
        assert sum(count > 0 for count in near) >= len(some) // 2


def test_keys_are_never_given_twice() -> None:
    tokenizer = tiny_tokenizer()
    prompt = PromptTemplate.from_tokenizer(tokenizer)
    task = load_task("near_duplicate_keys", {"mates": 30})
    (sample,) = task.samples(TaskContext(tokenizer, prompt, 20_000, 1, 3))
    keys = re.findall(r"The code of record (\d{6}) is \d", tokenizer.decode(sample.prompt_ids))
    # The filler starts at a random place and may begin again; a repeated record is the same record.
    assert len(set(re.findall(r"record (\d{6}) is (\d{5})\.", tokenizer.decode(sample.prompt_ids)))) == len(set(keys))
