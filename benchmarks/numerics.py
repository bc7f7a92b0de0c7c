"""Computes the figures of docs/numerics.md: the rounding errors of each precision.

    python benchmarks/numerics.py            # prints the tables
    python benchmarks/numerics.py --write    # writes tables and plots into docs

A run takes seconds on a CPU, and needs torch; the plots need matplotlib. Quantiles of a normal
distribution replace a training's gradients and weights. No number is random, so that every machine
computes the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "shim")]

from precision_shim.precision.remainders import join_master, split_master  # noqa: E402

PAGE = ROOT / "docs" / "numerics.md"
IMAGES = ROOT / "docs" / "images"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


@dataclass(frozen=True)
class Curves:
    """The curves of a plot, some points of which are in a table.

    Attributes:
        x: the horizontal axis.
        lines: each curve's values by its name, one value per ``x``.
        axes: labels of the two axes.
        scales: matplotlib's names of the axes' scales.
        rows: indices in ``x`` of the table's rows.
    """

    x: Sequence[float]
    lines: dict[str, Sequence[float]]
    axes: tuple[str, str]
    scales: tuple[str, str]
    rows: Sequence[int]


def normal(count: int, deviation: float) -> torch.Tensor:
    """``count`` quantiles of a normal distribution around zero, in fp32 and ascending order."""
    of = NormalDist(0.0, deviation).inv_cdf
    return torch.tensor([of((place + 0.5) / count) for place in range(count)])


def second_moment(betas: Sequence[float] = (0.999, 0.99, 0.95), steps: int = 8000) -> Curves:
    """A bf16 ``exp_avg_sq`` divided by its exact value, after the gradients fell to a tenth.

    Each element starts at 1, as after a long training with gradients of standard deviation 1. The
    gradients ``g`` then have standard deviation 0.1. Each step computes ``v <- beta2 v + (1 -
    beta2) g^2`` and rounds to bf16. The curve is the elements' mean divided by the exact mean.
    """
    shown = range(0, steps + 1, 50)
    elements = torch.arange(64)
    squares = _shuffled(1, 4096, 0.1, 1)[0].double().square()
    lines: dict[str, Sequence[float]] = {}
    for beta in betas:
        kept = torch.ones(len(elements), dtype=BF16)
        exact = torch.ones(len(elements), dtype=torch.float64)
        ratio = []
        for step in range(steps + 1):
            if step in shown:
                ratio.append(float(kept.double().mean() / exact.mean()))
            new = (1 - beta) * squares[(elements * 61 + step * 17) % 4096]
            kept = (kept.double() * beta + new).to(BF16)
            exact = exact * beta + new
        lines[f"beta2 = {beta}"] = ratio
    rows = [list(shown).index(step) for step in (0, 1000, 3000, 7000)]
    axes = ("steps after the gradients fell tenfold", "bf16 exp_avg_sq / exact value")
    return Curves(list(shown), lines, axes, ("linear", "log"), rows)


def lost_updates(count: int = 20_000) -> Curves:
    """The share of weights that one Adam step does not change, by the learning rate.

    The weights have standard deviation 0.02, as most language models initialise them. Adam's step
    is as large as the learning rate if the gradients keep their sign.
    """
    rates = [10 ** (exponent / 4) for exponent in range(-32, -7)]
    weights = normal(count, 0.02)
    lines: dict[str, Sequence[float]] = {}
    for dtype in (BF16, FP16, FP32):
        stored = weights.to(dtype)
        lines[f"weights in {NAMES[dtype]}"] = [
            float(((stored.float() - rate).to(dtype) == stored).float().mean()) for rate in rates
        ]
    master = split_master(weights)
    lines["bf16 with remainder"] = [
        float((_stepped(master, rate) == join_master(*master)).float().mean()) for rate in rates
    ]
    rows = [rates.index(10**exponent) for exponent in (-7.0, -6.0, -5.0, -4.0, -3.0)]
    axes = ("size of the step (learning rate)", "share of weights that did not change")
    return Curves(rates, lines, axes, ("log", "linear"), rows)


def _stepped(master: tuple[torch.Tensor, torch.Tensor], rate: float) -> torch.Tensor:
    return join_master(*split_master(join_master(*master) - rate))


def flushed(count: int = 20_000) -> Curves:
    """The share of gradients that a 16-bit dtype rounds to zero, by their standard deviation."""
    deviations = [10 ** (exponent / 4) for exponent in range(-48, -7)]
    unit = normal(count, 1.0)
    lines: dict[str, Sequence[float]] = {}
    for dtype, scale in ((FP16, 1), (FP16, 65536), (BF16, 1)):
        name = f"{NAMES[dtype]}, scaled by {scale}" if scale > 1 else f"{NAMES[dtype]}, not scaled"
        lines[name] = [
            float(((unit * deviation * scale).to(dtype) == 0).float().mean())
            for deviation in deviations
        ]
    rows = [deviations.index(10**exponent) for exponent in (-12.0, -9.0, -8.0, -7.0, -6.0, -4.0)]
    axes = ("standard deviation of the gradients", "share that becomes zero")
    return Curves(deviations, lines, axes, ("log", "linear"), rows)


def mismatch(width: int = 64, depths: Sequence[int] = (1, 2, 4, 8, 16), tokens: int = 64) -> Curves:
    """The divergence of log probabilities between two ways to sum the same products.

    A stack of residual layers ends in a softmax over 512 tokens. The first way adds all terms of a
    dot product at once. The second way adds them in eight pieces and rounds to the dtype after each
    piece, as a kernel with another tiling does. Products and sums are fp64, and the result is
    rounded to the dtype. The curve is the mean over tokens of KL(first || second), in nats.
    """
    lines: dict[str, Sequence[float]] = {}
    for dtype in (BF16, FP16):
        divergence = []
        for depth in depths:
            logs = [
                _log_probabilities(
                    dtype, pieces, width=width, depth=depth, tokens=tokens, vocabulary=512
                )
                for pieces in (1, 8)
            ]
            divergence.append(float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()))
        lines[NAMES[dtype]] = divergence
    axes = ("layers", "KL divergence in nats")
    return Curves(list(depths), lines, axes, ("log", "log"), range(len(depths)))


def _shuffled(rows: int, columns: int, deviation: float, seed: int) -> torch.Tensor:
    """A matrix of normal quantiles, shuffled by a linear congruential generator."""
    count, state, order = rows * columns, seed, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        order.append(state)
    return normal(count, deviation)[torch.tensor(order, dtype=torch.float64).argsort()].view(
        rows, columns
    )


def _log_probabilities(
    dtype: torch.dtype, pieces: int, *, width: int, depth: int, tokens: int, vocabulary: int
) -> torch.Tensor:
    def multiplied(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        parts = [
            # Unlike a matrix product, this sum has the same order of terms on every CPU.
            (a.double()[:, :, None] * b.double()[None]).sum(1)
            for a, b in zip(left.chunk(pieces, 1), right.chunk(pieces, 0), strict=True)
        ]
        total = parts[0].to(dtype)
        for part in parts[1:]:
            total = (total.double() + part).to(dtype)
        return total

    hidden = _shuffled(tokens, width, 1.0, 1).to(dtype)
    for layer in range(depth):
        weight = _shuffled(width, width, width**-0.5, layer + 2).to(dtype)
        hidden = (hidden.float() + multiplied(hidden, weight).float().tanh()).to(dtype)
    head = _shuffled(width, vocabulary, width**-0.5, 1000).to(dtype)
    return multiplied(hidden, head).double().log_softmax(-1)


def remainder_of(value: float) -> str:
    """A Markdown table of one fp32 master, its bf16 parameter and its remainder."""
    master = torch.tensor([value])
    parameter, remainder = split_master(master)
    again = join_master(parameter, remainder)
    whole = int(master.view(torch.int32)) & 0xFFFFFFFF
    return "\n".join(
        (
            "| | value | bits |",
            "|---|---|---|",
            f"| fp32 master | {value:.9g} | `{whole >> 16:016b}` `{whole & 0xFFFF:016b}` |",
            f"| bf16 parameter | {float(parameter):.9g} "
            f"| `{int(parameter.view(torch.int16)) & 0xFFFF:016b}` |",
            f"| int16 remainder | {int(remainder)} | `{int(remainder) & 0xFFFF:016b}` |",
            f"| both together | {float(again):.9g} | the master, bit for bit |",
        )
    )


def table(curves: Curves, first: str) -> str:
    """The rows of ``Curves.rows`` as a Markdown table, with three significant digits."""
    lines = [
        f"| {first} | " + " | ".join(curves.lines) + " |",
        "|---" * (len(curves.lines) + 1) + "|",
    ]
    for row in curves.rows:
        cells = (f"{line[row]:.3g}" for line in curves.lines.values())
        lines.append(f"| {curves.x[row]:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PLOTS = {
    "second-moment": (second_moment, "steps"),
    "lost-updates": (lost_updates, "learning rate"),
    "flushed-gradients": (flushed, "deviation"),
    "mismatch": (mismatch, "layers"),
}


def blocks() -> dict[str, tuple[str, Curves | None]]:
    """Text and curves of each computed block of the page, by the block's name."""
    made: dict[str, tuple[str, Curves | None]] = {}
    for name, (compute, first) in PLOTS.items():
        curves = compute()
        made[name] = (table(curves, first), curves)
    made["remainder"] = (remainder_of(0.0123456789), None)
    return made


def with_blocks(page: str, made: dict[str, tuple[str, Curves | None]]) -> str:
    """The page, with each block's text inserted between the block's two markers."""
    for name, (text, _) in made.items():
        begin, end = f"<!-- computed:{name} -->", f"<!-- /computed:{name} -->"
        if (page.count(begin), page.count(end)) != (1, 1):
            raise ValueError(f"{PAGE.name} should have {begin} ... {end} once")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return page


def draw(name: str, curves: Curves, folder: Path) -> None:
    """Write ``name``.svg; equal curves and the same matplotlib give equal bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # matplotlib's background and text colours are readable on a light and on a dark page.
    style: dict[str, Any] = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 10}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
        for label, values in curves.lines.items():
            axes.plot(curves.x, values, label=label)
        axes.set(xlabel=curves.axes[0], ylabel=curves.axes[1])
        axes.set_xscale(curves.scales[0])
        axes.set_yscale(curves.scales[1])
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    """Print the tables, or write tables and plots into docs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="into docs/numerics.md and docs/images"
    )
    write = parser.parse_args().write
    made = blocks()
    if not write:
        print("\n\n".join(f"{name}\n\n{text}" for name, (text, _) in made.items()))
        return
    PAGE.write_text(with_blocks(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    IMAGES.mkdir(exist_ok=True)
    for name, (_, curves) in made.items():
        if curves is not None:
            draw(name, curves, IMAGES)


if __name__ == "__main__":
    main()
