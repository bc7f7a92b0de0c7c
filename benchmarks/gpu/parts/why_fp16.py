"""Part 8: why fp16. The mismatch of arXiv 2510.26788, in small.

There a policy's log-probabilities differ between the engine that samples and the trainer that
learns, though both hold the same weights, because their kernels round differently; fp16 has three
bits more than bf16 to round in. Here one model computes the log-probabilities of the same text in
several layouts of its batch, for which a GPU's libraries choose different kernels, and once with
torch's fused attention in place of Megatron's, as an engine that samples has its own; the
Kullback-Leibler divergence from the trainer's own layout is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..bench import Bench
from ..models import SMALL, TINY, Size, shim, trainer
from ..text import Batches, corpus

STEPS, DRY_STEPS = 200, 4
BATCHES, DRY_BATCHES = 4, 2
PRECISIONS = ("bfloat16", "float16")


def run(bench: Bench) -> None:
    means = {precision: one_precision(bench, precision) for precision in PRECISIONS}
    layouts = list(means["bfloat16"])
    bench.record(
        "together",
        "; ".join(
            f"{layout}: KL {means['bfloat16'][layout]:.3g} in bf16, "
            f"{means['float16'][layout]:.3g} in fp16"
            for layout in layouts
        ),
        kl=means,
    )
    # A layout for which all kernels are the same says nothing.
    telling = [layout for layout in layouts if means["bfloat16"][layout] > 0.0]
    says = "wherever the kernels round differently, fp16's divergence is below bf16's"
    if not telling:
        bench.check(says, None, "the kernels of this machine give the same bits in every layout")
    else:
        bench.check_on_gpu(
            says,
            all(means["float16"][one] < means["bfloat16"][one] for one in telling),
            "a CPU's kernels for 16-bit numbers round as no GPU's",
            layouts=telling,
        )


def one_precision(bench: Bench, precision: str) -> dict[str, float]:
    """Train a model in one precision through the shim, and compare its layouts."""
    place = bench.place
    size = TINY if bench.dry else SMALL
    text, held_out = corpus()
    place.tidy()
    with shim():
        made = trainer(place, size, precision)
        batches = Batches(text, size, place.device, seed=0)
        for _ in range(DRY_STEPS if bench.dry else STEPS):
            made.train_step(batches.next())
    asked = Batches(held_out, size, place.device, seed=7)
    sums: dict[str, list[dict[str, float]]] = {}
    with torch.no_grad():
        for _ in range(DRY_BATCHES if bench.dry else BATCHES):
            for layout, figures in compare(made, asked.next(), size):
                sums.setdefault(layout, []).append(figures)
    found = {
        layout: {key: sum(one[key] for one in rows) / len(rows) for key in rows[0]}
        for layout, rows in sums.items()
    }
    bench.record(
        precision,
        "; ".join(
            f"{layout}: KL {figures['kl']:.3g}, log-probability of a taken byte off by "
            f"{figures['largest']:.3g} at most"
            for layout, figures in found.items()
        ),
        precision=precision,
        layouts=found,
    )
    return {layout: figures["kl"] for layout, figures in found.items()}


def compare(made: Any, tokens: torch.Tensor, size: Size) -> Iterator[tuple[str, dict[str, float]]]:
    """Each layout beside the reference, over the same predictions."""
    inputs, taken = tokens[:, :-1].contiguous(), tokens[:, 1:]
    reference = log_probabilities(made, inputs)
    for layout, found in layouts(made, inputs, size):
        chosen = taken.unsqueeze(-1)
        apart = (found.gather(-1, chosen) - reference.gather(-1, chosen)).abs()
        kl = (reference.exp() * (reference - found)).sum(-1)
        yield (
            layout,
            {
                # Rounding in fp64 leaves a sum of zero a little below it.
                "kl": max(float(kl.mean()), 0.0),
                "mean": float(apart.mean()),
                "largest": float(apart.max()),
            },
        )


def layouts(made: Any, inputs: torch.Tensor, size: Size) -> Iterator[tuple[str, torch.Tensor]]:
    """The same predictions, computed otherwise; exact arithmetic would give the same numbers."""
    alone = [log_probabilities(made, row.unsqueeze(0)) for row in inputs]
    yield "each sequence alone", torch.cat(alone)
    half = size.length // 2
    # No position sees a later one, so that the first half of a text has its own predictions.
    front = log_probabilities(made, inputs[:, :half].contiguous())
    whole = log_probabilities(made, inputs)
    yield "the first half without the second", torch.cat([front, whole[:, half:]], dim=1)
    filler = torch.zeros_like(inputs[:, : max(half // 2, 1)])
    padded = log_probabilities(made, torch.cat([inputs, filler], dim=1))
    yield "padded behind", padded[:, : size.length]
    with fused_attention(made.model):
        yield "fused attention", log_probabilities(made, inputs)


@contextmanager
def fused_attention(model: torch.nn.Module) -> Iterator[None]:
    """Have Megatron's attention computed by torch's fused kernel inside."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    modules = [one for one in model.modules() if isinstance(one, DotProductAttention)]
    if not modules:
        raise RuntimeError("the model has no DotProductAttention of Megatron's")
    for one in modules:
        one.forward = _fused(float(one.softmax_scale))
    try:
        yield
    finally:
        for one in modules:
            del one.forward


def _fused(scale: float) -> Callable[..., torch.Tensor]:
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any
    ) -> torch.Tensor:
        # Megatron has [position, batch, head, width], torch [batch, head, position, width].
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale
        )
        return context.permute(2, 0, 1, 3).flatten(2)

    return forward


def log_probabilities(made: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Of all next bytes, in fp64 from the model's own logits."""
    logits: torch.Tensor = made.logits(inputs)
    return torch.log_softmax(logits.double(), dim=-1)
