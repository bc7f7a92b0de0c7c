"""Draw a plan: stacked bars per pipeline stage, without and with the shim."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import PlanError
from .record import COMPONENTS, Plan, Stage
from .text import GB, group_stages, spans

_COLOURS = {
    "params": "#4c72b0",
    "frozen": "#8c8c8c",
    "grad_buckets": "#dd8452",
    "grad_copies": "#e5ae86",
    "master": "#55a868",
    "exp_avg": "#c44e52",
    "exp_avg_sq": "#8172b3",
    "at step": "#d9d9d9",
}
SUFFIXES = (".svg", ".png")


def draw(plan: Plan, path: Path, memory: float | None = None) -> None:
    """Draw a plan and write the picture into a file.

    Args:
        plan: the plan.
        path: the file; its name ends in ``.svg`` or ``.png``.
        memory: memory of a GPU, in GB of 2^30 bytes, drawn as a line.

    Raises:
        PlanError: the file's name has another ending, matplotlib is missing, or writing failed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise PlanError(f"--plot {path}: expected a name that ends in {' or '.join(SUFFIXES)}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(
            f"--plot needs matplotlib ({error}): pip install 'precision-shim[demo]'."
        ) from error
    bars = _bars(plan)
    figure = Figure(figsize=(max(6.0, 1.1 * len(bars) + 3.0), 5.0), layout="constrained")
    axes = figure.subplots()
    _stack(axes, bars)
    if memory is not None:
        axes.axhline(memory, color="black", linewidth=1, linestyle="--", label=f"{memory:g} GB")
    axes.set_xticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.set_ylabel("GB per GPU")
    axes.set_title(f"{plan.framework} {plan.version or ''}, {plan.world_size} GPUs".strip())
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise PlanError(f"--plot {path}: cannot be written: {error.strerror or error}.") from error


def _bars(plan: Plan) -> list[tuple[str, Mapping[str, float]]]:
    bars: list[tuple[str, Mapping[str, float]]] = []
    for model in plan.models:
        for numbers, before, after in group_stages(model):
            where = f"\nstage {spans(numbers)}" if len(model.after) > 1 else ""
            for side, stage in (("without", before), ("with", after)):
                bars.append((f"{model.subject}{where}\n{side}", _heights(stage)))
    return bars


def _heights(stage: Stage) -> dict[str, float]:
    heights = dict.fromkeys((*COMPONENTS, "at step"), 0.0)
    for part in stage.parts:
        for name, held in part.components.items():
            heights[name] += (held.bytes - held.host) / GB
        for held in part.at_step.values():
            heights["at step"] += held.bytes / GB
    return heights


def _stack(axes: Any, bars: list[tuple[str, Mapping[str, float]]]) -> None:
    places = range(len(bars))
    below = [0.0] * len(bars)
    for name, colour in _COLOURS.items():
        heights = [bar[name] for _, bar in bars]
        if any(heights):
            axes.bar(places, heights, bottom=below, color=colour, label=name, width=0.7)
            below = [a + b for a, b in zip(below, heights, strict=True)]
