"""A model of lm-evaluation-harness that answers from kveval's stored cache.

lm-eval's own Hugging Face model scores a continuation in one forward, which never reads a quantized cache. This one
prefills the context into the packed cache and scores, or writes, what follows in forwards that read it.

    lm_eval.simple_evaluate(model=KvevalLM(HFBackend(loaded), "k8v4"), tasks=["lambada_openai"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from kveval.backends.hf import HFBackend
from kveval.errors import ConfigError, UnsupportedError
from kveval.formats.spec import KVScheme, get_scheme
from kveval.integrations.stored_requests import StoredRequests, Usage
from kveval.kernel_use import AttentionMode
from kveval.plan import Arm
from kveval.records import Role

__all__ = ["MAX_GEN_TOKS", "KvevalLM"]

MAX_GEN_TOKS = 256
"""Tokens that a task lets the model write where it says nothing; lm-eval's own default."""

_GREEDY_ANYWAY = {"do_sample", "temperature", "top_p", "top_k", "min_p", "num_beams", "seed"}
"""Keys of a task's `generation_kwargs` that change nothing under greedy decoding, once their values are checked."""


class KvevalLM(TemplateLM):  # type: ignore[misc]  # lm-eval's types are not read: it is an extra
    """One model on one cache scheme.

    Contexts that several requests share (a question's choices) are prefilled once. Nothing is ever truncated: a request
    that exceeds the model's limit is an error.

    Args:
        backend: Holds the model and its tokenizer.
        scheme: A preset's name or a `KVScheme`.
        prefill_chunk: Most tokens of a context that one forward takes.
        attention: Whether attention reads packed bytes; see `kveval.cache.QuantizedCache`.
        max_length: Most tokens of a sequence; the model's own limit unless given.
        max_gen_toks: Tokens that the model may write where a task says nothing.

    Raises:
        UnsupportedError: the scheme can't be stored for this model.
    """

    def __init__(
        self,
        backend: HFBackend,
        scheme: str | KVScheme,
        *,
        prefill_chunk: int = 2048,
        attention: AttentionMode = "auto",
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
    ) -> None:
        super().__init__()
        scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
        role: Role = "scheme" if scheme.lossy else "baseline"
        self.arm = Arm(scheme.name, role, scheme, prefill_chunk, "stored", attention=attention)
        self.tokenizer = backend.loaded.tokenizer
        self.max_length = max_length if max_length is not None else backend.loaded.info.max_context
        self.max_gen_toks = max_gen_toks
        self._device = backend.loaded.device
        self._requests = StoredRequests(backend, self.arm, max_length=self.max_length)

    @property
    def usage(self) -> Usage:
        """What all requests so far took."""
        return self._requests.usage

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: BOS, or the end token where there is none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's cache of built requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The tokenizer's chat template around the messages.

        Where `add_generation_prompt` is false, the last message is an assistant's that the model continues.

        Raises:
            UnsupportedError: there is no template, or it refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise UnsupportedError(
                "the model's tokenizer has no chat template.", remedy="Leave out --apply-chat-template."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except jinja2.exceptions.TemplateError as error:
            roles = ", ".join(message["role"] for message in chat_history)
            raise UnsupportedError(
                f"the model's chat template refuses messages of {roles}: {error}",
                remedy="Leave out --apply-chat-template, or the task's description if it is a system message.",
            ) from error
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, with the tokenizer's own BOS unless the text starts with one already."""
        if add_special_tokens is None:
            prefix = str(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = not (prefix and string.startswith(prefix))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text in nats, every token scored once, in windows of the model's limit."""
        totals = []
        for (text,) in tqdm([request.args for request in requests], desc="Rolling texts", disable=disable_tqdm):
            ids = self.tok_encode(text)
            windows = utils.get_rolling_token_windows(
                token_list=ids,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length if self.max_length is not None else len(ids),
                context_len=1,
            )
            pairs = map(utils.make_disjoint_window, windows)
            totals.append(sum(self._requests.continuations(given, [scored])[0][0] for given, scored in pairs))
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        by_context: dict[tuple[int, ...], list[int]] = {}
        for i, (pair, context, continuation) in enumerate(requests):
            if not continuation:
                raise UnsupportedError(
                    f"a request asks for the likelihood of no tokens at all: {pair[1]!r}.",
                    remedy="Check the task's choices and its target_delimiter.",
                )
            by_context.setdefault(tuple(context), []).append(i)
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for context, members in tqdm(by_context.items(), desc="Contexts", disable=disable_tqdm):
            found = self._requests.continuations(context, [requests[i][2] for i in members])
            for i, score in zip(members, found, strict=True):
                scores[i] = score
        return scores

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What greedy decoding writes behind each context, up to the first of the request's stop strings.

        Raises:
            UnsupportedError: a request asks for sampling, beams or penalties.
            LengthError: context and budget exceed the model's limit.
        """
        asked = [request.args for request in requests]
        return [
            self._generate(context, _greedy_kwargs(kwargs, self.max_gen_toks))
            for context, kwargs in tqdm(asked, desc="Generating", disable=disable_tqdm)
        ]

    def _generate(self, context: str, kwargs: Mapping[str, Any]) -> str:
        stop = [text for text in kwargs["until"] if text]
        return self._requests.write(self.tok_encode(context), kwargs["max_gen_toks"], stop)


def _greedy_kwargs(kwargs: Mapping[str, Any], default_max_gen_toks: int) -> dict[str, Any]:
    """A request's `until` and `max_gen_toks`.

    Raises:
        UnsupportedError: it asks for anything but greedy decoding.
        ConfigError: its budget is no positive number.
    """
    settled = dict(normalize_gen_kwargs(dict(kwargs), default_max_gen_toks))
    if settled["do_sample"] or settled.get("num_beams", 1) != 1:
        asked = {key: kwargs[key] for key in ("do_sample", "temperature", "num_beams") if key in kwargs}
        raise UnsupportedError(
            f"the task asks to sample or to search ({asked}); kveval compares greedy decoding only.",
            remedy="Pass --gen-kwargs do_sample=False,temperature=0.",
        )
    unknown = sorted(set(settled) - _GREEDY_ANYWAY - {"until", "max_gen_toks"})
    if unknown:
        raise UnsupportedError(
            f"the task sets generation_kwargs that kveval does not know: {', '.join(unknown)}.",
            remedy="Take them out of the task; greedy decoding with `until` and `max_gen_toks` is what runs.",
        )
    if settled["max_gen_toks"] < 1:
        raise ConfigError(f"max_gen_toks is {settled['max_gen_toks']}.", remedy="Give 1 or more.")
    return {"until": settled["until"], "max_gen_toks": settled["max_gen_toks"]}
