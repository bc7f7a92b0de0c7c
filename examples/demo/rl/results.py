"""Reads the metrics that verl logged, checks the demo's promises, and draws the plot.

This module imports neither torch nor a framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..report import Check, smooth

__all__ = ["FIRST", "METRICS", "Course", "check", "draw", "read"]

METRICS = {
    "reward": "critic/rewards/mean",
    "k3": "rollout_corr/k3_kl",
    "scale": "actor/loss_scale",
    "skipped": "actor/skipped_steps",
}
"""verl's names of the metrics; the shim adds the last two metrics."""

FIRST = 10
"""The k3 of the first ``FIRST`` steps is compared. In later steps the model is certain of its
answers, and every mismatch is small."""

_LEARNED = 0.5
_RATIO = 10
"""The minimum ratio of bf16 to fp16: three more mantissa bits give about 64 in k3."""


@dataclass(frozen=True)
class Course:
    """A job's metrics, one value per step; the list of a metric that verl never logged is empty.

    The first step of a resumed job is later than step 1.
    """

    step: list[float]
    reward: list[float]
    k3: list[float]
    scale: list[float]
    skipped: list[float]
    seconds: list[float]


def read(path: Path) -> Course:
    """Read the metrics that verl's logger ``file`` has written so far, except a partial line."""
    columns: dict[str, list[float]] = {name: [] for name in ("step", *METRICS, "seconds")}
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for line in lines:
        logged: Mapping[str, Any] = json.loads(line)["data"]
        if METRICS["reward"] not in logged:
            continue
        columns["step"].append(json.loads(line)["step"])
        for name, key in {**METRICS, "seconds": "timing_s/step"}.items():
            if key in logged:
                columns[name].append(float(logged[key]))
    return Course(**columns)


def check(courses: Sequence[Sequence[Course]], forced: Course) -> list[Check]:
    """Check the demo's promises on its jobs.

    Args:
        courses: the metrics of each job of ``JOBS``, one course per seed.
        forced: the metrics of the job ``FORCED``.
    """
    learned = [fmean(fmean(one.reward[-5:]) for one in job) for job in courses]
    k3 = [fmean(fmean(one.k3[:FIRST]) for one in job) for job in courses]
    words = " / ".join
    skips = forced.skipped and forced.skipped[-1]
    return [
        Check(
            "reward at the end, of 1",
            min(learned) > _LEARNED,
            words(f"{value:.2f}" for value in learned),
        ),
        Check(
            f"k3 of trainer and rollout, first {FIRST} steps",
            min(k3[:2]) > _RATIO * max(k3[2:]),
            words(f"{value:.1e}" for value in k3),
        ),
        Check(
            "overflows are skipped, and the loss scale falls",
            bool(skips) and min(forced.scale) < forced.scale[0],
            f"{skips:.0f} skipped, scale from {forced.scale[0]:.0f} to {min(forced.scale):.0f}"
            if forced.skipped
            else "verl logged neither",
        ),
    ]


def draw(
    path: Path, courses: Mapping[str, Sequence[Course]], forced: Course, titles: tuple[str, str]
) -> None:
    """Write the plot: of each job's seeds the median, and a band from the least to the greatest.

    Args:
        path: the file of the plot.
        courses: the metrics of each job of ``JOBS`` by the job's title, one course per seed.
        forced: the metrics of the job ``FORCED``, in a panel of its own.
        titles: of the plot, and of this panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = (
        {"color": "#8a8a8a", "linewidth": 2.4},
        {"color": "black", "linewidth": 1.6, "linestyle": (0, (4, 2))},
        {"color": "#1769aa", "linewidth": 3.2},
        {"color": "#e08214", "linewidth": 1.6, "linestyle": (0, (2, 1.5))},
    )
    with pyplot.rc_context({"font.size": 12, "axes.titlesize": 13, "axes.labelsize": 11}):
        figure, axes = pyplot.subplot_mosaic(
            [["k3", "reward"], ["k3", "scale"]], figsize=(12, 6.5), dpi=110, layout="constrained"
        )
        for name, words in (
            ("k3", "KL of trainer and rollout: what float16 on both sides does"),
            ("reward", "Reward: share of right letters"),
        ):
            axis = axes[name]
            for (job, seeds), style in zip(courses.items(), styles, strict=True):
                each = [smooth(getattr(one, name), 3) for one in seeds]
                steps, found = seeds[0].step, list(zip(*each, strict=True))
                axis.plot(steps, [median(values) for values in found], label=job, **style)
                low, high = map(min, found), map(max, found)
                axis.fill_between(
                    steps, [*low], [*high], color=style["color"], alpha=0.2, linewidth=0
                )
            axis.set_title(words, loc="left")
            axis.set_ylabel(METRICS[name])
        axes["k3"].set_yscale("log")
        figure.legend(*axes["k3"].get_legend_handles_labels(), loc="outside upper center",
                      ncols=2, frameon=False, title=titles[0], title_fontsize=14)  # fmt: skip

        axis = axes["scale"]
        before = [0.0, *forced.skipped]
        at = [n for n, count in enumerate(forced.skipped) if count > before[n]]
        axis.plot(forced.step, forced.scale, drawstyle="steps-mid", color="#5e3c99", linewidth=2.4)
        axis.plot(
            [forced.step[n] for n in at], [forced.scale[n] for n in at], "x", color="#c62828",
            markersize=10, markeredgewidth=2.5,
        )  # fmt: skip
        axis.set_yscale("log", base=2)
        axis.set_title(titles[1], loc="left")
        axis.set_ylabel(METRICS["scale"])
        for axis in axes.values():
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_xlabel("step, mean of 3" if axis is not axes["scale"] else "step")
        figure.savefig(path)
        pyplot.close(figure)
