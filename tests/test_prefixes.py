"""Where a cluster's prompts share a prefill."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kveval.prefixes import SharedPrefill, plan_prefill
from kveval.prompting import shared_prefix

# Few token values, so that prompts share prefixes often.
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6)


@given(PROMPTS)
def test_every_branch_is_a_shared_prefix_and_leaves_a_token_to_score(prompts: list[list[int]]) -> None:
    plan = plan_prefill(prompts)
    longest = max(prompts, key=len)
    assert list(plan.stem) == longest[: len(plan.stem)]
    assert len(plan.branches) == len(prompts)
    assert len(plan.stem) == max(plan.branches)
    for prompt, branch in zip(prompts, plan.branches, strict=True):
        assert 0 <= branch <= len(prompt) - 1
        assert tuple(prompt[:branch]) == plan.stem[:branch]
    assert plan.stops == tuple(sorted(set(plan.branches)))


@given(PROMPTS)
def test_a_branch_goes_as_far_as_another_prompt_agrees(prompts: list[list[int]]) -> None:
    plan, longest = plan_prefill(prompts), max(prompts, key=len)
    for i, prompt in enumerate(prompts):
        others = [other for j, other in enumerate(prompts) if j != i]
        agree = max((shared_prefix(prompt, other) for other in others), default=len(prompt))
        assert plan.branches[i] == min(agree, shared_prefix(prompt, longest), len(prompt) - 1)


@given(PROMPTS, st.randoms(use_true_random=False))
def test_the_order_of_prompts_does_not_matter_with_one_longest(
    prompts: list[list[int]], shuffler: random.Random
) -> None:
    prompts = [*prompts, [*max(prompts, key=len), 1]]
    order = list(range(len(prompts)))
    shuffler.shuffle(order)
    plan, shuffled = plan_prefill(prompts), plan_prefill([prompts[i] for i in order])
    assert shuffled.stem == plan.stem
    assert shuffled.branches == tuple(plan.branches[i] for i in order)


def test_a_haystack_is_the_stem_of_its_questions() -> None:
    hay = list(range(100, 120))
    plan = plan_prefill([[*hay, 1, 2], [*hay, 3], [*hay, 4, 5, 6]])
    assert plan == SharedPrefill(tuple(hay), (20, 20, 20))
    assert plan.stops == (20,)


def test_nested_documents_stop_at_each_length() -> None:
    document = list(range(40))
    plan = plan_prefill([document[:10], document[:25], document])
    assert plan.stem == tuple(document[:25])
    assert plan.branches == (9, 24, 25)
    assert plan.stops == (9, 24, 25)


@pytest.mark.parametrize(
    ("prompts", "stem", "branches"),
    [
        ([[7]], (), (0,)),
        ([[1, 2, 3]], (1, 2), (2,)),
        ([[1, 2, 3], [1, 2, 3]], (1, 2), (2, 2)),
        ([[1, 2], [3, 4]], (), (0, 0)),
        ([[1, 2, 3, 4], [1, 9, 9], [1, 9, 8]], (1,), (1, 1, 1)),
    ],
)
def test_small_clusters(prompts: list[list[int]], stem: tuple[int, ...], branches: tuple[int, ...]) -> None:
    assert plan_prefill(prompts) == SharedPrefill(stem, branches)
