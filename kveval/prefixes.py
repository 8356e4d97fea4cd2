"""Which part of its prompts a cluster shares, so that it is prefilled once.

The result depends on the cluster alone, never on which samples are still missing: a resumed sweep feeds every
token in the same forwards as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveval.prompting import shared_prefix

__all__ = ["BatchPrefill", "SharedPrefill", "plan_batch", "plan_prefill"]


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
class BatchPrefill:
    """How the clusters of a batch are prefilled together.

    Attributes:
        stems: For each cluster, the tokens that are prefilled once; all of one length.
        branches: For each question, how many tokens of the stem its prompt starts with, in every cluster.
    """

    stems: tuple[tuple[int, ...], ...]
    branches: tuple[int, ...]


def plan_batch(clusters: Sequence[Sequence[Sequence[int]]]) -> BatchPrefill:
    """Where the prompts of clusters that run together leave their stems.

    A cluster alone is prefilled as `plan_prefill` says. Several are prefilled as far as all prompts of each agree, to
    the shortest of these lengths.

    Args:
        clusters: Prompts by cluster and question, as many questions in each.
    """
    plans = [plan_prefill(prompts) for prompts in clusters]
    if len(plans) == 1:
        return BatchPrefill((plans[0].stem,), plans[0].branches)
    shortest = min(min(plan.branches) for plan in plans)
    return BatchPrefill(tuple(plan.stem[:shortest] for plan in plans), (shortest,) * len(clusters[0]))


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
