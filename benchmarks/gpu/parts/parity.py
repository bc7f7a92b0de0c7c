"""Part 3: the loss on real text with and without the shim, and its spread over seeds."""

from __future__ import annotations

import statistics

import torch

from ..bench import Bench
from ..models import SMALL, TINY, shim, trainer
from ..text import Batches, corpus

SEEDS = (0, 1, 2)
STEPS, DRY_STEPS = 300, 6
HELD_OUT, DRY_HELD_OUT = 16, 2


def run(bench: Bench) -> None:
    finals: dict[bool, list[float]] = {False: [], True: []}
    for seed in SEEDS:
        for on in (False, True):
            finals[on].append(train(bench, on, seed))
    judge(bench, finals[False], finals[True])


def train(bench: Bench, on: bool, seed: int) -> float:
    """Train one model, and return its final loss on the held-out text."""
    place = bench.place
    size = TINY if bench.dry else SMALL
    text, held_out = corpus()
    batches = Batches(text, size, place.device, seed)
    place.tidy()
    losses: list[torch.Tensor] = []
    with shim(on):
        made = trainer(place, size, seed=seed)
        for _ in range(DRY_STEPS if bench.dry else STEPS):
            losses.append(made.forward_backward(batches.next()))
            made.update()
        final = float(evaluate(bench, made, held_out))
    name = "with" if on else "without"
    values = [float(one) for one in losses]
    bench.record(
        f"{name}, seed {seed}",
        f"{len(values)} steps, loss {values[0]:.4f} to {values[-1]:.4f}, held out {final:.4f}",
        shim=on,
        seed=seed,
        losses=values,
        held_out=final,
    )
    return final


def evaluate(bench: Bench, made: object, text: torch.Tensor) -> torch.Tensor:
    """Loss in nats per byte on held-out text; every run uses the same windows of the text."""
    size = TINY if bench.dry else SMALL
    batches = Batches(text, size, bench.place.device, seed=1234)
    losses = []
    with torch.no_grad():
        for _ in range(DRY_HELD_OUT if bench.dry else HELD_OUT):
            tokens = batches.next()
            logits = made.logits(tokens[:, :-1].contiguous())  # type: ignore[attr-defined]
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), tokens[:, 1:].flatten()
                )
            )
    return torch.stack(losses).mean()


def judge(bench: Bench, without: list[float], with_it: list[float]) -> None:
    """Check that the mean losses differ by at most the spread of the seeds without the shim."""
    spread = max(without) - min(without)
    apart = abs(statistics.fmean(with_it) - statistics.fmean(without))
    pairs = [b - a for a, b in zip(without, with_it, strict=True)]
    bench.record(
        "together",
        f"held out {statistics.fmean(without):.4f} without, {statistics.fmean(with_it):.4f} with; "
        f"seeds differ by {spread:.4f}",
        without=without,
        with_it=with_it,
        spread=spread,
        pairs=pairs,
    )
    bench.check(
        "the mean loss with the shim is inside the spread of the seeds without it",
        apart <= spread,
        apart=apart,
        spread=spread,
    )
