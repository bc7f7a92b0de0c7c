"""Reads the metrics that verl logged, checks the demo's promises, and draws the plot.

This module imports neither torch nor a framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..report import Check, smooth

__all__ = ["FIRST", "METRICS", "Course", "check", "draw", "read"]

METRICS = {
    "reward": "critic/rewards/mean",
    "k3": "rollout_corr/k3_kl",
    "difference": "training/rollout_probs_diff_mean",
    "scale": "actor/loss_scale",
    "skipped": "actor/skipped_steps",
}
"""verl's names of the metrics; the shim adds the last two metrics."""

FIRST = 10
"""The mismatches of the first ``FIRST`` steps are compared. In later steps the model is certain of
its answers, and every mismatch is small."""

_LEARNED = 0.5
_K3_RATIO, _DIFFERENCE_RATIO = 10, 4
"""Minimum ratios of bf16 to fp16: three more mantissa bits give about 64 in k3, 8 in the mean."""


@dataclass(frozen=True)
class Course:
    """A job's metrics, one value per step; the list of a metric that verl never logged is empty.

    The first step of a resumed job is later than step 1.
    """

    step: list[float]
    reward: list[float]
    k3: list[float]
    difference: list[float]
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


def check(courses: Sequence[Course]) -> list[Check]:
    """Check the demo's promises on the three jobs.

    Args:
        courses: the jobs' metrics, in the order of ``JOBS``: bf16 trainer and rollout, fp16 trainer
            and bf16 rollout, fp16 trainer and rollout with the shim.
    """
    learned = [fmean(one.reward[-5:]) for one in courses]
    k3 = [fmean(one.k3[:FIRST]) for one in courses]
    apart = [fmean(one.difference[:FIRST]) for one in courses]
    last = courses[-1]
    words = " / ".join
    return [
        Check(
            "reward at the end, of 1",
            min(learned) > _LEARNED,
            words(f"{value:.2f}" for value in learned),
        ),
        Check(
            f"k3 of trainer and rollout, first {FIRST} steps",
            min(k3[:-1]) > _K3_RATIO * k3[-1],
            words(f"{value:.1e}" for value in k3),
        ),
        Check(
            f"difference of probabilities, first {FIRST} steps",
            min(apart[:-1]) > _DIFFERENCE_RATIO * apart[-1],
            words(f"{value:.1e}" for value in apart),
        ),
        Check(
            "overflows are skipped, and the loss scale falls",
            bool(last.skipped) and last.skipped[-1] >= 1 and min(last.scale) < last.scale[0],
            f"{last.skipped[-1]:.0f} skipped, scale {last.scale[0]:.0f} to {last.scale[-1]:.0f}"
            if last.skipped
            else "verl logged neither",
        ),
    ]


def draw(path: Path, courses: Mapping[str, Course], title: str) -> None:
    """Write the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = (
        {"color": "#8a8a8a", "linewidth": 2.4},
        {"color": "black", "linewidth": 1.6, "linestyle": (0, (4, 2))},
        {"color": "#1769aa", "linewidth": 2.8},
    )
    size = {"font.size": 13, "axes.titlesize": 13, "axes.labelsize": 11}
    with pyplot.rc_context(size):
        figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.5), dpi=110, layout="constrained")
        panels = (
            ("reward", "Reward: share of right letters", METRICS["reward"], "linear"),
            ("k3", "Trainer and rollout disagree: KL divergence", METRICS["k3"], "log"),
            ("difference", "Trainer and rollout disagree: mean difference of probabilities",
             METRICS["difference"], "log"),
        )  # fmt: skip
        for axis, (name, words, metric, scale) in zip(axes.flat, panels, strict=False):
            for (job, course), style in zip(courses.items(), styles, strict=True):
                values = smooth(getattr(course, name), 3)
                axis.plot(range(1, len(values) + 1), values, label=job, **style)
            axis.set_yscale(scale)
            axis.set_title(words, loc="left")
            axis.set_ylabel(metric)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center",
                      ncols=3, frameon=False, title=title, title_fontsize=15)  # fmt: skip

        last, axis = list(courses.values())[-1], axes[1, 1]
        steps = range(1, len(last.scale) + 1)
        axis.plot(steps, last.scale, drawstyle="steps-mid", **styles[2])
        before = [0.0, *last.skipped]
        skipped = [step for step in steps if last.skipped[step - 1] > before[step - 1]]
        axis.plot(
            skipped, [last.scale[step - 1] for step in skipped], "x", color="#c62828",
            markersize=10, markeredgewidth=2.5,
        )  # fmt: skip
        axis.set_yscale("log", base=2)
        axis.set_title("Loss scale with the shim; x: overflow, the step is skipped", loc="left")
        axis.set_ylabel("actor/loss_scale")
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_xlabel("step")
        figure.savefig(path)
        pyplot.close(figure)
