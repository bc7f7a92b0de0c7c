"""Format a plan as text: a table per model, the problems, and the decisions with reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from .record import COMPONENTS, ModelPlan, Part, Plan, Stage

GB = 1 << 30
_WIDTH = 99
_SIDES = (("without", "before"), ("with", "after"))
_TITLES = ("GB per GPU", "", "without", "", "with")


def render(plan: Plan, memory: float | None = None) -> str:
    """Return a plan as text.

    Args:
        plan: the plan.
        memory: memory of a GPU, in GB of 2^30 bytes; ``None`` to show no free memory.
    """
    blocks = ["\n".join(_head(plan))]
    blocks += ["\n".join(_model(model, memory)) for model in plan.models]
    if len(plan.models) > 1:
        blocks.append("\n".join(_together(plan, memory)))
    if plan.problems:
        lines = ["illegal"]
        for problem in plan.problems:
            subject = f"{problem.subject}: " if problem.subject else ""
            lines += fold(f"{subject}{problem.key}: {problem.message}. {problem.remedy}".strip())
        blocks.append("\n".join(lines))
    if plan.notes:
        blocks.append("\n".join(line for note in plan.notes for line in fold(f"note: {note}")))
    return "\n\n".join(blocks)


def _head(plan: Plan) -> list[str]:
    words = [f"{plan.framework} {plan.version or ''}".strip(), f"{plan.world_size} GPUs"]
    if plan.transformer_engine:
        words.append(f"TransformerEngine {plan.transformer_engine}")
    if plan.megatron_core:
        words.append(f"megatron-core {plan.megatron_core}")
    count = len(plan.problems)
    verdict = f"{count} problem{'s' if count > 1 else ''}" if count else "legal"
    return [f"plan of {', '.join(words)}: {verdict}"]


def _together(plan: Plan, memory: float | None) -> list[str]:
    words = [f"{side} {gigabytes(plan.peak(key))}" for side, key in _SIDES]
    apart = len({model.place for model in plan.models}) > 1
    where = " on the same GPUs" if apart else ""
    lines = fold(
        f"at most at a time, one model at its step and of the others{where} what stays: "
        f"{', '.join(words)} GB"
    )
    if memory is not None:
        left = [memory - plan.peak(key) / GB for _, key in _SIDES]
        lines += fold(f"left of {memory:g}: {', '.join(map(_format_left, left))}")
    return ["all models", *lines]


def _format_left(number: float) -> str:
    return f"{number:.2f}" if number >= 0 else f"{-number:.2f} over"


def gigabytes(number: int) -> str:
    """Return a number of bytes in GB of 2^30 bytes, with two decimals."""
    return f"{number / GB:.2f}"


def list_parked(stages: Sequence[Stage], by_key: Mapping[str, Sequence[str]]) -> list[str]:
    """Return notes on the bytes that a framework offloads to the host between a step's phases.

    Args:
        stages: the pipeline stages.
        by_key: for each offload key of the config, the components that the key offloads.
    """
    lines = []
    for key, components in by_key.items():
        sums = [dict.fromkeys(components, 0) for _ in stages]
        for stage, counts in zip(stages, sums, strict=True):
            for part in stage.parts:
                for name in counts.keys() & part.components.keys():
                    held = part.components[name]
                    counts[name] += held.bytes - held.host
        most = max(sums, key=lambda held: sum(held.values()))
        moved = [name for name in components if most[name]]
        if moved:
            lines.append(
                f"{key}: between the phases of a step the host holds "
                f"{gigabytes(sum(most.values()))} GB for each GPU ({', '.join(moved)}), beside "
                "what else it has to"
            )
    return lines


def _model(model: ModelPlan, memory: float | None) -> list[str]:
    layout = ", ".join(f"{key} {value}" for key, value in model.layout.items())
    lines = [f"{model.subject}: {model.parameters:,} parameters, {layout}"]
    lines += [f"  from {model.source}"] if model.source else []
    if model.computes:
        reduces = f", gradients are reduced in {model.reduces}" if model.reduces else ""
        lines += [f"  computes in {model.computes}{reduces}"]
    rows: list[Sequence[str]] = [_TITLES]
    for numbers, before, after in group_stages(model):
        rows += _stage(numbers, before, after, len(model.after), memory)
    lines += _table(rows)
    sent = {
        side: ", ".join(f"{kind} {gigabytes(number)}" for kind, number in traffic.items())
        for side, traffic in model.traffic.items()
    }
    if any(number for traffic in model.traffic.values() for number in traffic.values()):
        words = f"without the shim: {sent['before']}; with it: {sent['after']}"
        lines += fold(f"GB that a GPU sends in a step: {words}")
    for decision in model.decisions:
        lines += fold(f"{decision.feature}: {decision.chosen} ({decision.because})")
    for note in model.notes:
        lines += fold(f"note: {note}")
    return lines


def group_stages(model: ModelPlan) -> list[tuple[list[int], Stage, Stage]]:
    """Group the pipeline stages with equal tables; return each group's numbers and first stage."""
    groups: dict[str, tuple[list[int], Stage, Stage]] = {}
    for before, after in zip(model.before, model.after, strict=True):
        shown = str(_stage([], before, after, 1, None))
        groups.setdefault(shown, ([], before, after))[0].append(before.stage)
    return list(groups.values())


def _stage(
    numbers: list[int], before: Stage, after: Stage, stages: int, memory: float | None
) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    if stages > 1:
        rows.append((f"stage {spans(numbers)}", "", "", "", ""))
    for part, other in zip(before.parts, after.parts, strict=True):
        rows += _part(part, other)
    first, second = before.totals, after.totals
    rows.append(("together", "", gigabytes(first["gpu"]), "", gigabytes(second["gpu"])))
    if first["peak"] > first["gpu"] or second["peak"] > second["gpu"]:
        top = (gigabytes(first["peak"]), gigabytes(second["peak"]))
        rows.append(("while the optimizer steps", "", top[0], "", top[1]))
    if first["host"] or second["host"]:
        host = (gigabytes(first["host"]), gigabytes(second["host"]))
        rows.append(("in the host's memory", "", host[0], "", host[1]))
    if memory is not None:
        words = [_format_left(memory - side["peak"] / GB) for side in (first, second)]
        rows.append((f"left of {memory:g}", "", words[0], "", words[1]))
    return rows


def _part(before: Part, after: Part) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    name = "" if before.name == "model" else f"{before.name} "
    for component in COMPONENTS:
        sides = [stage.components.get(component) for stage in (before, after)]
        if not any(sides):
            continue
        cells = []
        for side in sides:
            cells += ["+".join(side.dtypes) if side else "-"]
            cells += [gigabytes(side.bytes - side.host) if side else "0.00"]
        shared = any(side is not None and side.sharded for side in sides)
        share = f" / {before.data_parallel_size}" if shared else ""
        rows.append((f"{name}{component}{share}", *cells))
    return rows


def spans(numbers: Sequence[int]) -> str:
    """Return numbers as short text, such as ``0, 2-14``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    return [
        "  "
        + "  ".join(
            text.rjust(width) if column in (2, 4) else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def fold(text: str) -> list[str]:
    """Return the lines of a text, wrapped to ``_WIDTH`` columns and indented."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
