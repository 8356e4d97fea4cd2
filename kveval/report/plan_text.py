"""What `kveval plan` prints: the grid, its size, and whether the declared gate can be decided."""

from __future__ import annotations

from collections.abc import Mapping

from kveval.plan import Plan
from kveval.power import advice

__all__ = ["plan_text"]


def plan_text(plan: Plan, clusters: Mapping[tuple[str, int], int]) -> str:
    """Text for a terminal.

    Args:
        plan: The resolved sweep.
        clusters: Haystacks or documents by (task label, context length).
    """
    config = plan.config
    lines = [
        f"{config.name}: {plan.model['id']}, {plan.model['compute_dtype']} on {plan.model['device']}, "
        f"{len(plan.arms)} arms ({', '.join(a.label for a in plan.arms)})",
        "",
        f"{'task':<24}{'tokens':>8}{'samples':>9}{'clusters':>10}  answers",
    ]
    total = 0
    for task in config.tasks:
        for length in config.lengths_of(task):
            samples = config.samples_of(task)
            total += samples * len(plan.arms)
            budget = plan.tasks[task.label].max_new_tokens
            answers = "fed" if budget is None else f"written, at most {budget} tokens"
            lines.append(f"{task.label:<24}{length:>8}{samples:>9}{clusters[task.label, length]:>10}  {answers}")
    lines += [
        "",
        f"{len(plan.cells)} cells, {total} records, reads {config.reads}, prefill {config.prefill_chunk}, "
        f"batch {config.batch_size}",
    ]
    if config.gate is None:
        lines += ["", "No gate is declared: the sweep reports, but decides nothing."]
    else:
        lines += ["", f"Gate on {config.gate.scheme}, declared before the run ({plan.gate_digest}):"]
        for end in config.gate.endpoints:
            n = config.samples_of(next(t for t in config.tasks if t.label == end.task))
            lines.append(
                f"  {advice(end, n, clusters[end.task, end.context_length], confidence=config.gate.confidence)}"
            )
    return "\n".join(lines) + "\n"
