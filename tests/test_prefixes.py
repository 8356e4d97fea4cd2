"""Where a cluster's prompts share a prefill."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kveval.prefixes import MOST_TOGETHER, SCORING_TAIL, BatchPrefill, Round, SharedPrefill, plan_batch, plan_prefill
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


HAY = list(range(100, 120))


class TestRounds:
    @given(PROMPTS, st.booleans())
    def test_every_question_is_in_one_round_that_starts_where_it_agrees(
        self, prompts: list[list[int]], together: bool
    ) -> None:
        plan, alone = plan_batch([prompts], together=together), plan_prefill(prompts)
        assert plan.stems == (alone.stem,)
        assert sorted(i for r in plan.rounds for i in r.questions) == list(range(len(prompts)))
        assert [r.start for r in plan.rounds] == sorted(r.start for r in plan.rounds)
        for r in plan.rounds:
            assert r.start == min(alone.branches[i] for i in r.questions)
            assert all(tuple(prompts[i][: r.start]) == alone.stem[: r.start] for i in r.questions)

    def test_questions_about_a_haystack_are_scored_together(self) -> None:
        prompts = [[*HAY, 1, 2], [*HAY, 3], [*HAY, 4, 5, 6]]
        assert plan_batch([prompts], together=True) == BatchPrefill((tuple(HAY),), (Round(20, (0, 1, 2)),))
        rounds = (Round(20, (0,)), Round(20, (1,)), Round(20, (2,)))
        assert plan_batch([prompts], together=False) == BatchPrefill((tuple(HAY),), rounds)

    def test_a_long_rest_is_scored_alone(self) -> None:
        short, long = [*HAY, 1], [*HAY, *range(SCORING_TAIL)]
        rounds = plan_batch([[short, long, [*HAY, 3, 2]]], together=True).rounds
        assert rounds == (Round(20, (0,)), Round(20, (1,)), Round(20, (2,)))
        rounds = plan_batch([[short, long[:-1], [*HAY, 3, 2]]], together=True).rounds
        assert rounds == (Round(20, (0, 1, 2)),)

    def test_long_documents_stop_at_each_length(self) -> None:
        document = list(range(3 * SCORING_TAIL))
        prompts = [document[:n] for n in (10, 10 + SCORING_TAIL, 20 + SCORING_TAIL)]
        rounds = plan_batch([prompts], together=True).rounds
        assert rounds == (Round(9, (0,)), Round(9 + SCORING_TAIL, (1, 2)))

    def test_prompts_that_share_nothing_are_scored_alone(self) -> None:
        rounds = plan_batch([[[1, 2], [3, 4]]], together=True).rounds
        assert rounds == (Round(0, (0,)), Round(0, (1,)))

    def test_no_more_than_fit(self) -> None:
        prompts = [[*HAY, i] for i in range(MOST_TOGETHER + 1)]
        rounds = plan_batch([prompts], together=True).rounds
        assert [len(r.questions) for r in rounds] == [MOST_TOGETHER, 1]

    def test_clusters_share_the_shortest_stem(self) -> None:
        clusters = [[[*HAY, 1, 2], [*HAY, 3, 2]], [[*HAY[1:], 1, 2], [*HAY[1:], 3, 2]]]
        plan = plan_batch(clusters, together=True)
        assert plan == BatchPrefill((tuple(HAY[:19]), tuple(HAY[1:])), (Round(19, (0, 1)),))
