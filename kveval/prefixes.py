"""Which part of its prompts a cluster shares, so that it is prefilled once.

The result depends on the cluster alone, never on which samples are still missing: a resumed sweep feeds every
token in the same forwards as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveval.prompting import shared_prefix

__all__ = ["SCORING_TAIL", "BatchPrefill", "Round", "SharedPrefill", "plan_batch", "plan_prefill"]

SCORING_TAIL = 256
"""Most prompt tokens that the scoring forward feeds before the answer; a longer rest of a prompt is prefilled."""

MOST_TOGETHER = 16
"""Most questions about a haystack that are scored in one forward: attention without kernels decodes as many copies."""


@dataclass(frozen=True)
class SharedPrefill:
    """How a cluster is prefilled.

    Attributes:
        stem: The tokens that are prefilled once; a prefix of the longest prompt.
        branches: For each prompt, how many tokens of the stem it starts with. At least one token of every prompt
            is left for the forward that scores it.
    """

    stem: tuple[int, ...]
    branches: tuple[int, ...]

    @property
    def stops(self) -> tuple[int, ...]:
        """Lengths at which the prefill of the stem pauses, ascending."""
        return tuple(sorted(set(self.branches)))


@dataclass(frozen=True)
class Round:
    """Questions that are scored in one forward.

    Attributes:
        start: How many tokens of its stem every prompt starts with.
        questions: Their places in every cluster.
    """

    start: int
    questions: tuple[int, ...]


@dataclass(frozen=True)
class BatchPrefill:
    """How the clusters of a batch are prefilled together, and scored.

    Attributes:
        stems: For each cluster, the tokens that are prefilled once; all of one length.
        rounds: In the order in which they leave the stem; every question is in one of them.
    """

    stems: tuple[tuple[int, ...], ...]
    rounds: tuple[Round, ...]


def plan_batch(clusters: Sequence[Sequence[Sequence[int]]], *, together: bool) -> BatchPrefill:
    """Where the prompts of clusters that run together leave their stems, and which are scored in one forward.

    A cluster alone is prefilled as `plan_prefill` says. Several are prefilled as far as all prompts of each agree, to
    the shortest of these lengths.

    Args:
        clusters: Prompts by cluster and question, as many questions in each.
        together: Score questions in one forward whose prompts go on for less than `SCORING_TAIL` tokens from where the
            first of them leaves the stem.
    """
    plans = [plan_prefill(prompts) for prompts in clusters]
    stems, branches = tuple(plan.stem for plan in plans), plans[0].branches
    if len(plans) > 1:
        shortest = min(min(plan.branches) for plan in plans)
        stems, branches = tuple(stem[:shortest] for stem in stems), (shortest,) * len(branches)
    longest = [max(len(prompts[i]) for prompts in clusters) for i in range(len(branches))]
    rounds: list[Round] = []
    for i in sorted(range(len(branches)), key=lambda i: branches[i]):
        joined = Round(rounds[-1].start, (*rounds[-1].questions, i)) if rounds and together else None
        if joined and _fit_one_forward(joined, longest):
            rounds[-1] = joined
        else:
            rounds.append(Round(branches[i], (i,)))
    return BatchPrefill(stems, tuple(rounds))


def _fit_one_forward(joined: Round, longest: Sequence[int]) -> bool:
    """Whether these questions, whose prompts have up to `longest` tokens, share some and go on shortly."""
    short = all(longest[i] - joined.start < SCORING_TAIL for i in joined.questions)
    return joined.start > 0 and short and len(joined.questions) <= MOST_TOGETHER


def plan_prefill(prompts: Sequence[Sequence[int]]) -> SharedPrefill:
    """Find the stem of a cluster's prompts and where each prompt leaves it.

    A prompt leaves the stem where it stops agreeing with every other prompt; a lone prompt is all stem.
    """
    longest = max(prompts, key=len)
    branches = []
    for i, prompt in enumerate(prompts):
        others = [p for j, p in enumerate(prompts) if j != i]
        shared = max((shared_prefix(prompt, p) for p in others), default=len(prompt))
        branches.append(min(shared, shared_prefix(prompt, longest), len(prompt) - 1))
    return SharedPrefill(tuple(longest[: max(branches)]), tuple(branches))
