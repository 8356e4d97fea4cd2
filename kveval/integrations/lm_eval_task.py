"""A task of lm-evaluation-harness as a task of a sweep: `lm_eval:<its name>`.

Its prompts, few-shot examples and answers are lm-eval's, its tokens kveval's: chat template and BOS as for every other
task, nothing truncated. A document whose prompt and answer have more than the next shorter context length and at most
this one belongs to this context length.

A task that is scored by likelihood feeds the right continuation: its NLL, and whether greedy decoding writes it.
Accuracy over all choices is not covered; `kveval lm-eval` has it. A task that generates may run in mode generate too,
and is then scored by its own metric.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from kveval.errors import ConfigError, TaskError, UnsupportedError
from kveval.identity import digest
from kveval.integrations.lm_eval_run import task_manager
from kveval.prompting import shared_prefix
from kveval.tasks import Sample, TaskContext, TaskParams, make_sample, seeded_random

__all__ = ["LMEvalTask", "Params"]

FEWSHOT_SEED = 1234
"""lm-eval's own default."""

LIKELIHOOD = ("multiple_choice", "loglikelihood")


class Params(TaskParams):
    """`num_fewshot`: examples before each question; the task's own number unless given.

    `include_path`: a folder with more tasks. `metric`: scores what the model writes; the task's first unless given.
    `metadata`: for tasks that make their own documents.
    """

    num_fewshot: int | None = Field(None, ge=0)
    include_path: str | None = None
    metric: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """Without what decides the documents: they themselves are in the task's digest, wherever they lie."""
        return {k: v for k, v in super().identity().items() if k not in ("include_path", "metadata")}


@dataclass(frozen=True)
class _Question:
    """A document as text: messages (role, content) up to the answer, its start if that is given, and the answer."""

    number: int
    messages: tuple[tuple[str, str], ...]
    opening: str
    answer: str
    references: tuple[str, ...]


class LMEvalTask:
    """What a task file has, for one lm-eval task.

    Args:
        name: lm-eval's name of the task.
        params: The config's.

    Raises:
        ConfigError: lm-eval or the task is missing, or the name is a group's.
        UnsupportedError: the task is scored in a way that a sweep has no place for.
        TaskError: its documents can't be had.
    """

    VERSION = 1
    EXACT_LENGTH = False

    def __init__(self, name: str, params: Params) -> None:
        self.name = name
        self._params = params
        folder = Path(params.include_path).expanduser() if params.include_path else None
        manager = task_manager([name], folder, params.metadata)
        if name not in manager.all_subtasks:
            raise ConfigError(
                f"lm_eval:{name} is a group or a tag of tasks.", remedy="Name each of its tasks as a task of its own."
            )
        try:
            (self._task,) = manager.load([name])["tasks"].values()
        except (FileNotFoundError, ConnectionError) as error:
            raise TaskError(
                f"the data set of lm_eval:{name} can't be had: {error}",
                remedy="Put it into the Hugging Face cache, or allow the network.",
            ) from error
        if self._task.OUTPUT_TYPE not in (*LIKELIHOOD, "generate_until"):
            raise UnsupportedError(
                f"lm_eval:{name} is scored by {self._task.OUTPUT_TYPE}, for which a sweep has no place.",
                remedy="Use the task `perplexity`, or run it with `kveval lm-eval`.",
            )
        self._tokens: dict[tuple[int, str], tuple[Any, list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {}

    @property
    def MAX_NEW_TOKENS(self) -> int:  # noqa: N802
        """The task's `max_gen_toks`, or lm-eval's default."""
        return int((self._task.config.generation_kwargs or {}).get("max_gen_toks", 256))

    @property
    def STOP(self) -> tuple[str, ...]:  # noqa: N802
        """The task's `until`."""
        until = (self._task.config.generation_kwargs or {}).get("until") or ()
        return (until,) if isinstance(until, str) else tuple(text for text in until if text)

    @cached_property
    def source_digest(self) -> str:
        """Digest of the task's config and of all its documents, wherever they lie."""
        import lm_eval

        places = ("metadata", "dataset_path", "dataset_name", "dataset_kwargs")
        rules = {key: value for key, value in self._task.dump_config().items() if key not in places}
        config = json.dumps(rules, sort_keys=True, default=str)
        docs = [json.dumps(doc, sort_keys=True, default=str) for doc in self._documents]
        return digest("lm-eval-task", [lm_eval.__version__, config, docs])

    def samples(self, params: Params, ctx: TaskContext) -> list[Sample]:
        """`ctx.samples` documents of the bucket (ctx.shorter, ctx.context_length], in an order that the seed shuffles.

        Raises:
            UnsupportedError: mode generate, and the task is scored by likelihood.
            TaskError: the bucket holds fewer documents.
        """
        if ctx.max_new_tokens is not None and self._task.OUTPUT_TYPE in LIKELIHOOD:
            raise UnsupportedError(
                f"lm_eval:{self.name} is scored by the likelihood of its choices; the model writes nothing.",
                remedy="Take out `mode: generate`.",
            )
        chat = ctx.prompt.mode == "chat"
        questions, tokens = self._questions(chat), self._tokens_of(ctx)
        order = list(range(len(questions)))
        seeded_random(ctx, f"lm_eval:{self.name}", 0, "order").shuffle(order)
        totals = [len(prompt) + ctx.answer_room(len(answer)) for prompt, answer in tokens]
        bucket = [i for i in order if ctx.shorter < totals[i] <= ctx.context_length]
        if len(bucket) < ctx.samples:
            raise TaskError(
                f"lm_eval:{self.name} has {len(bucket)} documents of {ctx.shorter + 1} to {ctx.context_length} tokens; "
                f"{ctx.samples} are asked for. Its {len(totals)} documents have {min(totals)} to {max(totals)} tokens.",
                remedy="Ask for fewer samples or other context lengths.",
            )
        return [
            make_sample(
                ctx,
                index,
                *tokens[i],
                cluster=f"lm_eval:{self.name}-{i:06d}",
                metadata={"doc_id": i},
                references=questions[i].references,
            )
            for index, i in enumerate(bucket[: ctx.samples])
        ]

    def score(self, params: Params, sample: Sample, text: str) -> dict[str, float]:
        """The task's own metric of what the model wrote.

        Raises:
            TaskError: the metric does not exist, is a loss, or is no number from 0 to 1 for a single document.
        """
        from lm_eval.api.instance import Instance

        doc = self._documents[sample.metadata["doc_id"]]
        written = Instance(request_type="generate_until", doc=doc, arguments=("", {}), idx=0, resps=[text])
        first = self._task._filters[0]
        first.apply([written])
        scores = self._task.process_results(doc, [written.filtered_resps[first.name]])
        known = [entry["metric"] for entry in self._task.config.metric_list]
        metric = params.metric or next((name for name in known if name in scores), known[0])
        value = scores.get(metric)
        if self._task.higher_is_better().get(metric) is False or not (
            isinstance(value, (bool, int, float)) and 0 <= value <= 1
        ):
            raise TaskError(
                f"lm_eval:{self.name} gives {metric}: {value!r}, which is no score from 0 (wrong) to 1 (right).",
                remedy=f"Name another with `metric`; the task gives {', '.join(map(str, scores))}.",
            )
        return {"task_score": float(value)}

    @cached_property
    def _documents(self) -> list[Any]:
        return list(self._task.eval_docs)

    @cached_property
    def _asked(self) -> dict[bool, list[_Question]]:
        return {}

    def _questions(self, chat: bool) -> list[_Question]:
        """Every document as text; few-shot examples are drawn in the documents' order, so all are made at once."""
        if chat not in self._asked:
            if self._params.num_fewshot is not None:
                self._task.set_config(key="num_fewshot", value=self._params.num_fewshot)
            self._task.set_fewshot_seed(seed=FEWSHOT_SEED)
            self._asked[chat] = [self._question(i, doc, chat) for i, doc in enumerate(self._documents)]
        return self._asked[chat]

    def _question(self, number: int, doc: Mapping[str, Any], chat: bool) -> _Question:
        task = self._task
        made = task.fewshot_context(
            doc,
            num_fewshot=task.config.num_fewshot or 0,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            chat_template=_as_json if chat else None,
            gen_prefix=task.doc_to_prefix(doc),
        )
        asked = task.construct_requests(
            doc=doc, ctx=made, metadata=(self.name, number, 1), apply_chat_template=chat, chat_template=None
        )
        if task.OUTPUT_TYPE == "generate_until":
            context, references = asked.args[0], self._references(doc)
            answer = self._delimiter(doc, chat) + references[0]
        else:
            chosen = asked[self._gold(doc)] if isinstance(asked, list) else asked
            context, answer = chosen.args[:2]
            references = (answer.strip(),)
        messages = json.loads(context) if chat else [["user", context]]
        opening = messages.pop()[1] if chat and messages[-1][0] == "assistant" else ""
        return _Question(number, tuple((role, text) for role, text in messages), opening, answer, references)

    def _references(self, doc: Mapping[str, Any]) -> tuple[str, ...]:
        target = self._task.doc_to_target(doc)
        if isinstance(target, int) and self._task.config.doc_to_choice is not None:
            target = self._task.doc_to_choice(doc)[target]
        found = tuple(map(str, target)) if isinstance(target, (list, tuple)) else (str(target),)
        if not found or not found[0].strip():
            raise TaskError(
                f"lm_eval:{self.name} has a document without a right answer.",
                remedy="Such a task can't be scored here; run it with `kveval lm-eval`.",
            )
        return found

    def _delimiter(self, doc: Mapping[str, Any], chat: bool) -> str:
        """What stands between the prompt and the answer, as lm-eval has it in few-shot examples."""
        if self._task.doc_to_prefix(doc):
            return " "
        return "" if chat else str(self._task.config.target_delimiter)

    def _gold(self, doc: Mapping[str, Any]) -> int:
        """Which choice is right; the first of several."""
        gold = self._task.doc_to_text(doc) if self._task.multiple_input else self._task.doc_to_target(doc)
        if isinstance(gold, (list, tuple)):
            gold = gold[0]
        choices = self._task.doc_to_choice(doc)
        if isinstance(gold, str) and gold in choices:
            gold = choices.index(gold)
        if not isinstance(gold, int) or not 0 <= gold < len(choices):
            raise TaskError(
                f"lm_eval:{self.name} has a document whose right choice is {gold!r}.",
                remedy="Such a task can't be scored here; run it with `kveval lm-eval`.",
            )
        return gold

    def _tokens_of(self, ctx: TaskContext) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Prompt and answer of every document, kept for the other context lengths."""
        key = (id(ctx.tokenizer), ctx.prompt.digest)
        if key not in self._tokens:
            questions = self._questions(ctx.prompt.mode == "chat")
            # The tokenizer is kept beside its tokens: its id stays its own.
            self._tokens[key] = (ctx.tokenizer, list(_encoded(ctx, questions)))
        return self._tokens[key][1]


def _encoded(ctx: TaskContext, questions: Sequence[_Question]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for question in questions:
        if ctx.prompt.mode == "chat":
            before, opening = ctx.prompt.conversation(question.messages), question.opening
        else:
            before, opening = ctx.prompt.bos_ids, question.messages[0][1]
        # White space between the two belongs to the answer's first token where the tokenizer merges it.
        opening, answer = opening.rstrip(" "), opening[len(opening.rstrip(" ")) :] + question.answer
        whole, given = ctx.prompt.encode_many([opening + answer, opening])
        cut = shared_prefix(whole, given)
        yield before + whole[:cut], whole[cut:]


def _as_json(messages: Sequence[Mapping[str, str]], **_: Any) -> str:
    """In place of a chat template: the messages themselves, for kveval's own way of encoding them."""
    return json.dumps([[message["role"], message["content"]] for message in messages])
