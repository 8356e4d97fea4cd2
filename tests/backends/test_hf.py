"""The transformers backend: what it feeds, in which order, and what it refuses to call a result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_tools import DIFFERENT, HEAD_DIM, scheme
from tiny_models import ALL_BUILDERS, WINDOW, RoundingCache, loaded, logits_of, tiny_gemma3, tiny_llama, tokens
from torch import Tensor

from kveval.backends import hf
from kveval.backends.base import Output
from kveval.backends.hf import SCORING_TAIL, HFBackend
from kveval.cache import QuantizedCache
from kveval.config import ModelConfig
from kveval.errors import MeasurementError, UnsupportedError
from kveval.formats.layout import layer_formats
from kveval.geometry import geometry_from_config
from kveval.models import load
from kveval.packed_layer import TILE, PackedLayer
from kveval.plan import Arm
from kveval.prefixes import plan_prefill
from kveval.storage import CROP_RESERVE, PackedStore
from kveval.tasks import Sample

LATER = [name for name in DIFFERENT if not scheme(name).blind_to_later]
INVARIANT = [name for name in DIFFERENT if scheme(name).append_invariant]
HAY = tuple(tokens(24, seed=1)[0].tolist())


@pytest.fixture(scope="module")
def backend() -> HFBackend:
    return HFBackend(loaded(tiny_llama(head_dim=HEAD_DIM)))


def arm(name: str = "bf16", *, chunk: int = 10, reads: str = "stored") -> Arm:
    return Arm(name, "baseline" if name == "bf16" else "scheme", scheme(name), chunk, reads)


def sample(prompt: Sequence[int], answer: Sequence[int], *, id: str = "s") -> Sample:
    return Sample(id, 0, tuple(prompt), tuple(answer), len(prompt) + len(answer), None, "cluster")


def haystack() -> list[Sample]:
    """Three questions of different lengths on one haystack."""
    return [
        sample([*HAY, 5, 6, 7], [8, 9], id="a"),
        sample([*HAY, 50], [51, 52, 53], id="b"),
        sample([*HAY, 60, 61], [62], id="c"),
    ]


def document() -> list[Sample]:
    """One document at three lengths, not in ascending order."""
    text = tokens(60, seed=2)[0].tolist()
    return [sample(text[:n], text[n : n + 4], id=str(n)) for n in (31, 12, 50)]


def score(backend: HFBackend, cluster: Sequence[Sample], arm: Arm, **kwargs: Any) -> list[Output]:
    """Outputs in the cluster's order."""
    outputs = {o.sample_id: o for o in backend.score([cluster], arm, kwargs.pop("baseline", {}), **kwargs)}
    assert len(outputs) == len(cluster)
    return [outputs[s.id] for s in cluster]


class Recorder:
    """Notes (tokens cached before, tokens fed) of every row of every forward, and the forwards' numbers of rows."""

    def __init__(self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, list[int]]] = []
        self.caches: list[QuantizedCache] = []
        self.rows: list[int] = []
        forward = backend.forward_rows

        def recorded(rows: Sequence[Sequence[int]], cache: QuantizedCache, *, keep: int) -> Tensor:
            self.calls += [(cache.get_seq_length(), list(row)) for row in rows]
            self.rows.append(len(rows))
            if cache not in self.caches:
                self.caches.append(cache)
            return forward(rows, cache, keep=keep)

        monkeypatch.setattr(backend, "forward_rows", recorded)


@pytest.fixture
def recorder(backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    return Recorder(backend, monkeypatch)


class TestScores:
    @pytest.mark.parametrize("family", ALL_BUILDERS)
    @pytest.mark.parametrize("cluster", [haystack(), document()], ids=["haystack", "document"])
    def test_token_nll_equals_one_plain_forward(self, family: str, cluster: list[Sample]) -> None:
        backend, plain = HFBackend(loaded(ALL_BUILDERS[family]())), ALL_BUILDERS[family]()
        plain.set_attn_implementation("eager")
        for got, s in zip(score(backend, cluster, arm()), cluster, strict=True):
            ids = torch.tensor([[*s.prompt_ids, *s.answer_ids]])
            # Keys and values rounded to bfloat16, as in our cache, so that only the order of sums differs.
            log_probs = logits_of(plain, ids, RoundingCache(config=plain.config))[0].log_softmax(-1)
            start = len(s.prompt_ids)
            right = [-float(log_probs[start - 1 + i, t]) for i, t in enumerate(s.answer_ids)]
            assert got.sample_id == s.id
            assert got.score.token_nll == pytest.approx(right, abs=1e-3)
            assert got.score.answer_nll == pytest.approx(sum(right) / len(right), abs=1e-3)

    @pytest.mark.parametrize("name", INVARIANT)
    def test_exact_match_is_what_greedy_decoding_would_write(self, backend: HFBackend, name: str) -> None:
        prompt = [*HAY, 5, 6]
        cache = backend.new_cache(arm(name))
        logits = logits_of(backend.loaded.model, torch.tensor([prompt]), cache)[0, -1]
        written = []
        for _ in range(6):
            written.append(int(logits.argmax()))
            logits = logits_of(backend.loaded.model, torch.tensor([[written[-1]]]), cache)[0, -1]
        for wrong in (None, 0, 3, 5):
            answer = list(written)
            if wrong is not None:
                answer[wrong] = (answer[wrong] + 1) % 97
            (got,) = score(backend, [sample(prompt, answer)], arm(name))
            assert got.score.exact_match == (wrong is None)
            assert got.score.first_token_match == (wrong != 0)

    @pytest.mark.parametrize("name", DIFFERENT)
    @pytest.mark.parametrize("cluster", [haystack(), document()], ids=["haystack", "document"])
    def test_every_branch_is_forgotten_without_a_trace(
        self, backend: HFBackend, name: str, cluster: list[Sample]
    ) -> None:
        """The same samples in any order get the same floats to the last bit."""
        plain = {o.sample_id: o for o in score(backend, cluster, arm(name))}
        assert list(plain) == [s.id for s in cluster]
        backwards = score(backend, cluster[::-1], arm(name))
        assert [o.sample_id for o in backwards] == [s.id for s in cluster[::-1]]
        for other in backwards:
            assert other.score == plain[other.sample_id].score
            assert torch.equal(other.reference.log_probs, plain[other.sample_id].reference.log_probs)

    @pytest.mark.parametrize("name", INVARIANT)
    def test_sharing_a_prefill_changes_nothing(self, backend: HFBackend, name: str) -> None:
        shared = score(backend, haystack(), arm(name))
        for got, s in zip(shared, haystack(), strict=True):
            (alone,) = score(backend, [s], arm(name))
            assert got.score.token_nll == pytest.approx(alone.score.token_nll, abs=1e-3)

    def test_kl_and_flips_against_the_baseline(self, backend: HFBackend) -> None:
        base = {o.sample_id: o.reference for o in score(backend, haystack(), arm())}
        figures = {}
        for label, run in {
            "itself": arm(),
            "rechunked": arm(chunk=3),
            "int8": arm("int8_per_token_head"),
            "crush": arm("crush"),
        }.items():
            outputs = score(backend, haystack(), run, baseline=base)
            figures[label] = sum(o.score.kl or 0.0 for o in outputs)
        assert figures["itself"] == 0.0
        assert abs(figures["rechunked"]) < 1e-4
        assert 1e-6 < figures["int8"] < figures["crush"] / 10
        (lone,) = score(backend, haystack()[:1], arm())
        assert (lone.score.kl, lone.score.top1_flips) == (None, None)

    def test_bfloat16_models_score_in_float32(self) -> None:
        backend = HFBackend(loaded(tiny_llama(torch.bfloat16)))
        for output in score(backend, haystack(), arm("nvfp4")):
            assert output.reference.log_probs.dtype == torch.float32
            assert output.effective.compute_dtype == "bfloat16"

    def test_a_model_from_disk(self, tiny_model: Path) -> None:
        backend = HFBackend(load(ModelConfig(id=str(tiny_model)), device="cpu"))
        outputs = score(backend, haystack(), arm("k8v4"))
        assert [o.sample_id for o in outputs] == ["a", "b", "c"]
        assert all(o.effective.compute_dtype == "float32" for o in outputs)


class TestWhatIsFed:
    def test_a_haystack_is_prefilled_once_in_chunks(self, backend: HFBackend, recorder: Recorder) -> None:
        score(backend, haystack(), arm(chunk=10))
        assert recorder.calls == [
            (0, list(HAY[:10])),
            (10, list(HAY[10:20])),
            (20, list(HAY[20:])),
            # One forward of three rows, the shorter ones filled up behind their answers.
            (24, [5, 6, 7, 8]),
            (24, [50, 51, 52, 52]),
            (24, [60, 61, 61, 61]),
        ]
        assert recorder.rows == [1, 1, 1, 3]
        assert len(recorder.caches) == 1
        assert recorder.caches[0].get_seq_length() == 24

    @pytest.mark.parametrize(("name", "reads"), [*((name, "stored") for name in LATER), ("int4_g32", "fresh_chunk")])
    def test_questions_are_asked_one_by_one_where_others_tokens_matter(
        self, backend: HFBackend, recorder: Recorder, name: str, reads: str
    ) -> None:
        score(backend, haystack(), arm(name, chunk=100, reads=reads))
        assert recorder.calls == [(0, list(HAY)), (24, [5, 6, 7, 8]), (24, [50, 51, 52]), (24, [60, 61])]

    def test_a_document_is_prefilled_from_stop_to_stop(self, backend: HFBackend, recorder: Recorder) -> None:
        text, cluster = tokens(60, seed=2)[0].tolist(), document()
        score(backend, cluster, arm(LATER[0], chunk=100))
        assert recorder.calls == [
            (0, text[:11]),
            (11, text[11:15]),
            (11, text[11:30]),
            (30, text[30:34]),
            (30, text[30:31]),
            (31, text[31:53]),
        ]

    def test_a_long_rest_is_prefilled_too(self, backend: HFBackend, recorder: Recorder) -> None:
        long = tokens(SCORING_TAIL + 30, seed=3)[0].tolist()
        score(backend, [sample([1, *long], [2, 3], id="a"), sample([1, 4], [5], id="b")], arm(chunk=200))
        assert [(before, len(ids)) for before, ids in recorder.calls] == [(0, 1), (1, 200), (201, 85), (286, 2), (1, 1)]

    def test_lone_and_tiny_prompts(self, backend: HFBackend, recorder: Recorder) -> None:
        score(backend, [sample([7], [8, 9])], arm())
        score(backend, [sample([7, 6, 5], [8])], arm())
        assert recorder.calls == [(0, [7, 8]), (0, [7, 6]), (2, [5])]

    def test_decoding_is_timed_once_with_the_prompt_that_shares_most(
        self, backend: HFBackend, recorder: Recorder
    ) -> None:
        twins = [sample([*HAY, 1, 2, 3, last], [4], id=str(last)) for last in (5, 6)]
        for cluster in (haystack(), document(), document()[::-1], [*twins, haystack()[1]]):
            recorder.calls.clear()
            outputs = score(backend, cluster, arm("nvfp4"), decode_tokens=3)
            (timed_id,) = [o.sample_id for o in outputs if o.decode_s_per_token is not None]
            (last,) = [s for s in cluster if s.id == timed_id]
            branches = plan_prefill([s.prompt_ids for s in cluster]).branches
            assert branches[cluster.index(last)] == max(branches)
            timed = recorder.calls[-4:]
            length = len(last.prompt_ids)
            assert [before for before, _ in timed] == [length, length + 1, length + 2, length + 3]
            assert all(ids == [last.answer_ids[0]] for _, ids in timed)
            assert held_before(recorder.calls, -4) == list(last.prompt_ids)
        assert all(o.decode_s_per_token is None for o in score(backend, haystack(), arm()))


def held_before(calls: list[tuple[int, list[int]]], index: int) -> list[int]:
    """The tokens in the cache before call `index`, replayed from all calls (a crop shows as a lower start)."""
    held: list[int] = []
    for before, ids in calls[:index]:
        held = [*held[:before], *ids]
    return held[: calls[index][0]]


def fed_with(cluster: Sequence[Sample], own: Sample, name: str) -> int:
    """Tokens of a sample's row: its own, or those of the longest that is scored together with it."""
    together = cluster if scheme(name).blind_to_later else [own]
    return max(s.context_length for s in together) - 1


class TestEffective:
    @pytest.mark.parametrize("name", DIFFERENT)
    def test_bytes_reads_and_path(self, backend: HFBackend, name: str) -> None:
        for output, s in zip(score(backend, haystack(), arm(name)), haystack(), strict=True):
            ran, fed = output.effective, fed_with(haystack(), s, name)
            assert ran.cache_tokens == fed
            # Two layers, keys and values, every token once in the scoring forward.
            assert ran.packed_reads == 2 * 2 * fed
            shapes = geometry_from_config(backend.loaded.model.config.to_dict())
            formats = layer_formats(scheme(name), shapes)
            billed = sum(fmt.nbytes(fed, shape) for fmt, shape in zip(formats, shapes, strict=True) if fmt)
            assert ran.billed == ran.stored.stored == billed
            assert ran.attention_path == "dequantize + torch sdpa"
            assert ran.compute_dtype == "float32"
            assert output.prefill_s > 0
            assert output.score_s > 0

    def test_fresh_chunks_read_what_was_stored_before(self, backend: HFBackend) -> None:
        stored = score(backend, haystack(), arm("crush"))
        fresh = score(backend, haystack(), arm("crush", reads="fresh_chunk"))
        for a, b in zip(stored, fresh, strict=True):
            assert b.effective.packed_reads == 2 * 2 * len(HAY)
            assert a.score != b.score

    def test_sliding_layers_are_reported_wide(self) -> None:
        backend = HFBackend(loaded(tiny_gemma3()))
        for output, s in zip(score(backend, haystack(), arm("nvfp4")), haystack(), strict=True):
            fed = fed_with(haystack(), s, "nvfp4")
            assert output.effective.stored.wide_layers == 2 * fed * 2 * (2 * 16) * 2
            assert output.effective.packed_reads == 3 * 2 * fed

    @pytest.mark.parametrize("name", ["bf16", "nvfp4", "sliding", "sliding_kivi"])
    def test_windows_are_freed_and_branches_still_leave_no_trace(self, name: str) -> None:
        """Sliding layers free tiles within a branch as well as before it."""
        backend = HFBackend(loaded(tiny_gemma3()))
        text = tokens(720, seed=4)[0].tolist()
        cluster = [sample(text[:n], text[n : n + 4], id=str(n)) for n in (700, 150, 420)]
        first, again = (score(backend, order, arm(name, chunk=50)) for order in (cluster, cluster[::-1]))
        for output, other, s in zip(first, again[::-1], cluster, strict=True):
            assert output.score == other.score
            ran, fed = output.effective, s.context_length - 1
            kept = fed - max(0, fed - (WINDOW - 1) - CROP_RESERVE) // TILE * TILE
            assert ran.cache_tokens == fed
            assert ran.packed_reads >= 2 * (fed + 2 * kept)
            shapes = geometry_from_config(backend.loaded.model.config.to_dict())
            formats = layer_formats(scheme(name), shapes)
            dropped = [0 if shape.window is None else fed - kept for shape in shapes]
            billed = [f.nbytes(fed, g, dropped=d) for f, g, d in zip(formats, shapes, dropped, strict=True) if f]
            assert ran.billed == ran.stored.stored == sum(billed)


class TestPackedAttention:
    @pytest.mark.parametrize("name", ["bf16", "nvfp4", "int4_g32", "sinks_residual"])
    def test_scores_and_reads_are_those_of_decoding_first(self, backend: HFBackend, name: str) -> None:
        for cluster in (haystack(), document()):
            runs = [
                score(backend, cluster, replace(arm(name), attention=mode), decode_tokens=2)
                for mode in ("packed", "dequant")
            ]
            for got, expected in zip(*runs, strict=True):
                assert got.score.token_nll == pytest.approx(expected.score.token_nll, abs=2e-3)
                together = scheme(name).blind_to_later
                assert got.effective.attention_path == ("packed prefill" if together else "packed reference")
                assert got.effective.packed_reads == expected.effective.packed_reads
                assert got.effective.stored == expected.effective.stored

    def test_a_long_rest_is_prefilled_in_blocks(self, backend: HFBackend) -> None:
        long = [sample([*HAY, *tokens(90, seed=3)[0].tolist()], [2, 3], id="long"), *haystack()]
        runs = [score(backend, long, replace(arm(chunk=80), attention=mode)) for mode in ("packed", "dequant")]
        assert runs[0][0].score.token_nll == pytest.approx(runs[1][0].score.token_nll, abs=1e-3)
        assert runs[0][0].effective.attention_path == "packed prefill"
        assert runs[0][0].effective.packed_reads == runs[1][0].effective.packed_reads

    def test_a_layer_that_skips_its_bytes_is_void_here_too(
        self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        segments = PackedStore.segments
        monkeypatch.setattr(PackedStore, "segments", lambda store, snapshot: segments(store, snapshot))
        score(backend, haystack()[:1], replace(arm("nvfp4"), attention="packed"))

        def uncounted(store: PackedStore, snapshot: Any) -> Any:
            before = store.tokens_read
            found = segments(store, snapshot)
            store.tokens_read = before
            return found

        monkeypatch.setattr(PackedStore, "segments", uncounted)
        with pytest.raises(MeasurementError, match="would be void"):
            score(backend, haystack()[:1], replace(arm("nvfp4"), attention="packed"))

    @pytest.mark.parametrize("mode", ["packed", "dequant"])
    def test_shared_tokens_that_are_not_read_are_void_too(
        self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch, mode: Any
    ) -> None:
        read_rows = PackedStore.read_rows

        def uncounted(store: PackedStore, snapshot: Any, start: int, *others: Any) -> Tensor:
            before = store.tokens_read
            found = read_rows(store, snapshot, start, *others)
            store.tokens_read = before if start == 0 else store.tokens_read
            return found

        monkeypatch.setattr(PackedStore, "read_rows", uncounted)
        with pytest.raises(MeasurementError, match="would be void"):
            score(backend, haystack(), replace(arm("nvfp4"), attention=mode))

    def test_a_format_without_a_kernel_is_refused_by_layer(self, backend: HFBackend) -> None:
        with pytest.raises(UnsupportedError, match="layer 0 can't be attended to as packed bytes"):
            score(backend, haystack(), replace(arm("kivi4"), attention="packed"))

    def test_nan_is_an_error_of_the_forward_that_made_it(self) -> None:
        model = tiny_llama(head_dim=HEAD_DIM)
        model.model.layers[1].self_attn.v_proj.weight[3, 3] = float("nan")
        backend = HFBackend(loaded(model))
        cache = backend.new_cache(replace(arm("fp8_per_token_head"), attention="packed"))
        with pytest.raises(MeasurementError, match="values of layer 1 got NaN or infinity"):
            backend.forward([1, 2, 3], cache, keep=1)


@pytest.mark.parametrize("name", ["nvfp4", "kivi4", "sinks_residual"])
@pytest.mark.parametrize("decode_tokens", [0, 9])
def test_memory_is_allocated_once_per_cluster(
    backend: HFBackend, monkeypatch: pytest.MonkeyPatch, name: str, decode_tokens: int
) -> None:
    caches, new_cache = [], backend.new_cache
    monkeypatch.setattr(backend, "new_cache", lambda *x, **y: caches.append(new_cache(*x, **y)) or caches[-1])
    long = sample([*HAY, *tokens(276, seed=3)[0].tolist()], [2, 3, 4], id="long")
    score(backend, [*haystack(), long], arm(name, chunk=40), decode_tokens=decode_tokens)
    (cache,) = caches
    for store in (s for layer in cache.packed_layers for s in layer.stores()):
        assert isinstance(store, PackedStore)
        encoded = store.role.encoded_tokens(300 + max(3, decode_tokens + 1))
        together = math.lcm(store.role.format.unit, 16)
        if store.snapshot().payload is not None:
            assert store.snapshot().payload.shape[2] == -(-encoded // together) * together


class TestRefusals:
    def test_a_forward_on_another_cache(self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        """A misnamed argument is swallowed by the model's **kwargs, and it makes a cache of its own."""
        monkeypatch.setattr(backend, "cache_argument", "swallowed")
        with pytest.raises(MeasurementError, match="ran on a cache that is not ours"):
            score(backend, haystack(), arm())

    def test_a_layer_whose_cache_is_written_but_never_read(
        self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        update = PackedLayer.update
        raw: list[tuple[Tensor, Tensor]] = []

        def leaky(layer: PackedLayer, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            handles = update(layer, keys, values, *args, **kwargs)
            if layer._index != 1:
                return handles
            raw.append((keys, values))
            return tuple(torch.cat(chunks, dim=2) for chunks in zip(*raw, strict=True))

        monkeypatch.setattr(PackedLayer, "update", leaky)
        with pytest.raises(MeasurementError, match=r"read 60 of the 120 packed keys and values .*would be void"):
            score(backend, [sample([*HAY, 1, 2, 3, 4], [5, 6, 7])], arm(chunk=14))

    def test_a_scoring_forward_that_reads_nothing_stored(self, backend: HFBackend) -> None:
        apart = [sample([1, 2], [3], id="a"), sample([4, 5], [6], id="b")]
        with pytest.raises(MeasurementError, match="would be void"):
            score(backend, apart, arm("int4_g64", reads="fresh_chunk"))
        assert len(score(backend, apart, arm("int4_g64"))) == 2

    def test_bytes_that_are_not_billed(self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(QuantizedCache, "billed_bytes", lambda self: 1)
        with pytest.raises(MeasurementError, match=r"holds \d+ bytes, but 1 are billed"):
            score(backend, haystack(), arm())

    def test_logits_that_are_not_float32(self) -> None:
        model = tiny_llama(torch.bfloat16)
        as_it_is = SimpleNamespace(model=model, tokenizer=None, info=None, device=torch.device("cpu"))
        with pytest.raises(MeasurementError, match=r"torch\.bfloat16, not float32"):
            score(HFBackend(as_it_is), haystack(), arm())

    def test_models_whose_forward_lacks_what_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hf, "use_packed_attention", lambda model: None)

        class AllLogits:
            def forward(self, input_ids: Any, cache: Any = None) -> None: ...

        class NoCache:
            def forward(self, input_ids: Any, logits_to_keep: int = 0) -> None: ...

        with pytest.raises(UnsupportedError, match="AllLogits can't restrict logits"):
            HFBackend(SimpleNamespace(model=AllLogits(), device=torch.device("cpu")))
        with pytest.raises(UnsupportedError, match="NoCache's forward takes no cache"):
            HFBackend(SimpleNamespace(model=NoCache(), device=torch.device("cpu")))


def test_the_aa_control_rounds_differently_and_says_so(backend: HFBackend) -> None:
    """With the same chunks, the plain attention alone moves the logits, and only by rounding."""
    fused = score(backend, haystack(), arm())
    plain = score(backend, haystack(), replace(arm(), sdpa="math"))
    assert {o.effective.attention_path for o in plain} == {"dequantize + torch sdpa (math)"}
    gaps = [
        (a.reference.log_probs - b.reference.log_probs).abs().max().item() for a, b in zip(fused, plain, strict=True)
    ]
    assert 0 < max(gaps) < 1e-4


class TestWriting:
    def ask(self, prompt: Sequence[int], answer: Sequence[int], budget: int) -> Sample:
        return replace(sample(prompt, answer), max_new_tokens=budget, references=("x",))

    def with_tokenizer(self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = SimpleNamespace(
            decode=lambda ids, **_: " ".join(map(str, ids)), eos_token_id=None, all_special_tokens=[]
        )
        monkeypatch.setattr(backend, "loaded", replace(backend.loaded, tokenizer=tokenizer))

    @pytest.mark.parametrize("name", INVARIANT)
    def test_what_is_written_is_greedy_and_leaves_no_trace(
        self, backend: HFBackend, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Feeding what was written as the answer must match it to the token."""
        self.with_tokenizer(backend, monkeypatch)
        asked = self.ask([*HAY, 5, 6], [7], 6)
        (plain,) = score(backend, [sample([*HAY, 5, 6], [7])], arm(name))
        (got,) = score(backend, [asked], arm(name))
        assert got.score == plain.score
        assert plain.generated is None
        assert got.generated is not None
        assert (len(got.generated.token_ids), got.generated.finish_reason) == (6, "length")
        (fed,) = score(backend, [sample([*HAY, 5, 6], got.generated.token_ids)], arm(name))
        assert fed.score.exact_match
        assert fed.score.accepted_tokens == 6
        (again,) = score(backend, [asked], arm(name))
        assert again.generated == got.generated

    def test_the_end_token_of_the_model_ends_it(self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_tokenizer(backend, monkeypatch)
        asked = self.ask([*HAY, 5, 6], [7], 6)
        (whole,) = score(backend, [asked], arm())
        third = whole.generated.token_ids[2]  # type: ignore[union-attr]
        monkeypatch.setattr(backend.loaded.model.generation_config, "eos_token_id", [third])
        (got,) = score(backend, [asked], arm())
        assert got.generated.finish_reason == "stop"  # type: ignore[union-attr]
        assert third not in got.generated.token_ids  # type: ignore[union-attr]

    def test_a_cache_that_is_not_read_is_refused(self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_tokenizer(backend, monkeypatch)
        monkeypatch.setattr(QuantizedCache, "tokens_read", lambda self: [0] * len(self.packed_layers))
        with pytest.raises(MeasurementError, match="would be void"):
            backend._write(self.ask([*HAY, 5], [7], 3), backend.new_cache(arm()), arm())


class TestKeyTokens:
    def test_only_tokens_that_need_the_far_context_count(self, backend: HFBackend) -> None:
        """Against the definition, on plain log-probabilities."""
        prompt, answer = [*HAY, 5, 6], tokens(40, seed=9)[0].tolist()
        asked = replace(sample(prompt, answer), short_prompt_ids=(6,))
        (got,) = score(backend, [asked], arm())
        (full,) = score(backend, [sample(prompt, answer)], arm())
        (short,) = score(backend, [sample([6], answer)], arm())
        key = [
            i
            for i, (a, b) in enumerate(zip(short.score.token_nll, full.score.token_nll, strict=True))
            if a - b > 2.0 and b < 2.0
        ]
        assert key == got.reference.key_tokens.tolist()  # type: ignore[union-attr]
        assert got.score.token_nll == pytest.approx([full.score.token_nll[i] for i in key])

    def test_they_are_frozen_by_the_baseline(self, backend: HFBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kveval.scoring.KEY_GAIN", -1.0)
        monkeypatch.setattr("kveval.scoring.KEY_LOSS", 4.5)
        prompt, answer = [*HAY, 5, 6], tokens(40, seed=9)[0].tolist()
        asked = replace(sample(prompt, answer), short_prompt_ids=(6,))
        (base,) = score(backend, [asked], arm())
        key = base.reference.key_tokens
        assert key is not None
        assert 0 < len(key) < 40
        (crushed,) = score(backend, [asked], arm("crush"), baseline={"s": base.reference})
        assert crushed.reference.key_tokens is key
        assert len(crushed.score.token_nll) == len(key)
        assert crushed.score.kl > 0  # type: ignore[operator]

    def test_an_answer_without_key_tokens_has_no_score(self, backend: HFBackend) -> None:
        asked = replace(sample([*HAY, 5, 6], [8, 9]), short_prompt_ids=(*HAY, 5, 6))
        (got,) = score(backend, [asked], arm())
        assert (got.score.token_nll, got.score.answer_nll, got.score.kl) == ((), None, None)


class TestBatches:
    def hay(self, seed: int, *, length: int = 24) -> list[Sample]:
        """A haystack of its own with two questions; questions and answers differ in length from seed to seed."""
        text = tokens(length, seed=seed)[0].tolist()
        return [
            sample([*text, *range(5, 6 + seed)], range(20, 22 + seed), id=f"{seed}a"),
            sample([*text, 50], [51, 52, 53], id=f"{seed}b"),
        ]

    @pytest.mark.parametrize("name", [name for name in DIFFERENT if scheme(name).blind_to_later])
    def test_a_sequence_in_a_batch_scores_as_alone(self, backend: HFBackend, name: str) -> None:
        clusters = [self.hay(1), self.hay(2, length=23), self.hay(3, length=25)]
        alone = {o.sample_id: o for cluster in clusters for o in backend.score([cluster], arm(name), {})}
        together = list(backend.score(clusters, arm(name), {}))
        assert {o.sample_id for o in together} == set(alone)
        for got in together:
            assert got.score.token_nll == pytest.approx(alone[got.sample_id].score.token_nll, abs=1e-3)
            assert got.effective.batch == 3 * 2
            assert alone[got.sample_id].effective.batch == 2

    def test_bytes_are_those_of_one_sequence(self, backend: HFBackend) -> None:
        clusters = [self.hay(seed) for seed in (1, 2, 3)]
        for got in backend.score(clusters, arm("nvfp4"), {}):
            cache = backend.new_cache(arm("nvfp4"))
            backend.forward([5] * got.effective.cache_tokens, cache, keep=1)
            assert got.effective.stored.stored == got.effective.billed == cache.stored_bytes().stored

    def test_the_common_stem_is_prefilled_together(self, backend: HFBackend, recorder: Recorder) -> None:
        clusters = [self.hay(1), self.hay(2, length=23)]
        list(backend.score(clusters, arm(chunk=100), {}))
        first, second = (cluster[0].prompt_ids for cluster in clusters)
        assert recorder.calls[:2] == [(0, list(first[:23])), (0, list(second[:23]))]
        fed = [[*s.prompt_ids[23:], *s.answer_ids[:-1]] for cluster in clusters for s in cluster]
        longest = max(map(len, fed))
        assert recorder.calls[2:] == [(23, [*row, *row[-1:] * (longest - len(row))]) for row in fed]
        assert len(recorder.caches) == 1

    def test_long_tails_are_prefilled_first(self, backend: HFBackend, recorder: Recorder) -> None:
        text = tokens(2 * SCORING_TAIL, seed=4)[0].tolist()
        clusters = [[sample([7, *text[: SCORING_TAIL + n]], [8, 9], id=str(n))] for n in (5, 9)]
        clusters = [[*c, sample([7, 3], [8], id=f"{i}short")] for i, c in enumerate(clusters)]
        list(backend.score(clusters, arm(chunk=1000), {}))
        assert max(len(row) for _, row in recorder.calls if len(row) < SCORING_TAIL) < 10
