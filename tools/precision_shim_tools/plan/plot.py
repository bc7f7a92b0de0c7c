"""Draw a plan: stacked bars of each model's fullest GPU, without and with the shim."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from precision_shim.errors import PlanError

from .record import COMPONENTS, JobPlan, Stage
from .text import GB

_AT_STEP = "at step"


def draw(plan: JobPlan, path: Path, memory: float | None = None) -> None:
    """Draw a plan and write the picture into a file whose name ends in ``.svg`` or ``.png``.

    ``memory`` of a GPU is drawn as a line, in GB of 2^30 bytes.

    Raises:
        PlanError: the file's name has another ending, or matplotlib is missing.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise PlanError(f"--plot {path}: expected a name that ends in .svg or .png.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(
            f"--plot needs matplotlib ({error}): pip install 'precision-shim[demo]'."
        ) from error
    bars = {
        f"{model.subject}\n{side}": _heights(stages[model.fullest])
        for model in plan.models
        for side, stages in (("without", model.without), ("with", model.with_shim))
    }
    figure = Figure(figsize=(max(6.0, 1.1 * len(bars) + 3.0), 5.0), layout="constrained")
    axes = figure.subplots()
    below = [0.0] * len(bars)
    for name in (*COMPONENTS, _AT_STEP):
        heights = [bar.get(name, 0.0) for bar in bars.values()]
        if any(heights):
            axes.bar(range(len(bars)), heights, bottom=below, label=name, width=0.7)
            below = [a + b for a, b in zip(below, heights, strict=True)]
    if memory is not None:
        axes.axhline(memory, color="black", linewidth=1, linestyle="--", label=f"{memory:g} GiB")
    axes.set_xticks(range(len(bars)), list(bars), fontsize=8)
    axes.set_ylabel("GiB per GPU")
    axes.set_title(f"{plan.framework} {plan.version or ''}, {plan.world_size} GPUs".strip())
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path)


def _heights(stage: Stage) -> dict[str, float]:
    """GB of each component on one GPU."""
    heights: Counter[str] = Counter()
    for part in stage.parts:
        for name, held in part.components.items():
            heights[name] += held.bytes - held.host
        heights[_AT_STEP] += sum(held.bytes for held in part.at_step.values())
    return {name: size / GB for name, size in heights.items()}
