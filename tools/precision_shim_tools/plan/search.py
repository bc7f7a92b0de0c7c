"""Find for each model of a job the precision settings with which it fits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .command import Job
from .request import Plannable, Request, Rules, Variant
from .text import GB, fold


@dataclass(frozen=True)
class Found:
    """The result of a search for one model.

    Attributes:
        fits: whether legal settings were found with which the model fits.
        gives_up: text on the loss of precision; empty if the model fits with its own settings.
        lines: the settings, as lines to paste.
    """

    subject: str
    fits: bool
    gives_up: str = ""
    lines: tuple[str, ...] = ()


def search(job: Job, request: Request, rules: Rules, memory: float) -> list[Found]:
    """Try settings, the least loss of precision first, until each model fits ``memory`` bytes."""

    def fits(model: Plannable) -> bool:
        plan, problems = model.plan(job, rules)
        return plan is not None and not problems and plan.peak <= memory

    found = []
    for model in request.models:
        choices = [Variant("", (), model), *model.variants(job, rules)]
        chosen = next((choice for choice in choices if fits(choice.model)), None)
        settings = () if chosen is None else (chosen.gives_up, chosen.lines)
        found.append(Found(model.subject, chosen is not None, *settings))
    return found


def render(searched: list[Found], memory: float) -> Iterator[str]:
    """Yield the lines of a search's result; ``memory`` of a GPU is in bytes."""
    gigabytes = memory / GB
    for found in searched:
        if not found.fits:
            yield f"search: {found.subject}: no legal precision settings fit {gigabytes:g} GiB"
        elif not found.lines:
            yield f"search: {found.subject} fits {gigabytes:g} GiB as it is"
        else:
            yield f"search: {found.subject} fits {gigabytes:g} GiB with these lines"
            yield from (f"    {line}" for line in found.lines)
            yield from fold(f"which give up {found.gives_up}")
    if len(searched) > 1:
        yield from fold("note: models that are on the same GPUs at the same time add up")
