"""Which part of its prompts a cluster shares, so that it is prefilled once.

The result depends on the cluster alone, never on which samples are still missing: a resumed sweep feeds every
token in the same forwards as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kveval.prompting import shared_prefix

__all__ = ["SharedPrefill", "plan_prefill"]


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
