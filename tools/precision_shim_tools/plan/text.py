"""Format a plan as text: a table per model, the problems, and the decisions with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from precision_shim.reporting import text as _text

from .record import COMPONENTS, JobPlan, ModelPlan, PlannedPart

GB = 1 << 30
_ROW = "  {:{}}  {:{}}  {:>{}}  {:{}}  {:>{}}"
TableRow = tuple[str, str, str, str, str]
"""A component's name, and for each of the two sides its dtype and its GiB per GPU."""
fold = partial(_text.fold, indent=2, further=4, width=99)


def render(plan: JobPlan, memory: float | None = None) -> str:
    """Return a plan as text; ``memory`` of a GPU is in GB of 2^30 bytes."""
    words = [f"{plan.framework} {plan.version or ''}".strip(), f"{plan.world_size} GPUs"]
    words += [f"TransformerEngine {plan.transformer_engine}"] * bool(plan.transformer_engine)
    words += [f"megatron-core {plan.megatron_core}"] * bool(plan.megatron_core)
    count = len(plan.problems)
    off = "is perhaps not on" if plan.unsure else "is not on"
    verdict = "legal" + f"; the shim {off}" * plan.unset
    if plan.unset and any(model.ends or _wrong(model) for model in plan.models):
        verdict = f"legal only with the shim, which {off}"
    verdict = f"{count} problem{'s' if count > 1 else ''}" if count else verdict
    blocks = [[f"plan of {', '.join(words)}: {verdict}"]]
    blocks += [_model(model, memory) for model in plan.models]
    if plan.problems:
        lines = ["illegal"]
        for problem in plan.problems:
            subject = f"{problem.subject}: " if problem.subject else ""
            lines += fold(f"{subject}{problem.key}: {problem.message}. {problem.remedy}".strip())
        blocks.append(lines)
    if plan.notes:
        blocks.append([line for note in plan.notes for line in fold(f"note: {note}")])
    return "\n\n".join("\n".join(block) for block in blocks)


def _left(memory: float, used: int) -> str:
    left = memory - used / GB
    return f"{left:.2f}" if left >= 0 else f"{-left:.2f} over"


def gigabytes(number: int) -> str:
    """Return a number of bytes in GB of 2^30 bytes, with two decimals."""
    return f"{number / GB:.2f}"


def _model(model: ModelPlan, memory: float | None) -> list[str]:
    layout = ", ".join(f"{key} {value}" for key, value in model.layout.items())
    lines = [f"{model.subject}: {model.parameters:,} parameters, {layout}"]
    lines += [f"  from {model.source}"] * bool(model.source)
    if model.computes:
        reduces = f", FSDP reduces gradients in {model.reduces}" if model.reduces else ""
        quantized = f"; quantized layers: {model.format}" if model.format else ""
        lines += fold(f"computes in {model.computes}{reduces}{quantized}")
    rows = [("GiB per GPU", "", "without", "", "with"), *_rows(model, memory)]
    if model.ends:
        lines += fold(f"without: ends, because {model.ends}")
        rows = [(name, "", "", dtype, size) for name, _, _, dtype, size in rows]
    for text in _wrong(model):
        lines += fold(f"without: {text}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [word for pair in zip(row, widths, strict=True) for word in pair]
        lines.append(_ROW.format(*cells).rstrip())
    for decision in model.decisions:
        lines += fold(f"{decision.feature}: {decision.chosen} ({decision.because})")
    for warning in model.warnings:
        lines += fold(f"warning: {warning}")
    for note in model.notes:
        lines += fold(f"note: {note}")
    return lines


def _wrong(model: ModelPlan) -> list[str]:
    return [decision.without for decision in model.decisions if decision.without]


def _rows(model: ModelPlan, memory: float | None) -> Iterator[TableRow]:
    """Yield the table's rows for the pipeline stage that needs the most memory."""
    without, with_shim = model.without[model.fullest], model.with_shim[model.fullest]
    if len(model.with_shim) > 1:
        yield f"stage {with_shim.stage}, the fullest", "", "", "", ""
    for part, other in zip(without.parts, with_shim.parts, strict=True):
        yield from _of_part(part, other)
    first, second = without.totals, with_shim.totals
    steps = any(totals["peak"] > totals["gpu"] for totals in (first, second))
    for title, key, shown in (
        ("together", "gpu", True),
        ("while the optimizer steps", "peak", steps),
        ("in the host's memory", "host", first["host"] or second["host"]),
    ):
        if shown:
            yield title, "", gigabytes(first[key]), "", gigabytes(second[key])
    if memory is not None:
        left = [_left(memory, totals["peak"]) for totals in (first, second)]
        yield f"left of {memory:g}", "", left[0], "", left[1]


def _of_part(without: PlannedPart, with_shim: PlannedPart) -> Iterator[TableRow]:
    name = "" if without.name == "model" else f"{without.name} "
    for component in COMPONENTS:
        sides = [part.components.get(component) for part in (without, with_shim)]
        if any(sides):
            shared = any(side is not None and side.sharded for side in sides)
            share = f" / {without.data_parallel_size}" if shared else ""
            dtypes = ["+".join(side.dtypes) if side else "-" for side in sides]
            sizes = [gigabytes(side.bytes - side.host if side else 0) for side in sides]
            yield f"{name}{component}{share}", dtypes[0], sizes[0], dtypes[1], sizes[1]
