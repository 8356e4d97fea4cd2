"""A left-padded batch whose padding a cache was not told of is refused wherever padding would change the bytes."""

from __future__ import annotations

import pytest
import torch
from cache_tools import SCHEMES, scheme
from tiny_models import ALL_BUILDERS, generated, logits_of, packed, tokens

from kveval.cache import QuantizedCache
from kveval.errors import UnsupportedError

DEPEND = [
    n
    for n in SCHEMES
    if any(s.freezes or s.unit > 1 for s in (scheme(n).key, scheme(n).value)) or scheme(n).sink_tokens
]


def padded():
    ids, mask = tokens(20, seed=5, batch=2), torch.ones(2, 20, dtype=torch.long)
    ids[1, :7], mask[1, :7] = 0, 0
    return ids, mask


@pytest.mark.parametrize("family", [f for f in ALL_BUILDERS if "deepseek" not in f])
def test_every_family_refuses_unknown_and_wrong_padding(family: str) -> None:
    model = packed(ALL_BUILDERS[family]())
    ids, mask = padded()
    with pytest.raises(UnsupportedError, match="left padding, which would enter"):
        generated(model, ids, QuantizedCache(model.config, scheme("sliding_nvfp4")), attention_mask=mask)
    generated(model, ids, QuantizedCache(model.config, scheme("int4_g32")), attention_mask=mask)
    generated(model, ids, QuantizedCache(model.config, scheme("sliding_nvfp4"), padding_mask=mask), attention_mask=mask)
    wrong = QuantizedCache(model.config, scheme("sliding_nvfp4"), padding_mask=mask.flip(0))
    with pytest.raises(UnsupportedError, match=r"begin with \[0, 7\] tokens of padding, not \[7, 0\]"):
        generated(model, ids, wrong, attention_mask=mask)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_schemes_that_depend_on_padding_refuse_it(name: str) -> None:
    model = packed(ALL_BUILDERS["llama"](head_dim=32))
    ids, mask = padded()
    cache = QuantizedCache(model.config, scheme(name))
    if name in DEPEND or name == "mixed":
        with pytest.raises(UnsupportedError, match="left padding, which would enter"):
            logits_of(model, ids, cache, attention_mask=mask)
    else:
        logits_of(model, ids, cache, attention_mask=mask)
