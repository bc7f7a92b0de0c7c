"""Computes the mismatch of trainer and rollout by quantized format, for docs/numerics.md.

    python -m benchmarks.formats            # prints the table
    python -m benchmarks.formats --write    # writes it into docs/numerics.md

Models, prompts, real vLLM and trainer are those of ``benchmarks/both_sides.py``, both in bf16. The
linear layers are quantized on either side, except the LM head: torchao quantizes weights and
activations as on a GPU, a matrix product of the quantized numbers is computed in fp32, and its
result is rounded to bf16. `tox run -e vllm-0.30.0 --notest` makes the environment.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import both_sides
from .both_sides import Size

PAGE = both_sides.ROOT / "docs" / "numerics.md"
MARKERS = "<!-- computed:formats -->", "<!-- /computed:formats -->"
E4M3 = torch.float8_e4m3fn
Rounding = Callable[[torch.Tensor], torch.Tensor]


def scaled_e4m3(block: tuple[int, int] | None = None) -> Rounding:
    """Round a matrix to e4m3 with an fp32 scale for each block; ``None``: for the whole matrix."""
    from torchao.quantization import quant_primitives as torchao

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        shape = list(block or matrix.shape)
        scale = torchao._choose_scale_float8(matrix, shape, E4M3, hp_value_lb=1e-12)
        quantized = torchao._quantize_affine_float8(matrix, scale, E4M3)
        return torchao._dequantize_affine_float8(quantized, scale)

    return rounded


def mxfp8(matrix: torch.Tensor) -> torch.Tensor:
    """Round a matrix to e4m3 with a power of two as scale for each 1x32 block, as cuBLAS does."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(matrix, E4M3, 32, ScaleCalculationMode.RCEIL).dequantize(torch.float32)


def nvfp4(matrix: torch.Tensor) -> torch.Tensor:
    """Round a matrix to e2m1: an e4m3 scale for each 1x16 block, an fp32 scale for the matrix."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(matrix.abs().max())
    made = NVFP4Tensor.to_nvfp4(matrix, per_tensor_scale=scale)
    return made.dequantize(torch.float32)


@dataclass(frozen=True)
class Format:
    """How the linear layers round: the weights, and the activations."""

    weights: Rounding
    activations: Rounding

    def product(
        self, activations: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of quantized activations and weights, rounded to the activations' dtype.

        Args:
            activations: in bf16, as the layer gets them.
            weights: quantized, in fp32.
            bias: in bf16.
        """
        rows = activations.reshape(-1, activations.shape[-1]).float()
        with torch.autocast("cpu", enabled=False):
            out = torch.nn.functional.linear(
                self.activations(rows), weights, None if bias is None else bias.float()
            )
        return out.to(torch.bfloat16).view(*activations.shape[:-1], -1)


def formats() -> dict[str, Format | None]:
    """Each format by its name in the table; bf16 quantizes nothing."""
    return {
        "bf16": None,
        "fp8, blocks": Format(scaled_e4m3((128, 128)), scaled_e4m3((1, 128))),
        "fp8, per tensor": Format(scaled_e4m3(), scaled_e4m3()),
        "mxfp8": Format(mxfp8, mxfp8),
        "nvfp4": Format(nvfp4, nvfp4),
    }


PAIRS = (
    ("bf16", "bf16"),
    ("bf16", "fp8, blocks"),
    ("fp8, blocks", "fp8, blocks"),
    ("fp8, blocks", "fp8, per tensor"),
    ("bf16", "fp8, per tensor"),
    ("fp8, per tensor", "fp8, per tensor"),
    ("bf16", "mxfp8"),
    ("mxfp8", "mxfp8"),
    ("bf16", "nvfp4"),
    ("nvfp4", "nvfp4"),
)
"""The table's rows: the trainer's format and the rollout's."""


@dataclass(frozen=True)
class Mismatch:
    """How far two engines disagree on the sampled tokens: k3, and the largest difference."""

    k3: float
    largest: float


@contextmanager
def in_vllm(used: Format) -> Iterator[None]:
    """Make vLLM's engines, started in the ``with`` block, compute their linear layers so."""
    both_sides.load_vllm()
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def after_loading(_: Any, layer: Any) -> None:
        layer.quantized = used.weights(layer.weight.float())

    def apply(_: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return used.product(x, layer.quantized, bias)

    with mock.patch.multiple(
        UnquantizedLinearMethod, process_weights_after_loading=after_loading, apply=apply
    ):
        yield


def in_trainer(used: Format) -> Callable[[Any], None]:
    """A function that makes a model compute its linear layers so, except its LM head."""

    def change(model: Any) -> None:
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head"):
                layer.forward = _forward(used, used.weights(layer.weight.float()), layer.bias)

    return change


def _forward(used: Format, weights: torch.Tensor, bias: torch.Tensor | None) -> Rounding:
    return lambda activations: used.product(activations, weights, bias)


def measure(size: Size, seed: int, folder: Path) -> dict[tuple[str, str], Mismatch]:
    """Measure the mismatch of each pair of formats, with one random model."""
    model, prompts = both_sides.random_model(size, seed), both_sides.random_prompts(size, seed)
    model.save_pretrained(folder)
    found, every = {}, formats()
    for rollout, theirs in every.items():
        with (
            in_vllm(theirs) if theirs else nullcontext(),
            both_sides.engine(folder, "bfloat16", size.prompt + size.new) as llm,
        ):
            sampled = both_sides.sample(llm, prompts, size.new)
        for trainer in (one for one, other in PAIRS if other == rollout):
            ours = every[trainer]
            change = [in_trainer(ours)] if ours else []
            scored = both_sides.score(model, sampled, torch.bfloat16, *change).double()
            largest = float((scored - sampled.logprobs).abs().max())
            k3 = both_sides.mismatch(scored, sampled.logprobs).k3
            found[trainer, rollout] = Mismatch(k3, largest)
    return found


def table(runs: Sequence[dict[tuple[str, str], Mismatch]]) -> str:
    """A Markdown table: median, minimum and maximum over the seeds.

    The last column is k3 divided by the k3 of bf16 on both sides with the same seed.
    """
    lines = [
        "| trainer | rollout | k3 | largest \\|Δ log p\\| | k3 / k3 of bf16 on both sides |",
        "|---|---|---|---|---|",
    ]
    for pair in PAIRS:
        cells = [
            both_sides.spread([run[pair].k3 for run in runs]),
            both_sides.spread([run[pair].largest for run in runs]),
            both_sides.spread([run[pair].k3 / run["bf16", "bf16"].k3 for run in runs]),
        ]
        lines.append(f"| {' | '.join([*pair, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the mismatch, and print the table or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for one in fields(Size):
        parser.add_argument(f"--{one.name}", type=int, default=one.default)
    parser.add_argument("--seeds", type=int, default=3, help="random models, one after another")
    parser.add_argument("--write", action="store_true", help="into docs/numerics.md")
    asked = parser.parse_args()
    if asked.write:
        both_sides.with_table(PAGE, "", MARKERS)  # before minutes of work
    size = Size(**{one.name: getattr(asked, one.name) for one in fields(Size)})
    torch.set_num_threads(1)
    runs = []
    for seed in range(asked.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measure(size, seed, Path(folder)))
    ran = both_sides.what_was_run(size, asked.seeds).rstrip(".")
    text = f"{table(runs)}\n\n{ran}, torchao {version('torchao')}."
    both_sides.show(PAGE, text, MARKERS, write=asked.write)


if __name__ == "__main__":
    main()
