"""Find precision settings with which a job fits in memory, and the smallest number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .command import Job
from .record import Plan
from .request import Request, Rules, Variant, make
from .text import fold

_MOST_DOUBLINGS = 20


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        gives_up: text on the loss of precision; empty if the job fits with its own settings.
        lines: the settings, as lines to paste.
        plan: the plan with the found settings; ``None`` if no legal settings make the job fit.
        fewest: the smallest number of GPUs on which the job fits with these settings (if ``plan``
            is ``None``, with the last legal settings); ``None`` if the search found no number.
    """

    gives_up: str
    lines: tuple[str, ...]
    plan: Plan | None
    fewest: int | None


def search(job: Job, request: Request, rules: Rules, memory: float) -> Found:
    """Try settings in the order of their loss of precision, until the job fits in memory.

    Args:
        job: the launch command.
        request: the job's models.
        rules: the package versions whose rules apply.
        memory: memory of a GPU, in bytes.
    """
    request = replace(request, ask=None)  # the check reads the written config, not a variant
    last: Request | None = None
    for variants in _candidates(job, request, rules):
        changed = replace(request, models=tuple(variant.model for variant in variants))
        plan = make(job, changed, rules)
        if plan.problems:
            continue
        last = changed
        if plan.peak() <= memory:
            gives_up = "; ".join(
                dict.fromkeys(variant.gives_up for variant in variants if variant.gives_up)
            )
            lines = tuple(dict.fromkeys(line for variant in variants for line in variant.lines))
            return Found(gives_up, lines, plan, fewest(job, changed, rules, memory))
    return Found("", (), None, fewest(job, last or request, rules, memory))


def _candidates(job: Job, request: Request, rules: Rules) -> Iterator[Sequence[Variant]]:
    """Yield the unchanged models, then combinations of variants with growing loss of precision."""
    choices = [[Variant("", (), model), *model.variants(job, rules)] for model in request.models]
    ranks = [range(len(choice)) for choice in choices]
    for numbers in sorted(
        product(*ranks), key=lambda numbers_of: (max(numbers_of, default=0), sum(numbers_of))
    ):
        chosen = [options[number] for options, number in zip(choices, numbers, strict=True)]
        if not any(one.of_all for one in chosen) or len({one.lines for one in chosen}) == 1:
            yield chosen


def fewest(job: Job, request: Request, rules: Rules, memory: float) -> int | None:
    """Return the smallest number of GPUs on which the job fits; ``None`` if the search finds none.

    The search changes only data parallelism. Models that share no GPUs with the first model keep
    their number of GPUs.

    More ranks never increase the memory per GPU. The search therefore doubles the number of GPUs
    until the job fits, and then halves the number while the job fits.
    """

    def fits(world: int) -> bool:
        models = tuple(
            model.on(world) if model.place == request.models[0].place else model
            for model in request.models
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
    # Halving skips numbers between world // 2 and world: try the multiples of world // 16.
    step = max(world // 16, 1)
    smaller = [
        number for number in range(world // 2 + 1, world) if number % step == 0 and fits(number)
    ]
    return min(smaller, default=world)


def render(searched: Found, memory: float, request: Request) -> str:
    """Return the result of a search as text."""
    gigabytes = memory / (1 << 30)
    if searched.plan is None:
        lines = [
            f"search: no precision settings that are legal here fit {request.world_size} GPUs of "
            f"{gigabytes:g} GB"
        ]
    elif not searched.lines:
        lines = [f"search: it fits {gigabytes:g} GB as it is"]
    else:
        lines = [
            f"search: it fits {gigabytes:g} GB with these lines",
            *(f"    {line}" for line in searched.lines),
            *fold(f"which give up {searched.gives_up}"),
        ]
    if searched.fewest is not None:
        lines.append(f"  the smallest number of GPUs found: {searched.fewest}")
    return "\n".join(lines)
