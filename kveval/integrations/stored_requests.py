"""Token requests of an evaluation harness, answered by forwards that read the stored cache.

A harness asks how likely a continuation is behind a context, or what the model writes behind it. The usual answer is
one forward over everything, in which attention sees the keys and values as computed and a narrower cache never matters.
Here the context is prefilled into the packed cache, and every figure comes from a forward whose reads are counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kveval.attention import path_text, recorded_paths
from kveval.backends.hf import HFBackend, check_reads
from kveval.cache import QuantizedCache
from kveval.errors import LengthError, MeasurementError, UnsupportedError
from kveval.generation import end_tokens, write_answer
from kveval.plan import Arm
from kveval.scoring import log_probabilities

__all__ = ["SCORED_AT_ONCE", "StoredRequests", "Usage"]

SCORED_AT_ONCE = 512
"""Most positions whose logits are held at the same time: memory must not grow as continuation x vocabulary."""


@dataclass
class Usage:
    """What answering took.

    Attributes:
        forwards: Of the model, prefills included.
        prefills: Contexts that were prefilled.
        fed_tokens: Tokens that the forwards took.
        positions: Positions that were scored or written at.
        packed_reads: Tokens decoded from packed bytes by scoring and writing forwards, over layers, keys and values.
        cache_tokens: Tokens of the longest cache.
        cache_bytes: Bytes that it stored.
        attention_paths: How attention read.
        seconds: Wall clock.
    """

    forwards: int = 0
    prefills: int = 0
    fed_tokens: int = 0
    positions: int = 0
    packed_reads: int = 0
    cache_tokens: int = 0
    cache_bytes: int = 0
    attention_paths: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, fed: int, positions: int, packed_reads: int) -> None:
        """Add one forward."""
        self.forwards += 1
        self.fed_tokens += fed
        self.positions += positions
        self.packed_reads += packed_reads

    def note_cache(self, cache: QuantizedCache, path: str) -> None:
        """Note a live cache and the attention path of a forward over it.

        Raises:
            MeasurementError: what it stores is not what is billed.
        """
        stored, billed = cache.stored_bytes().stored, cache.billed_bytes()
        if stored != billed:
            raise MeasurementError(f"the live cache holds {stored} bytes, but {billed} are billed.")
        if (tokens := cache.get_seq_length()) > self.cache_tokens:
            self.cache_tokens, self.cache_bytes = tokens, stored
        if path not in self.attention_paths:
            self.attention_paths.append(path)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class StoredRequests:
    """Answers requests one sequence at a time, on one arm.

    Args:
        backend: Holds the model.
        arm: Scheme and prefill chunk. Only `reads: stored` is possible: with a fresh chunk, the first forward of a
            text reads nothing from storage.
        max_length: Most tokens of a sequence; None: the model has no limit.

    Raises:
        UnsupportedError: the arm reads fresh chunks, or its scheme can't be stored.
    """

    def __init__(self, backend: HFBackend, arm: Arm, *, max_length: int | None) -> None:
        if arm.reads != "stored":
            raise UnsupportedError(
                f"requests of a harness can't be answered with reads: {arm.reads}: the first forward of a text "
                "would see nothing as stored.",
                remedy="Use reads: stored.",
            )
        self.backend, self.arm, self.max_length = backend, arm, max_length
        self.usage = Usage()
        backend.new_cache(arm)  # what can't be stored is refused before any request is answered

    @torch.inference_mode()
    def continuations(self, context: Sequence[int], answers: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """Log-probability of each answer behind `context`, in nats, and whether greedy decoding writes it.

        The context is prefilled once; each answer is scored on a branch. Answers that differ in their last token only
        share their forwards.

        Raises:
            LengthError: a context with an answer is longer than the model's limit.
            MeasurementError: a forward did not read the stored cache.
        """
        start = time.perf_counter()
        longest = max(map(len, answers))
        self._check_length(len(context), longest - 1, "a continuation")
        cache = self.backend.new_cache(self.arm, reserve=len(context) + longest)
        self._prefill(context[:-1], cache)
        together: dict[tuple[int, ...], list[int]] = {}
        for i, answer in enumerate(answers):
            together.setdefault(tuple(answer[:-1]), []).append(i)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(answers)
        for shared, members in together.items():
            with cache.branch():
                ends = [answers[i][-1] for i in members]
                for i, score in zip(members, self._ends(cache, context[-1], shared, ends), strict=True):
                    found[i] = score
        self.usage.seconds += time.perf_counter() - start
        return found

    @torch.inference_mode()
    def write(self, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[str]) -> str:
        """What greedy decoding writes behind `prompt`, up to the first stop string; see `kveval.generation`.

        Raises:
            LengthError: prompt and budget together are longer than the model's limit.
            MeasurementError: a forward did not read the stored cache.
        """
        start = time.perf_counter()
        self._check_length(len(prompt), max_new_tokens, "a generation budget")
        model, tokenizer = self.backend.loaded.model, self.backend.loaded.tokenizer
        cache = self.backend.new_cache(self.arm, reserve=len(prompt) + max_new_tokens)
        self._prefill(prompt[:-1], cache)

        def step(token: int) -> Tensor:
            read_before = cache.tokens_read()
            logits_NV = self.backend.forward([token], cache, keep=1)
            self.usage.count(1, 1, check_reads(cache, read_before, fed=1))
            return logits_NV[0]

        with recorded_paths() as paths:
            first = step(prompt[-1])
        written = write_answer(
            first,
            step,
            tokenizer,
            prompt_ids=prompt,
            max_new_tokens=max_new_tokens,
            stop=stop,
            end_ids=end_tokens(model, tokenizer),
        )
        self.usage.note_cache(cache, path_text(paths))
        self.usage.seconds += time.perf_counter() - start
        return written.text

    def _ends(
        self, cache: QuantizedCache, last: int, shared: tuple[int, ...], ends: Sequence[int]
    ) -> list[tuple[float, bool]]:
        """Scores of the answers `shared` + one of `ends`, behind what `cache` holds and the token `last`."""
        fed, total, greedy = [last, *shared], 0.0, True
        step = min(SCORED_AT_ONCE, self.arm.prefill_chunk)
        for at in range(0, len(fed), step):
            part = fed[at : at + step]
            log_probs_NV = self._scored(part, cache)
            right = torch.tensor(shared[at : at + step], dtype=torch.long, device=log_probs_NV.device)
            inner_NV = log_probs_NV[: len(right)]
            total += float(inner_NV.gather(1, right[:, None]).double().sum())
            greedy = greedy and bool((inner_NV.argmax(-1) == right).all())
        best = int(log_probs_NV[-1].argmax())
        return [(total + float(log_probs_NV[-1, end]), greedy and best == end) for end in ends]

    def _scored(self, ids: Sequence[int], cache: QuantizedCache) -> Tensor:
        """float32 [len(ids), V] log-probabilities of a forward that provably read every layer's stored bytes."""
        read_before = cache.tokens_read()
        with recorded_paths() as paths:
            logits_NV = self.backend.forward(ids, cache, keep=len(ids))
        self.usage.count(len(ids), len(ids), check_reads(cache, read_before, fed=len(ids)))
        self.usage.note_cache(cache, path_text(paths))
        return log_probabilities(logits_NV)

    def _prefill(self, ids: Sequence[int], cache: QuantizedCache) -> None:
        self.usage.prefills += 1
        for at in range(0, len(ids), self.arm.prefill_chunk):
            part = ids[at : at + self.arm.prefill_chunk]
            self.backend.forward(part, cache, keep=1)
            self.usage.count(len(part), 0, 0)

    def _check_length(self, context: int, more: int, what: str) -> None:
        if self.max_length is not None and context + more > self.max_length:
            raise LengthError(
                f"a context of {context} tokens and {what} of {more} need {context + more}; the model's limit is "
                f"{self.max_length}. Nothing is truncated.",
                remedy="Ask for shorter contexts, fewer few-shot examples or a smaller `max_gen_toks`, or use a model "
                "with a longer context.",
            )
