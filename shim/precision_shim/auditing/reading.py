"""Reads an optimizer and its model: the live tensors, and what the optimizer's config says.

A reader turns optimizers into ``Reading`` objects. The reader in this module knows torch's
optimizers, DTensors and FSDP. ``registry.audit_readers`` has the readers of other optimizers, by
the top-level package of the optimizer's class; the audit of such an optimizer imports its reader.

Nothing here starts an operation on a tensor: it reads sizes, dtypes, devices and storages only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import AuditError
from ..process.registry import audit_readers

SIXTEEN_BIT = (torch.bfloat16, torch.float16)

_INNER = (
    "_data",
    "_transpose",
    "_scale_inv",
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
)
"""Attributes in which TransformerEngine's quantized tensors keep the tensors that they wrap."""

_NO_HELPERS = ("builtins", "collections", "functools", "torch")

_MODEL_PARALLEL = ("tp", "pp", "cp", "sp", "ep")
"""Names of the dimensions of a device mesh that divide the model and not the data."""


@dataclass(frozen=True)
class Wanted:
    """What an optimizer's config says about its tensors.

    Attributes:
        source: name of the config, for messages.
        params: dtype of the trainable parameters; ``None`` where the config does not say, here
            and below.
        main_grads: dtype of the gradient bucket of 16-bit parameters.
        masters: dtype of the master for each 16-bit parameter dtype; empty where the config does
            not say.
        exp_avg: dtype of the first moment.
        exp_avg_sq: dtype of the second moment.
        remedies: the end of a problem's message, by the problem's code. ``{wanted}`` stands for
            the expected dtype, ``{source}`` for ``source``, ``{component}`` and ``{optimizer}``
            for a moment and its optimizer, ``{params}`` for the dtypes of parameters without
            masters. The key ``"CODE DTYPE"`` goes before ``"CODE"``.
    """

    source: str
    params: torch.dtype | None = None
    main_grads: torch.dtype | None = None
    masters: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    exp_avg: torch.dtype | None = None
    exp_avg_sq: torch.dtype | None = None
    remedies: Mapping[str, str] = field(default_factory=dict)

    def remedy(self, code: str, wanted: str, **words: str) -> str:
        """What the user can do about a problem."""
        known = self.remedies
        text = known.get(f"{code} {wanted}") or known.get(code) or "correct the {source}"
        return text.format(wanted=wanted, source=self.source, **words)


@dataclass
class Owned:
    """One parameter, or this rank's share of it, as its optimizer steps it.

    Attributes:
        dtype: dtype of the parameter in the model.
        stepped: the tensor that the optimizer steps: the parameter's share, or its master.
        masters: tensors with bits that the model's parameter lacks: a master or a remainder.
        exp_avg: first moment.
        exp_avg_sq: second moment.
        other: the other tensors of the parameter's state.
    """

    dtype: torch.dtype
    stepped: torch.Tensor
    masters: tuple[torch.Tensor, ...] = ()
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    other: tuple[torch.Tensor, ...] = ()

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has made the parameter's states."""
        return self.exp_avg is not None or self.exp_avg_sq is not None or bool(self.other)

    def take(self, state: Mapping[Any, Any]) -> None:
        """Sort an optimizer's state of this parameter into the fields."""
        other = list(self.other)
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if name == "exp_avg":
                self.exp_avg = value
            elif name == "exp_avg_sq":
                self.exp_avg_sq = value
            elif name in ("master_param", "master_weight"):
                if all(value is not one for one in self.masters):
                    self.masters += (value,)
            else:
                other.append(value)
        self.other = tuple(other)


@dataclass(frozen=True)
class Foretold:
    """What an optimizer says about states that its first step will make.

    Attributes:
        exp_avg: takes the tensor that the optimizer steps, and returns the dtype of its first
            moment; ``None`` where the optimizer does not say.
        exp_avg_sq: the same for the second moment.
        master: takes a parameter's dtype, and returns the dtype of its master; ``None`` where the
            optimizer makes no masters.
    """

    exp_avg: Callable[[torch.Tensor], torch.dtype | None] | None = None
    exp_avg_sq: Callable[[torch.Tensor], torch.dtype | None] | None = None
    master: Callable[[torch.dtype], torch.dtype | None] | None = None


@dataclass
class Reading:
    """One optimizer and the parameters that it trains.

    Attributes:
        framework: the package of the optimizer's class, for ``Audit.framework``.
        name: ``"model"``, ``"dense"`` or ``"experts"``.
        optimizer: name of the optimizer's class.
        trainable: trainable parameters of the model.
        frozen: the model's other parameters.
        buckets: gradient buckets, padding included.
        bucket_views: views into the buckets, one for each parameter's gradient.
        owned: the parameters that the optimizer steps on this rank.
        gradients: ``grad`` and ``decoupled_grad`` of tensors, in a bucket or not, and host copies.
        other: tensors of no parameter: scales, the model's buffers, the scaler's tensors.
        also_params: further storages of parameters, such as an offloaded copy.
        data_parallel_size: number of ranks in the data-parallel group.
        sharded: whether each of these ranks holds only a share of the states.
        params_sharded: whether each holds only a share of the model's parameters.
        scaler: the loss scaler.
        betas: the different ``betas`` of the optimizer's parameter groups.
        foretold: what the optimizer says about states that it has not made yet.
        copies_later: whether a step makes copies of the gradients.
        stateless: whether the optimizer keeps no states at all.
        wanted: what the optimizer's config says; ``None`` for an optimizer without a config.
        steppers: the torch optimizers inside; the first one's step is the optimizer's step.
    """

    framework: str
    name: str
    optimizer: str
    trainable: list[torch.Tensor] = field(default_factory=list)
    frozen: list[torch.Tensor] = field(default_factory=list)
    buckets: list[torch.Tensor] = field(default_factory=list)
    bucket_views: list[torch.Tensor] = field(default_factory=list)
    owned: list[Owned] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    other: list[torch.Tensor] = field(default_factory=list)
    also_params: list[torch.Tensor] = field(default_factory=list)
    data_parallel_size: int = 1
    sharded: bool = False
    params_sharded: bool = False
    scaler: Any = None
    betas: tuple[tuple[float, ...], ...] = ()
    foretold: Foretold = field(default_factory=Foretold)
    copies_later: bool = False
    stateless: bool = False
    wanted: Wanted | None = None
    steppers: list[Any] = field(default_factory=list)

    @property
    def states_unknown(self) -> bool:
        """Whether there are no states yet, and the optimizer does not say which it will make."""
        told = self.foretold.exp_avg is not None or self.stateless
        return bool(self.owned) and not told and not any(one.has_state for one in self.owned)

    @property
    def parameters(self) -> int:
        """Number of trainable parameters of the model."""
        return sum(one.numel() for one in self.trainable)

    @property
    def owned_parameters(self) -> int:
        """Number of trainable parameters that the optimizer steps on this rank."""
        return sum(local(one.stepped).numel() for one in self.owned)

    @property
    def scaler_name(self) -> str | None:
        """Class name of the loss scaler, if there is one and it is on."""
        enabled = getattr(self.scaler, "is_enabled", None)
        if self.scaler is None or (callable(enabled) and not enabled()):
            return None
        return type(self.scaler).__name__

    def later(self, component: str) -> set[torch.dtype]:
        """Dtypes of a component that the first step will make, for parameters without states."""
        waiting = [one for one in self.owned if not one.has_state]
        if component == "master":
            tell = self.foretold.master
            found = {tell(one.dtype) for one in waiting if not one.masters} if tell else set()
        else:
            by_tensor = getattr(self.foretold, component, None)
            found = {by_tensor(one.stepped) for one in waiting} if by_tensor else set()
        return {one for one in found if one is not None}


# -- which reader --------------------------------------------------------------------------------


def read(model: Any, optimizer: Any, scaler: Any = None, *, whole: bool = True) -> list[Reading]:
    """Read a model and its optimizers.

    Args:
        model: a module, a list of modules, or ``None``.
        optimizer: an optimizer, a list of them, or ``None`` for a model alone.
        scaler: loss scaler of torch's optimizers.
        whole: whether ``optimizer`` has all of the model's optimizers.

    Raises:
        AuditError: no reader knows the model or the optimizer.
    """
    chunks = _chunks(model)
    optimizers = unique(_each(optimizer))
    if scaler is not None and not hasattr(scaler, "__dict__"):  # a number, such as the scale
        raise AuditError(
            f"audit(scaler=...): {_kind(scaler)} is no loss scaler; allowed: an object such as "
            "torch.amp.GradScaler(), or None."
        )
    if not optimizers and not chunks:
        raise AuditError(
            "audit(None, None): there is nothing to read. Pass a module, an optimizer, or both."
        )
    groups: dict[str, list[Any]] = {}
    for one in optimizers:
        groups.setdefault(_reader(one), []).append(one)
    readings: list[Reading] = []
    for place, several in groups.items():
        if place:
            module, _, name = place.partition(":")
            readings += getattr(importlib.import_module(module), name)(chunks, several)
        else:
            readings += _read_torch(chunks, several, scaler)
    if not readings:
        readings = [Reading("torch", "model", "none")]
    if whole or readings[0].name != "experts":  # else the dense optimizer's audit has the rest
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
    for one in chunks:
        if not isinstance(one, torch.nn.Module):
            raise AuditError(
                f"audit(model=...): {_kind(one)} is no module; allowed: a torch.nn.Module, a list "
                "of them (Megatron's model chunks), or None."
            )
    return chunks


def _each(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a list, in a chain or in a container, one by one."""
    if optimizer is None:
        return
    if isinstance(optimizer, (list, tuple)):
        for one in optimizer:
            yield from _each(one)
        return
    for name in ("chained_optimizers", "optimizers"):
        inside = getattr(optimizer, name, None)
        if isinstance(inside, (list, tuple)):
            yield from _each(inside)
            return
    if not isinstance(optimizer, torch.optim.Optimizer) and not _reader(optimizer):
        raise AuditError(
            f"audit(optimizer=...): {_kind(optimizer)} is no optimizer that can be read; allowed: "
            "a torch.optim.Optimizer, an optimizer of "
            f"{', '.join(sorted(audit_readers()))} (chained or single), or a list of these."
        )
    yield optimizer


def _reader(optimizer: Any) -> str:
    """``module:function`` of an optimizer's reader; empty for the reader of torch's."""
    packages = [kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__]
    if isinstance(optimizer, torch.optim.Optimizer):
        return ""  # even if the class is from a package that has a reader
    for third_party in (False, True):  # load third parties' adapters only if none of ours fits
        known = audit_readers(third_party=third_party)
        for one in packages:
            if one in known:
                return known[one]
    return ""


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _give_the_rest(
    chunks: Sequence[torch.nn.Module], readings: Sequence[Reading], whole: bool
) -> None:
    """Give the first reading the parameters and tensors of the model that no reading has.

    Without ``whole`` trainable parameters are left out: another optimizer may train them.
    """
    taken = {id(one) for each in readings for one in (*each.trainable, *each.frozen)}
    gathered = _shards_beneath(chunks)
    first = readings[0]
    for parameter in unique(p for chunk in chunks for p in chunk.parameters()):
        if id(parameter) in taken:
            continue
        if id(parameter) in gathered:  # FSDP's temporary copy; its shard is the parameter
            first.also_params.append(parameter)
            continue
        if not parameter.requires_grad:
            first.frozen.append(parameter)
        elif whole:
            first.trainable.append(parameter)
            first.gradients += gradients_of(parameter)
    first.other += _other_tensors(chunks)


def _other_tensors(chunks: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Buffers of the modules, and tensor attributes of the modules and their helper objects."""
    found: list[torch.Tensor] = []
    helpers: dict[int, Any] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        attributes = vars(module)
        for value in (*attributes["_buffers"].values(), *attributes.values()):
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif type(value).__module__ not in _NO_HELPERS and hasattr(value, "__dict__"):
                helpers[id(value)] = value
    for one in helpers.values():
        if not isinstance(one, (torch.nn.Module, type)) and isinstance(vars(one), dict):
            found += tensors_of(one)
    return found


# -- torch's optimizers --------------------------------------------------------------------------


def _read_torch(
    chunks: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], scaler: Any
) -> list[Reading]:
    in_model = {id(p) for chunk in chunks for p in chunk.parameters()}
    in_model |= {id(shard) for shard in _shards_beneath(chunks).values()}
    readings = []
    for optimizer in optimizers:
        params = unique(p for group in optimizer.param_groups for p in group["params"])
        reading = Reading("torch", "model", type(optimizer).__name__, scaler=scaler)
        for p in params:
            # A tensor that the optimizer steps and the model lacks is a master.
            is_master = bool(chunks) and id(p) not in in_model
            used = p.grad is not None or optimizer.state.get(p)
            if not (p.requires_grad or is_master or used):
                # Frozen, but passed to the optimizer, as verl does with LoRA.
                reading.frozen.append(p)
                continue
            owned = Owned(p.dtype, p, (p,) if is_master else ())
            owned.take(optimizer.state.get(p, {}))
            reading.owned.append(owned)
            if not is_master:
                reading.trainable.append(p)
        meshes = [p for p in params if any(one.is_shard() for one in getattr(p, "placements", ()))]
        reading.sharded = reading.params_sharded = bool(meshes)
        reading.data_parallel_size = _data_parallel_size(chunks, meshes or params)
        reading.gradients = [grad for p in params for grad in gradients_of(p)]
        read_inner(reading, optimizer)
        reading.copies_later = reading.foretold.exp_avg is not None
        readings.append(reading)
    if readings and scaler is not None:
        readings[0].other += tensors_of(scaler)
    return readings


def read_inner(reading: Reading, optimizer: torch.optim.Optimizer) -> None:
    """Add an optimizer's betas, scales, own tensors and announced dtypes to a reading."""
    reading.steppers.append(optimizer)
    groups = [group for group in optimizer.param_groups if group.get("params")]
    reading.betas = tuple(
        dict.fromkeys(
            tuple(float(one) for one in group["betas"])
            for group in groups
            if isinstance(group.get("betas"), (tuple, list))
            and not any(isinstance(one, torch.Tensor) for one in group["betas"])
        )
    )
    reading.other += [
        value
        for scales in getattr(optimizer, "_scales", {}).values()
        for value in scales.values()
        if isinstance(value, torch.Tensor)
    ]
    # Tensors among its attributes, such as an overflow flag, and in its groups, such as an lr.
    reading.other += tensors_of(optimizer)
    reading.other += [
        one for group in groups for one in group.values() if isinstance(one, torch.Tensor)
    ]
    reading.foretold = foretold(optimizer)
    reading.stateless = isinstance(optimizer, torch.optim.SGD) and not any(
        group.get("momentum") for group in groups
    )


def foretold(optimizer: torch.optim.Optimizer) -> Foretold:
    """What an optimizer says about the states that its first step will make.

    TransformerEngine's FusedAdam has their dtypes as attributes; torch's Adam makes its states in
    the dtypes of the parameters.
    """
    kinds = vars(optimizer)
    if isinstance(kinds.get("exp_avg_dtype"), torch.dtype):
        master = None
        if kinds.get("master_weights"):
            whole = kinds.get("master_weight_dtype", torch.float32)
            remainders = bool(kinds.get("store_param_remainders"))

            def master(dtype: torch.dtype) -> torch.dtype | None:
                return torch.int16 if remainders and dtype is torch.bfloat16 else whole

        return Foretold(
            lambda _: kinds["exp_avg_dtype"], lambda _: kinds.get("exp_avg_sq_dtype"), master
        )
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return Foretold(lambda tensor: tensor.dtype, lambda tensor: tensor.dtype)
    return Foretold()


def _data_parallel_size(
    chunks: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]
) -> int:
    mesh = next((one.device_mesh for one in parameters if hasattr(one, "device_mesh")), None)
    if mesh is not None:
        names = mesh.mesh_dim_names or (None,) * mesh.ndim
        size = 1
        for dimension, name in enumerate(names):
            if name not in _MODEL_PARALLEL:
                size *= mesh.size(dimension)
        return size
    groups = (vars(one).get("process_group") for one in chunks)  # torch's DDP, FSDP1
    group = next((one for one in groups if one is not None), None)
    return int(group.size()) if group is not None else 1


def _shards_beneath(chunks: Sequence[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """Map the ``id`` of each gathered FSDP2 parameter to the shard that FSDP2 gathered it from.

    After a forward pass without backward the root module keeps its parameters gathered, and its
    ``parameters()`` are the gathered ones. torch has no public name for the shards: if torch
    changes the private names, this finds none.
    """
    found: dict[int, torch.Tensor] = {}
    if "torch.distributed.fsdp" not in sys.modules:
        return found
    for module in (module for chunk in chunks for module in chunk.modules()):
        state = getattr(module, "_get_fsdp_state", None)
        state = state() if callable(state) else None
        groups = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]
        for group in groups:
            for one in getattr(group, "fsdp_params", ()):
                whole = getattr(one, "_unsharded_param", None)
                shard = getattr(one, "sharded_param", None)
                if whole is not None and shard is not None:
                    found[id(whole)] = shard
    return found


# -- tensors -------------------------------------------------------------------------------------


def unique(tensors: Iterable[Any]) -> list[Any]:
    """Each object once, in the order given."""
    return list({id(t): t for t in tensors}.values())


def tensors_of(thing: Any) -> list[torch.Tensor]:
    """An object's attributes that are tensors."""
    return [one for one in vars(thing).values() if isinstance(one, torch.Tensor)]


def gradients_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """A parameter's ``grad`` and ``decoupled_grad``, where they are tensors."""
    found = (parameter.grad, getattr(parameter, "decoupled_grad", None))
    return [one for one in found if isinstance(one, torch.Tensor)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's bytes: the tensor itself, or the tensors that it wraps."""
    tensor = local(tensor)
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        yield tensor
        return
    inner = [one for name in _INNER if isinstance(one := getattr(tensor, name, None), torch.Tensor)]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if not inner and callable(flatten):
        inner = [getattr(tensor, name) for name in flatten()[0]]
    if not inner:
        yield tensor
    for one in inner:
        yield from plain(one)
