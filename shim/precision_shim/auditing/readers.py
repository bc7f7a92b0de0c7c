"""Choose a reader function for each optimizer of an audit, and read the optimizers and the model.

``registry.audit_readers`` maps the package of an optimizer's class to a reader, imported on use.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import AuditError
from ..process.registry import audit_readers
from .reading import Reading, gradients_of, inside, tensors_of, unique
from .torch_reader import read_torch, shards_by_gathered

_NO_HELPERS = ("builtins", "collections", "functools", "torch")
"""Modules whose objects the audit does not search for a model's tensors."""


def read_optimizers(
    model: Any, optimizer: Any, scaler: Any = None, *, whole: bool = True
) -> list[Reading]:
    """Read a model and its optimizers; see ``audits.look`` for the arguments.

    Raises:
        AuditError: there is no reader for the model or the optimizer.
    """
    chunks = _chunks(model)
    optimizers = unique(_each(optimizer))
    if not optimizers and not chunks:
        raise AuditError(
            "audit(None, None): there is nothing to read. Pass a module, an optimizer, or both."
        )
    groups: dict[str, list[Any]] = {}
    for each in optimizers:
        groups.setdefault(_reader(each), []).append(each)
    readings: list[Reading] = []
    for place, several in groups.items():
        if place:
            readings += pkgutil.resolve_name(place)(chunks, several)
        else:
            readings += read_torch(chunks, several, scaler)
    if not readings:
        readings = [Reading("torch", "model", "none")]
    # An audit of only the experts' optimizer omits the tensors in the dense optimizer's audit.
    if whole or readings[0].name != "experts":
        _give_the_rest(chunks, readings, whole)
    seen: dict[str, int] = {}
    for reading in readings:
        seen[reading.name] = seen.get(reading.name, 0) + 1
        if seen[reading.name] > 1:
            reading.name += f" {seen[reading.name]}"
    return readings


def _chunks(model: Any) -> list[torch.nn.Module]:
    if model is None:
        return []
    chunks = list(model) if isinstance(model, (list, tuple, torch.nn.ModuleList)) else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise AuditError(
                f"audit(model=...): {_kind(chunk)} is no module; allowed: a torch.nn.Module, a "
                "list of them (Megatron's model chunks), or None."
            )
    return chunks


def _each(optimizer: Any) -> Iterator[Any]:
    """Yield the single optimizers in a list, a chain or a container of optimizers."""
    if optimizer is None:
        return
    several = inside(optimizer)
    if several is not None:
        for inner in several:
            yield from _each(inner)
        return
    if not isinstance(optimizer, torch.optim.Optimizer) and not _reader(optimizer):
        raise AuditError(
            f"audit(optimizer=...): {_kind(optimizer)} is no optimizer that can be read; allowed: "
            "a torch.optim.Optimizer, an optimizer of "
            f"{', '.join(sorted(audit_readers()))} (chained or single), or a list of these."
        )
    yield optimizer


def _reader(optimizer: Any) -> str:
    """Return an optimizer's reader as ``"module:function"``; empty for torch's optimizers."""
    packages = [kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__]
    if isinstance(optimizer, torch.optim.Optimizer):
        return ""  # use torch's reader even if the class's package has another reader.
    for third_party in (False, True):  # Load third-party adapters only if the shim has no reader
        readers = audit_readers(third_party=third_party)
        for package in packages:
            if package in readers:
                return readers[package]
    return ""


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _give_the_rest(
    chunks: Sequence[torch.nn.Module], readings: Sequence[Reading], whole: bool
) -> None:
    """Add the rest of the model's parameters and tensors to the first ``Reading``.

    If ``whole`` is false, no trainable parameters are added: another optimizer may train them.
    """
    taken = {id(parameter) for each in readings for parameter in (*each.trainable, *each.frozen)}
    gathered = shards_by_gathered(chunks)
    first = readings[0]
    for parameter in unique(p for chunk in chunks for p in chunk.parameters()):
        if id(parameter) in taken:
            continue
        if id(parameter) in gathered:  # a temporary copy that FSDP gathered from shards
            first.also_params.append(parameter)
            continue
        if not parameter.requires_grad:
            first.frozen.append(parameter)
        elif whole:
            first.trainable.append(parameter)
            first.gradients += gradients_of(parameter)
    first.other += _other_tensors(chunks)


def _other_tensors(chunks: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the modules' buffers, and tensor attributes of modules and their helper objects."""
    found: list[torch.Tensor] = []
    helpers: dict[int, Any] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        attributes = vars(module)
        for value in (*attributes["_buffers"].values(), *attributes.values()):
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif type(value).__module__ not in _NO_HELPERS and hasattr(value, "__dict__"):
                helpers[id(value)] = value
    for helper in helpers.values():
        if not isinstance(helper, (torch.nn.Module, type)) and isinstance(vars(helper), dict):
            found += tensors_of(helper)
    return found
