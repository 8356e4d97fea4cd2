"""Before a sweep measures anything: does the BF16 scheme through our cache behave as plain transformers does?"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kveval.attention import FLOAT32_PATH, path_text, recorded_paths
from kveval.errors import MeasurementError
from kveval.formats.spec import get_scheme
from kveval.plan import Arm

if TYPE_CHECKING:
    from kveval.backends.hf import HFBackend

__all__ = ["SelfTest", "check"]

PROMPT = "The quick brown fox jumps over the lazy dog. The capital of France is Paris. The opposite of hot is"
NEW_TOKENS = 8


@dataclass(frozen=True)
class SelfTest:
    """Greedy tokens of plain transformers and of the BF16 scheme, and how far their logits lie apart.

    `tolerance` is the largest logit difference that BF16 rounding of keys and values may cause here: a fixed part
    of the spread of the plain logits. `closest_call` is the smallest gap between the two best tokens on the way.
    `attention_path` is how the BF16 scheme was attended to: by kernels wherever a sweep would use them.
    """

    plain: tuple[int, ...]
    packed: tuple[int, ...]
    max_logit_difference: float
    tolerance: float
    closest_call: float
    attention_path: str


def check(backend: HFBackend) -> dict[str, Any]:
    """Decode a few tokens both ways and compare.

    Raises:
        MeasurementError: if a token differs where the gap between the best two tokens exceeds the difference of
            the logits, or if the logits differ by more than the tolerance.
    """
    ids = backend.loaded.tokenizer(PROMPT)["input_ids"]
    plain_tokens, plain = _greedy_plain(backend, ids)
    with recorded_paths() as paths:
        packed_tokens, packed = _greedy_packed(backend, ids, forced=plain_tokens)
    difference = float((plain - packed).abs().max())
    tolerance = 0.05 * float(plain.max() - plain.min())
    best_two = plain.topk(2, dim=-1).values
    gaps = best_two[:, 0] - best_two[:, 1]
    result = SelfTest(
        tuple(plain_tokens), tuple(packed_tokens), difference, tolerance, float(gaps.min()), path_text(paths)
    )
    wrong = [i for i, (a, b) in enumerate(zip(plain_tokens, packed_tokens, strict=True)) if a != b]
    if difference > tolerance or any(float(gaps[i]) > 2 * difference for i in wrong):
        raise MeasurementError(
            "the BF16 scheme through kveval's cache does not reproduce plain transformers: "
            f"logits differ by {difference:.3g} (tolerance {tolerance:.3g}), greedy tokens {packed_tokens} "
            f"instead of {plain_tokens}.",
            remedy="This model or transformers version does something kveval does not know; please report it.",
        )
    return asdict(result)


@torch.inference_mode()
def _greedy_plain(backend: HFBackend, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits [NEW_TOKENS, V] with transformers' own cache and attention."""
    model: Any = backend.loaded.model
    ours = model.config._attn_implementation
    model.set_attn_implementation(_reference_attention(backend, ids))
    try:
        input_ids = torch.tensor([ids], device=backend.loaded.device)
        out = model.generate(
            input_ids,
            # Given, or transformers would mask every token whose id is that of padding.
            attention_mask=torch.ones_like(input_ids),
            generation_config=_greedy_config(model),
            **{backend.cache_argument: DynamicCache(config=model.config)},
        )
    finally:
        model.set_attn_implementation(ours)
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits).float()


def _reference_attention(backend: HFBackend, ids: list[int]) -> str:
    """The implementation to compare with; transformers' own "sdpa" leaves out capped scores and attention sinks."""
    with recorded_paths() as paths:
        backend.forward(ids, backend.new_cache(replace(_bf16_arm(ids), attention="dequant")), keep=1)
    return "eager" if FLOAT32_PATH in paths.values() else "sdpa"


def _bf16_arm(ids: list[int]) -> Arm:
    return Arm("bf16", "baseline", get_scheme("bf16"), len(ids), "stored")


def _greedy_config(model: Any) -> Any:
    config = copy.deepcopy(model.generation_config)
    greedy = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    # No end token: the plain run must go on for as long as the forced one does.
    config.update(max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0, **greedy)
    config.update(return_dict_in_generate=True, output_logits=True)
    return config


@torch.inference_mode()
def _greedy_packed(backend: HFBackend, ids: list[int], *, forced: list[int]) -> tuple[list[int], torch.Tensor]:
    """Argmax and logits [NEW_TOKENS, V] of the BF16 scheme, fed with the tokens of the plain run one by one."""
    cache = backend.new_cache(_bf16_arm(ids))
    logits = [backend.forward(ids, cache, keep=1)]
    logits += [backend.forward([token], cache, keep=1) for token in forced[:-1]]
    stacked = torch.cat(logits).float()
    return stacked.argmax(-1).tolist(), stacked
