"""Count lost updates if LoRA is merged into the weights of a rollout engine.

A rollout engine's copy of a matrix W is W + scale * B@A, rounded. The meter samples random elements
of each matrix. Before and after the optimizer's step, the meter reads the rows of B and the columns
of A that determine the sampled elements. Each rank must have the whole factors A and B. Sharded
factors are not measured, because only a collective operation could assemble them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..auditing.reading import local
from ..precision.dtypes import name_of
from .meters import Rollout
from .sampling import allot

MOST_ELEMENTS = 1 << 14
"""Maximum number of measured elements, over all matrices together."""

MOST_LAYERS = 64
"""Maximum number of matrices that are measured."""


@dataclass(frozen=True)
class Layer:
    """A linear layer with LoRA.

    Attributes:
        base: the layer's weight matrix W.
        a: the factor A, which is applied to the input first.
        b: the factor B.
        scale: the number that multiplies the product B@A.
        product: the dtype in which the framework computes B@A.
    """

    base: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    product: torch.dtype


@dataclass(frozen=True)
class _Before:
    """A layer's values of B@A and of the rollout copies before a step, at sampled positions."""

    layer: Layer
    rows: torch.Tensor
    columns: torch.Tensor
    product: torch.Tensor
    copies: torch.Tensor


class Merged:
    """Samples those matrices of a model into which LoRA is merged.

    Args:
        chunks: the model's modules; stored as weak references.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = [weakref.ref(chunk) for chunk in chunks]
        self._before: list[_Before] = []
        self._dtypes: tuple[torch.dtype, ...] = ()
        self._places: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._said = False

    def take(self, rollout: Rollout) -> str:
        """Compute the sampled elements of the rollout copies before a step, if LoRA is merged.

        Args:
            rollout: how the weights reach the rollout engine.

        Returns:
            The reason why no layer can be measured, returned only once; otherwise ``""``.
        """
        self._before, self._dtypes = [], rollout.dtypes
        if not (rollout.merged and rollout.dtypes):
            return ""
        layers, reason = lora_layers(
            [chunk for ref in self._chunks if (chunk := ref()) is not None]
        )
        layers = layers[:: -(-len(layers) // MOST_LAYERS) or 1]
        for layer, (rows, columns) in zip(layers, self._sample(layers), strict=True):
            product, copies = self._read(layer, rows, columns)
            self._before.append(_Before(layer, rows, columns, product, copies))
        if layers or self._said:
            return ""
        self._said = True
        return reason

    def compare(self) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, int, Any]]:
        """Compute the rollout copies after the step, and count each layer's unchanged copies.

        Yields:
            For each layer: device, number of changed elements of B@A (a tensor), number of changed
            elements with an unchanged copy (a tensor), sample size, dtypes of the copy.
        """
        before, self._before = self._before, []
        for sample in before:
            product, copies = self._read(sample.layer, sample.rows, sample.columns)
            base = local(sample.layer.base).detach()[sample.rows, sample.columns]
            changed = (product != sample.product) & base.isfinite()
            stale = (changed & (copies == sample.copies)).sum()
            chain = (sample.layer.base.dtype, *self._dtypes)
            kept = chain[1:] if chain[0] in (chain[1], torch.float32) else chain
            yield product.device, changed.sum(), stale, len(sample.rows), kept

    def _read(
        self, layer: Layer, rows: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def some(factor: torch.Tensor, axis: int, at: torch.Tensor) -> torch.Tensor:
            taken = local(factor).detach().index_select(axis, at)
            return taken.to(layer.product).double()

        exact = (some(layer.b, 0, rows) * some(layer.a, 1, columns).T).sum(1)
        change = (exact.to(layer.product).double() * layer.scale).to(layer.product)
        base = local(layer.base).detach()[rows, columns]
        copies = (base.double() + change.double()).to(base.dtype)
        for dtype in self._dtypes:
            copies = copies.to(dtype)
        return exact, copies

    def _sample(self, layers: Sequence[Layer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        key = tuple((its.base.shape, its.base.device) for its in layers)
        if key not in self._places:
            generator = torch.Generator("cpu").manual_seed(0)
            self._places = {key: []}
            sizes = [its.base.numel() for its in layers]
            for layer, count in zip(layers, allot(sizes, MOST_ELEMENTS), strict=True):
                drawn = (
                    torch.randint(size, (count,), generator=generator, device="cpu")
                    for size in layer.base.shape
                )
                device = local(layer.base).device
                rows, columns = (indices.to(device, non_blocking=True) for indices in drawn)
                self._places[key].append((rows, columns))
        return self._places[key]


def lora_layers(chunks: Sequence[torch.nn.Module]) -> tuple[list[Layer], str]:
    """Return the LoRA layers that can be measured, and a reason why a layer cannot be measured.

    Args:
        chunks: a model's modules.
    """
    layers, reasons = [], []
    for module in (module for chunk in chunks for module in chunk.modules()):
        if not (hasattr(module, "lora_A") and hasattr(module, "lora_B")):
            continue
        layer = _of_peft(module) if hasattr(module, "base_layer") else _of_automodel(module)
        if isinstance(layer, Layer):
            layer = _check(layer)
        if isinstance(layer, Layer):
            layers.append(layer)
        else:
            reasons.append(layer)
    return layers, reasons[0] if reasons else "no LoRA layer of a known kind is in the model"


def _of_peft(module: Any) -> Layer | str:
    """Return the ``Layer`` of a LoRA module of peft, or the reason why it cannot be measured."""
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1 or getattr(module, "merged_adapters", None):
        return "a layer has another number of active LoRA adapters than one, or a merged one"
    (name,) = active
    plain = not (
        getattr(module, "use_dora", {}).get(name)
        or getattr(module, "lora_variant", {}).get(name)
        or getattr(module, "lora_bias", {}).get(name)
        or getattr(module, "fan_in_fan_out", False)
    )
    if not plain:
        return "a layer's LoRA is a variant, such as DoRA"
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    return Layer(module.get_base_layer().weight, a, b, float(module.scaling[name]), b.dtype)


def _of_automodel(module: Any) -> Layer | str:
    """Return the ``Layer`` of Automodel's LoRA, whose ``product`` is the base weight's dtype."""
    base, scale = getattr(module, "weight", None), getattr(module, "scale", None)
    a, b = (getattr(adapter, "weight", None) for adapter in (module.lora_A, module.lora_B))
    known = isinstance(scale, (int, float)) and not getattr(module, "use_dora", False)
    if known and all(isinstance(weight, torch.Tensor) for weight in (base, a, b)):
        return Layer(base, a, b, float(scale), base.dtype)  # type: ignore[arg-type, union-attr]
    return f"{type(module).__name__} is no LoRA layer of a known kind"


def _check(layer: Layer) -> Layer | str:
    tensors = (layer.base, layer.a, layer.b)
    if any(tensor.ndim != 2 for tensor in tensors):
        return "a layer with LoRA is no matrix"
    if any(local(tensor).shape != tensor.shape for tensor in tensors):
        return "the factors of LoRA are sharded over the ranks, so that no rank has a whole product"
    odd = [
        tensor.dtype
        for tensor in tensors
        if not tensor.is_floating_point() or tensor.element_size() == 1
    ]
    if odd:
        return f"a matrix with LoRA is in {name_of(odd[0])}"
    (rows, rank), (same, columns) = layer.b.shape, layer.a.shape
    if rank != same or layer.base.shape != (rows, columns):
        return "a layer's matrix and the product of its LoRA factors have different shapes"
    return layer
