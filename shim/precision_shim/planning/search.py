"""Find precision settings with which a job fits in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from .command import Job
from .record import Plan
from .request import Request, Rules, Variant, make
from .text import GB, fold


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        gives_up: text on the loss of precision; empty if the job fits with its own settings.
        lines: the settings, as lines to paste.
        plan: the plan with the found settings; ``None`` if no legal settings make the job fit.
    """

    gives_up: str = ""
    lines: tuple[str, ...] = ()
    plan: Plan | None = None


def search(job: Job, request: Request, rules: Rules, memory: float) -> Found:
    """Try settings in the order of their loss of precision, until the job fits in memory.

    Args:
        job: the launch command.
        request: the job's models.
        rules: the package versions whose rules apply.
        memory: memory of a GPU, in bytes.
    """
    choices = [[Variant("", (), model), *model.variants(job, rules)] for model in request.models]
    ranks = product(*(range(len(choice)) for choice in choices))
    for numbers in sorted(ranks, key=lambda ranked: (max(ranked, default=0), sum(ranked))):
        chosen = [options[number] for options, number in zip(choices, numbers, strict=True)]
        changed = replace(request, models=tuple(variant.model for variant in chosen))
        plan = make(job, changed, rules)
        if not plan.problems and plan.peak() <= memory:
            lines = dict.fromkeys(line for variant in chosen for line in variant.lines)
            losses = dict.fromkeys(variant.gives_up for variant in chosen if variant.gives_up)
            return Found("; ".join(losses), tuple(lines), plan)
    return Found()


def render(searched: Found, memory: float, request: Request) -> str:
    """Return the result of a search as text.

    Args:
        searched: the result.
        memory: memory of a GPU, in bytes.
        request: the job's models.
    """
    gigabytes = memory / GB
    if searched.plan is None:
        return (
            f"search: no precision settings that are legal here fit {request.world_size} GPUs of "
            f"{gigabytes:g} GB"
        )
    if not searched.lines:
        return f"search: it fits {gigabytes:g} GB as it is"
    lines = [
        f"search: it fits {gigabytes:g} GB with these lines",
        *(f"    {line}" for line in searched.lines),
        *fold(f"which give up {searched.gives_up}"),
    ]
    return "\n".join(lines)
