"""Part 8: why fp16. A small version of the mismatch in arXiv 2510.26788.

In the paper, rollout engine and trainer have the same weights, but their kernels round
differently. Their log-probabilities differ less in fp16 than in bf16, because fp16 has three more
bits. This part computes one model's log-probabilities of one text in several batch layouts, for
which a GPU's libraries choose different kernels. One more layout uses torch's fused attention
instead of Megatron's. The result is each layout's KL divergence from the trainer's layout.
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
    # A layout without any divergence in bf16 cannot show whether fp16 diverges less.
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
    """Train a model in one precision with the shim, and compare its batch layouts."""
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
    """Compare each layout's predictions with those of the trainer's layout."""
    inputs, taken = tokens[:, :-1].contiguous(), tokens[:, 1:]
    reference = log_probabilities(made, inputs)
    for layout, found in layouts(made, inputs, size):
        chosen = taken.unsqueeze(-1)
        apart = (found.gather(-1, chosen) - reference.gather(-1, chosen)).abs()
        kl = (reference.exp() * (reference - found)).sum(-1)
        yield (
            layout,
            {
                # Rounding in fp64 can make a divergence of zero slightly negative.
                "kl": max(float(kl.mean()), 0.0),
                "mean": float(apart.mean()),
                "largest": float(apart.max()),
            },
        )


def layouts(made: Any, inputs: torch.Tensor, size: Size) -> Iterator[tuple[str, torch.Tensor]]:
    """Compute the same predictions in other layouts; exact arithmetic would give equal numbers."""
    alone = [log_probabilities(made, row.unsqueeze(0)) for row in inputs]
    yield "each sequence alone", torch.cat(alone)
    half = size.length // 2
    # Attention is causal: predictions in the first half do not depend on the second half.
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
    """Replace Megatron's attention by torch's fused kernel within the block."""
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
        # Megatron uses [position, batch, head, width], torch [batch, head, position, width].
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale
        )
        return context.permute(2, 0, 1, 3).flatten(2)

    return forward


def log_probabilities(made: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all 256 possible next bytes, in fp64."""
    logits: torch.Tensor = made.logits(inputs)
    return torch.log_softmax(logits.double(), dim=-1)
