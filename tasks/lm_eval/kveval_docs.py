"""kveval's tasks as documents for lm-evaluation-harness. The YAML files beside this one name its functions.

lm-eval reads text, so a prompt is decoded again: the user's turn is `input`, the opening of the answer `gen_prefix`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets

from kveval.config import ModelConfig, parse_length
from kveval.errors import ConfigError, TaskError
from kveval.models import load_tokenizer
from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, Task, TaskContext, load_task
from kveval.text_metrics import string_match_all, text_exact_match, text_f1

CONTEXT_LENGTH = 4096
SAMPLES = 64
MAX_GEN_TOKS = 64
"""What the YAML files let the model write; kept free in the context."""

TOKENIZER_KEYS = ("tokenizer", "pretrained", "model")
"""Names that lm-eval's models give to what the tokenizer comes from."""


def niah_multikey(**options: Any) -> dict[str, Any]:
    """One needle among four that differ in their keys."""
    return _documents("niah_multikey", options)


def variable_tracking(**options: Any) -> dict[str, Any]:
    """The names of all variables of a chain of assignments."""
    return _documents("variable_tracking", options)


def passkey_chain(**options: Any) -> dict[str, Any]:
    """A chain of passkeys of two hops, written out."""
    return _documents("passkey_chain", options)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Scores of what the model wrote, each from 0 to 1."""
    (text,) = results
    references = doc["outputs"]
    return {
        "string_match_all": string_match_all(text, references),
        "text_f1": text_f1(text, references),
        "text_exact_match": text_exact_match(text, references),
    }


def _documents(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The data set: `test`, as many documents as asked for, none above the context length.

    Args:
        name: A task of kveval.
        options: lm-eval's metadata: where the tokenizer comes from, and `context_length`, `samples`, `seed`;
            `fixed_length` is that of a task whose name says its length.

    Raises:
        ConfigError: no tokenizer is named, or two context lengths are.
        TaskError: the samples can't be written as text.
    """
    tokenizer = load_tokenizer(ModelConfig(id=_tokenizer_name(options)))
    length = _length(options)
    ctx = TaskContext(
        tokenizer=tokenizer,
        prompt=PromptTemplate.from_tokenizer(tokenizer, "none"),
        context_length=length - _template_tokens(tokenizer),
        samples=int(options.get("samples", SAMPLES)),
        seed=int(options.get("seed", 0)),
        max_new_tokens=MAX_GEN_TOKS,
    )
    task = load_task(name)
    docs = _fitting(lambda shorter: _as_docs(task, ctx, shorter, length), length)
    return {"test": datasets.Dataset.from_list(docs, split=datasets.Split.TEST)}


def _fitting(make: Callable[[int], list[dict[str, Any]]], length: int) -> list[dict[str, Any]]:
    """Documents of at most `length` tokens: the text as a whole may take a few more than its pieces did."""
    shorter = 0
    for _ in range(4):
        docs = make(shorter)
        excess = max(doc["length"] for doc in docs) - length
        if excess <= 0:
            return docs
        shorter += excess
    raise TaskError(
        f"the tokenizer does not give the same tokens for a text that it decoded, {excess} too many at last.",
        remedy="Run the task with `kveval run`, which feeds tokens.",
    )


def _as_docs(task: Task, ctx: TaskContext, shorter: int, length: int) -> list[dict[str, Any]]:
    made = task.samples(TaskContext(**{**ctx.__dict__, "context_length": ctx.context_length - shorter}))
    return [_as_doc(sample, ctx, length) for sample in made]


def _as_doc(sample: Sample, ctx: TaskContext, length: int) -> dict[str, Any]:
    text = ctx.tokenizer.decode(sample.prompt_ids[len(ctx.prompt.bos_ids) :], skip_special_tokens=False)
    question = sample.metadata["question"]
    before, found, prefix = text.rpartition(question + ctx.prompt.tail_text)
    if not found:
        raise TaskError(
            f"the tokenizer does not give back the question that it encoded: {question!r}.",
            remedy="Run the task with `kveval run`, which feeds tokens.",
        )
    user, prefix = before + question, prefix.rstrip()
    tokens = len(ctx.tokenizer(f"{user} {prefix}")["input_ids"]) + _template_tokens(ctx.tokenizer) + MAX_GEN_TOKS
    return {
        "id": sample.id,
        "input": user,
        "gen_prefix": prefix,
        "outputs": list(sample.references),
        "context_length": length,
        "length": tokens,
        "depth": sample.depth,
    }


def _template_tokens(tokenizer: Any) -> int:
    """Tokens of the chat template around a user's words, which `--apply_chat_template` adds; 0 without one."""
    if not tokenizer.chat_template:
        return 0
    chat = PromptTemplate.from_tokenizer(tokenizer, "auto")
    return len(chat.head_ids) + len(chat.tail("", ""))


def _tokenizer_name(options: dict[str, Any]) -> str:
    for key in TOKENIZER_KEYS:
        if isinstance(options.get(key), str) and options[key]:
            return str(options[key])
    raise ConfigError(
        "kveval's tasks are made to a length in tokens, and no tokenizer is named.",
        remedy='Pass --metadata \'{"tokenizer": "folder or hub id"}\'.',
    )


def _length(options: dict[str, Any]) -> int:
    asked, fixed = options.get("context_length"), options.get("fixed_length")
    if asked is not None and fixed is not None:
        raise ConfigError(
            f"a task of {fixed} tokens can't be made with context_length {asked}.",
            remedy="Ask for the task without a length in its name.",
        )
    length = parse_length(asked if asked is not None else fixed if fixed is not None else CONTEXT_LENGTH)
    if not isinstance(length, int) or length < 1:
        raise ConfigError(f"context_length {asked!r} is not a length.", remedy="Write 4096, 4k or 1M.")
    return length
