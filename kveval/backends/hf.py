"""The in-process transformers backend: prefill once per cluster, score answers over the stored cache, crop back."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kveval.attention import ATTENTION_PATH, cache_argument, path_text, recorded_paths, use_packed_attention
from kveval.backends.base import Effective, Output, Reference
from kveval.cache import QuantizedCache
from kveval.errors import MeasurementError, UnsupportedError
from kveval.generation import Generated, end_tokens, write_answer
from kveval.models import LoadedModel
from kveval.packed_layer import Reads
from kveval.plan import Arm
from kveval.prefixes import SCORING_TAIL, plan_batch
from kveval.scoring import key_tokens, log_probabilities, score_answer
from kveval.tasks import Sample

__all__ = ["HFBackend", "check_reads"]


class HFBackend:
    """Scores samples with a transformers causal LM whose attention reads packed caches."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._model = loaded.model
        use_packed_attention(self._model)
        self.cache_argument = cache_argument(self._model)
        if "logits_to_keep" not in inspect.signature(type(self._model).forward).parameters:
            raise UnsupportedError(
                f"{type(self._model).__name__} can't restrict logits to scored positions.",
                remedy="Use a model whose forward takes `logits_to_keep`.",
            )

    @torch.inference_mode()
    def score(
        self,
        clusters: Sequence[Sequence[Sample]],
        arm: Arm,
        baseline: Mapping[str, Reference],
        *,
        decode_tokens: int = 0,
    ) -> Iterator[Output]:
        """See `Backend.score`. The cache is built once, every sample is a branch of it, which is forgotten again."""
        with sdpa_kernel(SDPBackend.MATH) if arm.sdpa == "math" else nullcontext():
            yield from self._score(clusters, arm, baseline, decode_tokens)

    def _score(
        self, clusters: Sequence[Sequence[Sample]], arm: Arm, baseline: Mapping[str, Reference], decode_tokens: int
    ) -> Iterator[Output]:
        prompts = [[s.prompt_ids for s in cluster] for cluster in clusters]
        # Where a forward reads its own tokens raw, what stands in one decides what a question sees.
        together = arm.scheme.blind_to_later and arm.reads == "stored"
        plan = plan_batch(prompts, together=together)
        samples = [sample for cluster in clusters for sample in cluster]
        cache = self.new_cache(arm, reserve=max(_longest(sample, decode_tokens) for sample in samples))
        timed, stem_s = clusters[0][plan.rounds[-1].questions[-1]], 0.0
        for round_ in plan.rounds:
            done = cache.get_seq_length()
            stem_s += self._prefill([stem[done : round_.start] for stem in plan.stems], cache, arm.prefill_chunk)
            asked = [cluster[i] for cluster in clusters for i in round_.questions]
            outputs = self._branch(asked, cache, arm, baseline, forks=len(round_.questions))
            for sample, output in zip(asked, outputs, strict=True):
                output = replace(output, prefill_s=output.prefill_s + stem_s / len(samples))
                if sample.max_new_tokens is not None:
                    output = replace(output, generated=self._write(sample, cache, arm))
                if decode_tokens and sample is timed:
                    output = replace(output, decode_s_per_token=self._time_decode(sample, cache, decode_tokens))
                yield output

    def new_cache(self, arm: Arm, *, reserve: int = 0) -> QuantizedCache:
        """An empty cache for one sequence of this arm, with room for `reserve` tokens.

        Raises:
            UnsupportedError: the arm's scheme can't be stored, or not be attended to packed as the arm asks.
        """
        reads = cast(Reads, arm.reads)
        return QuantizedCache(
            self._model.config, arm.scheme, reads=reads, attention=arm.attention, reserve=reserve
        )  # fmt: skip

    def forward(self, ids: Sequence[int], cache: QuantizedCache, *, keep: int) -> Tensor:
        """`forward_rows` for one sequence; returns float logits [keep, V]."""
        return self.forward_rows([ids], cache, keep=keep)[0]

    def forward_rows(self, rows: Sequence[Sequence[int]], cache: QuantizedCache, *, keep: int) -> Tensor:
        """Feed tokens after what `cache` holds; returns float logits [B, keep, V] of the last `keep` positions.

        Args:
            rows: As many tokens for each of the B sequences.
            cache: Where they are stored, and what they attend to.
            keep: How many positions get logits.

        Raises:
            MeasurementError: if the model did not store exactly these tokens in `cache` (it ran on another one), or
                stored NaN or infinity.
        """
        before, fed = cache.get_seq_length(), len(rows[0])
        device = self.loaded.device
        # Positions rather than a count: the head then gets contiguous rows, and runs as one fast product.
        kept = torch.arange(fed - keep, fed, device=device)
        input_ids = torch.tensor([list(row) for row in rows], device=device)
        out = self._model(input_ids=input_ids, use_cache=True, logits_to_keep=kept, **{self.cache_argument: cache})
        cache.check_finite()
        lengths = {layer.get_seq_length() for layer in cache.packed_layers}
        if lengths != {before + fed}:
            raise MeasurementError(
                f"fed {fed} tokens after {before}, but the cache's layers hold {sorted(lengths)}: "
                "the model ran on a cache that is not ours.",
                remedy="This transformers version passes caches in a way kveval does not know; see `kveval doctor`.",
            )
        return cast(Tensor, out.logits)

    def _prefill(self, rows: Sequence[Sequence[int]], cache: QuantizedCache, chunk: int) -> float:
        start = self._now()
        for at in range(0, len(rows[0]), chunk):
            self.forward_rows([row[at : at + chunk] for row in rows], cache, keep=1)
        return self._now() - start

    def _branch(
        self,
        asked: Sequence[Sample],
        cache: QuantizedCache,
        arm: Arm,
        baseline: Mapping[str, Reference],
        *,
        forks: int = 1,
    ) -> Iterator[Output]:
        """Feed the rest of every prompt and its answer, score, and put the cache back to where it was.

        Each of the cache's sequences has `forks` of the samples, side by side.
        """
        rests = [sample.prompt_ids[cache.get_seq_length() :] for sample in asked]
        prefill_s = 0.0
        with cache.branch():
            ahead = min(map(len, rests)) - 1
            if ahead >= SCORING_TAIL:
                prefill_s = self._prefill([rest[:ahead] for rest in rests], cache, arm.prefill_chunk)
                rests = [rest[ahead:] for rest in rests]
            if forks > 1:
                cache.fork_rows(forks)
            fed = [[*rest, *sample.answer_ids[:-1]] for rest, sample in zip(rests, asked, strict=True)]
            longest, first = max(map(len, fed)), min(map(len, rests)) - 1
            start, read_before = self._now(), cache.tokens_read()
            with recorded_paths() as paths:
                # What fills a shorter row stands behind its answer, where nothing of the row looks.
                filled = [[*row, *row[-1:] * (longest - len(row))] for row in fed]
                logits_BNV = self.forward_rows(filled, cache, keep=longest - first)
            answers = [
                log_probabilities(logits_NV[len(rest) - 1 - first :][: len(sample.answer_ids)])
                for logits_NV, rest, sample in zip(logits_BNV, rests, asked, strict=True)
            ]
            score_s = (self._now() - start) / len(asked)
            path = path_text(paths)
            if arm.sdpa == "math":
                path = path.replace(ATTENTION_PATH, f"{ATTENTION_PATH} (math)")
            effective = self._effective(cache, path, read_before, fed=longest, batch=len(asked))
        for sample, log_probs in zip(asked, answers, strict=True):
            answer, known = torch.tensor(sample.answer_ids, device=log_probs.device), baseline.get(sample.id)
            if known is not None:
                key = known.key_tokens
            else:
                key = self._key_tokens(sample, arm, log_probs, answer) if sample.short_prompt_ids else None
            score = score_answer(log_probs, answer, known.log_probs if known else None, only=key)
            yield Output(
                sample.id, score, effective, prefill_s / len(asked), score_s, None, Reference(log_probs, key)
            )  # fmt: skip

    def _key_tokens(self, sample: Sample, arm: Arm, log_probs: Tensor, answer: Tensor) -> Tensor:
        """Positions of the answer that are predicted from the full prompt, and not from the short one."""
        *before, last = sample.short_prompt_ids
        cache = self.new_cache(arm, reserve=len(before) + len(answer))
        self._prefill([before], cache, arm.prefill_chunk)
        logits = self.forward([last, *sample.answer_ids[:-1]], cache, keep=len(answer))
        return key_tokens(log_probabilities(logits), log_probs, answer)

    def _write(self, sample: Sample, cache: QuantizedCache, arm: Arm) -> Generated:
        """Greedy decoding behind the sample's prompt; the cache is put back to where it was."""
        assert sample.max_new_tokens is not None, "only samples with a budget are written"
        *rest, last = sample.prompt_ids[cache.get_seq_length() :]
        with cache.branch():
            self._prefill([rest], cache, arm.prefill_chunk)

            def step(token: int) -> Tensor:
                read_before = cache.tokens_read()
                logits = self.forward([token], cache, keep=1)[0]
                check_reads(cache, read_before, fed=1)
                return logits

            return write_answer(
                step(last), step, self.loaded.tokenizer, prompt_ids=sample.prompt_ids,
                max_new_tokens=sample.max_new_tokens, stop=sample.stop,
                end_ids=end_tokens(self._model, self.loaded.tokenizer),
            )  # fmt: skip

    def _effective(
        self, cache: QuantizedCache, path: str, read_before: list[int], *, fed: int, batch: int
    ) -> Effective:
        """What the scoring forward over the last `fed` tokens did; refused unless it read every layer's bytes."""
        packed_reads = check_reads(cache, read_before, fed=fed)
        stored, billed = cache.stored_bytes(), cache.billed_bytes()
        if stored.stored != billed:
            raise MeasurementError(f"the live cache holds {stored.stored} bytes, but {billed} are billed.")
        return Effective(
            attention_path=path,
            compute_dtype=str(self._model.dtype).removeprefix("torch."),
            cache_tokens=cache.get_seq_length(),
            packed_reads=packed_reads,
            stored=stored.per_sequence(batch),
            billed=billed // batch,
            batch=batch,
        )

    def _time_decode(self, sample: Sample, cache: QuantizedCache, tokens: int) -> float:
        """Median seconds of `tokens` one-token forwards after an untimed one, with the sample's prompt cached."""
        seconds = []
        with cache.branch():
            self._prefill([sample.prompt_ids[cache.get_seq_length() :]], cache, SCORING_TAIL)
            for _ in range(tokens + 1):
                start = self._now()
                self.forward(sample.answer_ids[:1], cache, keep=1)
                seconds.append(self._now() - start)
        return statistics.median(seconds[1:])

    def _now(self) -> float:
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.device)
        return time.perf_counter()


def check_reads(cache: QuantizedCache, read_before: list[int], *, fed: int) -> int:
    """Packed keys and values that the forward over the last `fed` tokens read, of all layers.

    Raises:
        MeasurementError: a layer read fewer than it holds for attention.
    """
    reads = [after - before for after, before in zip(cache.tokens_read(), read_before, strict=True)]
    owed = cache.tokens_owed(fed)
    if not any(owed) or any(read < due for read, due in zip(reads, owed, strict=True)):
        raise MeasurementError(
            f"the scoring forward read {sum(reads)} of the {sum(owed)} packed keys and values that it attends to; "
            "its result would be void."
        )
    return sum(reads)


def _longest(sample: Sample, decode_tokens: int) -> int:
    """Most tokens that a cache holds while a sample is scored, written and decoding is timed on it."""
    return len(sample.prompt_ids) + max(len(sample.answer_ids), sample.max_new_tokens or 0, decode_tokens + 1)
