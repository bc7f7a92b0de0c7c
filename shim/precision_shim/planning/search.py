"""The cheapest change of precision settings alone under which a job fits, and on how few GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .command import Job
from .record import Plan
from .request import Plannable, Request, Rules, Variant, make
from .text import folded

_MOST_DOUBLINGS = 20


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        gives_up: what is lost, in words; empty: the job fits as it is.
        lines: settings to paste.
        plan: the plan with them; ``None``: nothing fits on these GPUs.
        fewest: the smallest number of GPUs that was found with these settings, or with all that
            can be given up; ``None``: none.
    """

    gives_up: str
    lines: tuple[str, ...]
    plan: Plan | None
    fewest: int | None


def search(job: Job, request: Request, rules: Rules, memory: float) -> Found:
    """Search the settings that are legal here, the least lost first.

    Args:
        job: the launch line.
        request: its models.
        rules: the versions whose rules hold.
        memory: of a GPU, in bytes.
    """
    last: Request | None = None
    for variants in _candidates(job, request, rules):
        changed = replace(request, models=tuple(one.model for one in variants))
        plan = make(job, changed, rules)
        if plan.problems:
            continue
        last = changed
        if plan.peak() <= memory:
            gives_up = "; ".join(dict.fromkeys(one.gives_up for one in variants if one.gives_up))
            lines = tuple(dict.fromkeys(line for one in variants for line in one.lines))
            return Found(gives_up, lines, plan, fewest(job, changed, rules, memory))
    return Found("", (), None, fewest(job, last or request, rules, memory))


def _candidates(job: Job, request: Request, rules: Rules) -> Iterator[Sequence[Variant]]:
    """As it is, then what each model may give up, together by their sum of ranks."""
    choices = [[Variant("", (), one), *_ordered(one, job, rules)] for one in request.models]
    ranks = [range(len(one)) for one in choices]
    for numbers in sorted(product(*ranks), key=lambda one: (max(one, default=0), sum(one))):
        yield [one[number] for one, number in zip(choices, numbers, strict=True)]


def _ordered(model: Plannable, job: Job, rules: Rules) -> Sequence[Variant]:
    return model.variants(job, rules)


def fewest(job: Job, request: Request, rules: Rules, memory: float) -> int | None:
    """The smallest number of GPUs, with the same groups but data parallelism, that it fits on.

    Models that have GPUs of their own keep theirs.

    More ranks never cost more per GPU, so the number is halved and doubled until it does not fit.
    """

    def fits(world: int) -> bool:
        models = tuple(
            one.on(world) if one.place == request.models[0].place else one for one in request.models
        )
        plan = make(job, replace(request, models=models, world_size=world), rules)
        return not plan.problems and len(plan.models) == len(models) and plan.peak() <= memory

    world = request.world_size
    for _ in range(_MOST_DOUBLINGS):
        if fits(world):
            break
        world *= 2
    else:
        return None
    while world % 2 == 0 and fits(world // 2):
        world //= 2
    # Between the half and this one there may be multiples of the groups that fit.
    step = max(world // 16, 1)
    smaller = [one for one in range(world // 2 + 1, world) if one % step == 0 and fits(one)]
    return min(smaller, default=world)


def render(found: Found, memory: float, request: Request) -> str:
    """What was found, for people."""
    gigabytes = memory / (1 << 30)
    if found.plan is None:
        lines = [
            f"search: no precision settings that are legal here fit {request.world_size} GPUs of "
            f"{gigabytes:g} GB"
        ]
    elif not found.lines:
        lines = [f"search: it fits {gigabytes:g} GB as it is"]
    else:
        lines = [
            f"search: it fits {gigabytes:g} GB with these lines",
            *(f"    {line}" for line in found.lines),
            *folded(f"which give up {found.gives_up}"),
        ]
    if found.fewest is not None:
        lines.append(f"  the smallest number of GPUs found: {found.fewest}")
    return "\n".join(lines)
