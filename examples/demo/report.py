"""Checks the demo's two runs against the shim's promises, and makes the table and the plot.

This module reads the results that the runs wrote (:mod:`examples.demo.worker`). It imports neither
torch nor a framework.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from packaging.version import Version

from precision_shim.precision.names import ALIASES, SIZES
from precision_shim.process.settings import FEATURES

__all__ = ["Check", "Promise", "Tolerance", "check", "draw", "promised", "sparkline", "tolerance"]

_GUARD = 2.0**-8  # a bf16 exp_avg_sq can decay only if 1 - beta2 is larger than this

_OPT_IN_SINCE = Version("0.9.0.dev0")
"""The first verl whose own config has an option for bf16 optimizer states."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Promise:
    """The promised dtypes of a run.

    Attributes:
        params: dtype of the parameters.
        grad_buckets: dtype of Megatron's gradient buckets.
        main_grads: dtype of the gradients that the optimizer reads.
        master: allowed dtypes of the masters or remainders.
        exp_avg: dtype of the first moments.
        exp_avg_sq: dtype of the second moments.
    """

    params: str
    grad_buckets: str
    main_grads: str
    master: tuple[str, ...]
    exp_avg: str
    exp_avg_sq: str


UNPATCHED = Promise("bfloat16", "float32", "float32", ("float32",), "float32", "float32")
"""Dtypes of a bf16 model with Megatron's default states: 18 bytes per parameter."""


def promised(
    asked: dict[str, str | None],
    beta2: float,
    optimizer_states: str,
    features: Collection[str] = FEATURES,
) -> Promise:
    """Return the dtypes that the shim promises for a bf16 model.

    Args:
        asked: the dtypes in the settings file, by field of Megatron's OptimizerConfig.
        beta2: Adam's beta2.
        optimizer_states: ``PRECISION_SHIM_OPTIMIZER_STATES``, but never ``auto`` with verl 0.9 and
            later, for which ``auto`` means ``as-configured``.
        features: the features in force.
    """
    chooses = optimizer_states != "as-configured"
    follows = chooses and "bf16-dispatch" in features
    # The optimizer reads its gradients from the bucket, whatever main_grads_dtype is. The demo
    # builds the bucket before the optimizer's config is known, so the bucket stays fp32 unless
    # the shim chooses its dtype.
    aligned = chooses and "grad-bucket-alignment" in features
    decays = optimizer_states == "follow-model" or 1 - beta2 > _GUARD
    main_grads = (asked.get("main_grads_dtype") or "bfloat16") if aligned else "float32"
    moment = "bfloat16" if follows else "float32"
    return Promise(
        params="bfloat16",
        grad_buckets=main_grads,
        main_grads=main_grads,
        # An int16 remainder and its bf16 parameter rebuild the fp32 master bit for bit.
        master=("int16", "float32"),
        exp_avg=asked.get("exp_avg_dtype") or moment,
        exp_avg_sq=asked.get("exp_avg_sq_dtype") or (moment if decays else "float32"),
    )


def _optimizer_states(shim: dict[str, Any]) -> str:
    """The setting ``optimizer_states``; from verl 0.9 on, ``auto`` becomes ``as-configured``."""
    states = str(shim["settings"].get("optimizer_states", "auto"))
    verl = shim.get("frameworks", {}).get("verl", {}).get("version")
    if states == "auto" and verl and Version(verl) >= _OPT_IN_SINCE:
        return "as-configured"
    return states


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of two final losses.

    Attributes:
        value: the tolerance, in nats.
        spread: largest minus smallest final loss of the runs without the shim, over the seeds.
        batches: standard error of the mean loss of the last tenth of the steps, without the shim.
        seeds: number of seeds.
    """

    value: float
    spread: float
    batches: float
    seeds: int

    @property
    def source(self) -> str:
        """The origin of the tolerance, as text."""
        if self.spread >= self.batches:
            return f"what another seed changes without the shim: the spread of {self.seeds} seeds"
        return "what other batches change without the shim: the standard error of the last losses"


def tolerance(without: Result) -> Tolerance:
    """Derive the tolerance from the runs without the shim.

    Trainings with bf16 states and with fp32 states are not bit-equal. The tolerance is the spread
    of the final losses over the seeds of initial weights and data order. The tolerance is at least
    the standard error of the last losses, because one seed has no spread.
    """
    finals = [run["held_out"] for run in without["runs"]]
    spread = max(finals) - min(finals)
    last = [run["losses"][-max(len(run["losses"]) // 10, 2) :] for run in without["runs"]]
    batches = max(pstdev(losses) / math.sqrt(len(losses)) for losses in last)
    return Tolerance(max(spread, batches), spread, batches, len(finals))


@dataclass(frozen=True)
class Check:
    """The check of one promise.

    Attributes:
        name: what is checked, in a few words.
        ok: whether the promise is kept.
        found: the measured value, and also the promised value if the two differ.
    """

    name: str
    ok: bool
    found: str


def check(without: Result, with_shim: Result, allowed: Tolerance) -> list[Check]:
    """Check both results against the promises."""
    shim = with_shim["shim"]
    promise = promised(
        with_shim["asked"],
        with_shim["runs"][0]["adam_beta2"],
        _optimizer_states(shim),
        shim["features"] if shim["enabled"] else FEATURES,
    )
    checks = [
        *_check_states("without", without, UNPATCHED),
        Check("shim installed", bool(shim["enabled"]), _installed(shim, with_shim)),
        *_check_states("with", with_shim, promise),
    ]
    for result in (without, with_shim):
        falls = [(run["losses"][0], run["held_out"]) for run in result["runs"]]
        checks.append(
            Check(
                f"{result['name']}: the loss falls",
                all(math.isfinite(end) and end < start for start, end in falls),
                "; ".join(f"{start:.3f} to {end:.3f}" for start, end in falls),
            )
        )
    apart = differences(without, with_shim)
    worst = max(apart, key=abs)
    ok = all(abs(each) <= allowed.value for each in apart)
    sign = "<=" if ok else ">"
    checks.append(Check("final losses agree", ok, f"{abs(worst):.4f} {sign} {allowed.value:.4f}"))
    return checks


def _installed(shim: dict[str, Any], result: Result) -> str:
    if shim["enabled"]:
        return f"{len(shim['features'])} features in force"
    return f"status() says off, as PRECISION_SHIM={result.get('switch') or '0'} makes it"


def differences(without: Result, with_shim: Result) -> list[float]:
    """The final loss with the shim minus the final loss without the shim, for each seed."""
    pairs = zip(without["runs"], with_shim["runs"], strict=True)
    return [b["held_out"] - a["held_out"] for a, b in pairs]


def _check_states(name: str, result: Result, promise: Promise) -> list[Check]:
    wanted = asdict(promise)
    kinds = {
        key: tuple(map(short, (value,) if isinstance(value, str) else value))
        for key, value in wanted.items()
    }
    bad: dict[str, str] = {}
    totals = set()
    expected = set()
    for run in result["runs"]:
        for rank in run["ranks"]:
            held = {key: part["dtypes"] for key, part in rank["parts"].items()}
            held["main_grads"] = rank["main_grads"]
            held = {key: tuple(map(short, dtypes)) for key, dtypes in held.items()}
            for key, allowed in kinds.items():
                if len(held[key]) != 1 or held[key][0] not in allowed:
                    found, want = words(held[key]), " or ".join(allowed)
                    bad[key] = f"{key} is {found}, promised {want}"
            # The promised bytes depend on which of the allowed master dtypes is in force.
            masters = held["master"] if not bad else kinds["master"]
            parts = ("params", "grad_buckets", "exp_avg", "exp_avg_sq")
            rest = sum(SIZES[kinds[key][0]] for key in parts)
            expected |= {rest + SIZES[master] for master in masters}
            totals.add(round(rank["per_parameter"], 3))
    same = len(totals) == 1 and totals <= expected
    found = ", ".join(f"{total:g}" for total in sorted(totals))
    text = f"{found} B/param measured"
    if not same:
        text += f", promised {' or '.join(f'{total:g}' for total in sorted(expected))}"
    dtypes = "; ".join(bad.values()) or ", ".join(
        f"{label} {kinds[key][0]}"
        for key, label in (("grad_buckets", "bucket"), ("exp_avg", "m"), ("exp_avg_sq", "v"))
    )
    return [Check(f"{name}: dtypes", not bad, dtypes), Check(f"{name}: bytes", same, text)]


def short(dtype: str) -> str:
    """A dtype's short name, such as ``bf16`` for ``bfloat16``."""
    return ALIASES.get(dtype, dtype)


def words(dtypes: tuple[str, ...] | list[str]) -> str:
    """The short names of several dtypes, joined by ``+``; ``none`` if there is no dtype."""
    return "+".join(map(short, dtypes)) or "none"


def in_force(result: Result) -> list[tuple[str, str, str]]:
    """The table's rows for one run, from rank 0: part, dtype and bytes per parameter."""
    rank = result["runs"][0]["ranks"][0]
    parts = rank["parts"]
    copies = parts["grad_copies"]["bytes_per_parameter"]
    master = parts["master"]
    rows = [
        ("parameters", *_cell(parts["params"])),
        ("gradient bucket", *_cell(parts["grad_buckets"])),
        ("main gradients", words(rank["main_grads"]), f"{copies:g}" if copies else "in bucket"),
        ("master weights", *_cell(master)),
        ("exp_avg (m)", *_cell(parts["exp_avg"])),
        ("exp_avg_sq (v)", *_cell(parts["exp_avg_sq"])),
        ("together", "", f"{rank['per_parameter']:g}"),
    ]
    if master["dtypes"] == ["int16"]:
        rows[3] = (rows[3][0], "int16 remainder", rows[3][2])
    return rows


def _cell(part: dict[str, Any]) -> tuple[str, str]:
    return words(part["dtypes"]), f"{part['bytes_per_parameter']:g}"


def sparkline(values: list[float], width: int, low: float, high: float) -> str:
    """Draw a curve as one line of text; each of ``width`` characters shows a mean of values."""
    blocks = "▁▂▃▄▅▆▇█"
    width = min(width, len(values))
    line = ""
    for i in range(width):
        piece = values[i * len(values) // width : (i + 1) * len(values) // width]
        share = (fmean(piece) - low) / (high - low) if high > low else 0.0
        line += blocks[min(7, max(0, int(share * 8)))]
    return line


def smooth(values: list[float], window: int) -> list[float]:
    """A trailing mean over ``window`` values, which reduces the noise of the batches."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def draw(path: Path, without: Result, with_shim: Result, title: str) -> None:
    """Write the plot: both loss curves, their difference, and the bytes per parameter."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gray, blue = "#8a8a8a", "#1769aa"
    figure = pyplot.figure(figsize=(11, 5), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 3), height_ratios=(3, 1))
    curves = figure.add_subplot(grid[0, 0])
    apart = figure.add_subplot(grid[1, 0], sharex=curves)
    bars = figure.add_subplot(grid[:, 1])

    steps = range(1, len(without["runs"][0]["losses"]) + 1)
    window = max(1, len(steps) // 30)
    before = [smooth(run["losses"], window) for run in without["runs"]]
    after = [smooth(run["losses"], window) for run in with_shim["runs"]]
    if len(before) > 1:
        columns = list(zip(*before, strict=True))
        curves.fill_between(
            steps,
            [min(column) for column in columns],
            [max(column) for column in columns],
            color=gray,
            alpha=0.3,
            linewidth=0,
            label=f"without the shim, {len(before)} seeds",
        )
    curves.plot(steps, before[0], color="black", linewidth=2.2, label="without the shim, seed 0")
    curves.plot(
        steps, after[0], color=blue, linewidth=1.4, linestyle=(0, (4, 2)),
        label="with the shim, seed 0",
    )  # fmt: skip
    curves.set_ylabel("training loss (nats per byte)")
    curves.legend(frameon=False)
    curves.tick_params(labelbottom=False)
    for seed, (a, b) in enumerate(zip(before, after, strict=True)):
        difference = [y - x for x, y in zip(a, b, strict=True)]
        apart.plot(steps, difference, color=blue, linewidth=1, alpha=1 if seed == 0 else 0.4)
    allowed = tolerance(without).value
    apart.axhspan(-allowed, allowed, color=gray, alpha=0.2, linewidth=0)
    apart.axhline(0, color="black", linewidth=0.8)
    apart.set_ylabel("difference")
    apart.set_xlabel(f"step (mean of {window} steps; gray band: tolerance of the final loss)")

    _draw_bars(bars, (without, with_shim))
    figure.align_ylabels([curves, apart])
    for axes in (curves, apart, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_bars(bars: Any, results: tuple[Result, Result]) -> None:
    shades = ("#0b3c5d", "#1769aa", "#4f9bd9", "#8fc1e8", "#c9e0f4")
    keys = ("params", "grad_buckets", "master", "exp_avg", "exp_avg_sq")
    labels = ("parameter", "grad bucket", "master", "exp_avg", "exp_avg_sq")
    for column, result in enumerate(results):
        rank = result["runs"][0]["ranks"][0]
        bottom = 0.0
        for key, label, shade in zip(keys, labels, shades, strict=True):
            part = rank["parts"][key]
            height = part["bytes_per_parameter"]
            bars.bar(column, height, 0.85, bottom, color=shade, edgecolor="white")
            ink = "white" if shade in shades[:2] else "black"
            text = f"{label} {words(part['dtypes'])}"
            bars.text(column, bottom + height / 2, text, ha="center", va="center", color=ink)
            bottom += height
        total = f"{rank['per_parameter']:g}"
        bars.text(column, bottom + 0.2, total, ha="center", va="bottom", weight="bold", size=13)
    bars.set_xticks((0, 1), ("without", "with the shim"))
    bars.set_ylabel("bytes per parameter, measured")
    bars.set_ylim(top=20)
    bars.set_yticks(range(0, 21, 2))
    bars.set_xlim(-0.55, 1.55)
