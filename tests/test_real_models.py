"""On real models, where they have been fetched (`kveval models fetch NAME`): our BF16 cache is transformers' cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kveval.attention import cache_argument, use_packed_attention
from kveval.cache import QuantizedCache
from kveval.config import ModelConfig
from kveval.model_cache import models_dir
from kveval.models import load

PROMPT = "def fibonacci(n):\n    # Return the n-th Fibonacci number.\n"
NEW_TOKENS = 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bf16_scheme_gives_the_same_greedy_tokens_as_plain_transformers(name, dtype):
    if not (models_dir() / name / "kveval-model.json").exists():
        pytest.skip(f"{name} is not here: kveval models fetch {name}")
    loaded = load(ModelConfig(id=name, dtype=dtype), device="cpu")
    inputs = loaded.tokenizer(PROMPT, return_tensors="pt")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    argument = cache_argument(loaded.model)
    loaded.model.set_attn_implementation("sdpa")
    plain = loaded.model.generate(**inputs, **options, **{argument: DynamicCache(config=loaded.model.config)})
    use_packed_attention(loaded.model)
    cache = QuantizedCache(loaded.model.config, "bf16")
    packed = loaded.model.generate(**inputs, **options, **{argument: cache})
    assert cache.get_seq_length() == packed.shape[1] - 1
    assert sum(cache.tokens_read()) > 0
    assert torch.equal(packed, plain)
