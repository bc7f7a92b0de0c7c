"""Dataclasses for an optimizer's tensors and config, and helpers that find tensors.

This module reads only sizes, dtypes, devices and storages; it starts no operation on a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

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
"""Attributes of TransformerEngine's quantized tensors that contain the wrapped tensors."""


def inside(optimizer: Any) -> list[Any] | None:
    """Return the optimizers in a chain, container or list; ``None`` for a single optimizer."""
    names = ("chained_optimizers", "optimizers", "optimizers_dict")
    for value in (*(getattr(optimizer, name, None) for name in names), optimizer):
        if isinstance(value, (list, tuple, dict)):
            return list(value.values()) if isinstance(value, dict) else list(value)
    return None


@dataclass(frozen=True)
class Wanted:
    """The dtypes in an optimizer's config; ``None`` for dtypes that the config does not set.

    Attributes:
        source: name of the config, for messages.
        params: dtype of the trainable parameters.
        main_grads: dtype of the gradient bucket of 16-bit parameters.
        masters: maps a 16-bit dtype of parameters to the dtype of their masters; empty if not set.
        exp_avg, exp_avg_sq: dtypes of the moments.
        remedies: maps a problem's code to the remedy that its message ends with. Placeholders in a
            remedy are ``{wanted}`` (expected dtype), ``{source}``, ``{component}`` (the moment),
            ``{optimizer}`` (its class), ``{params}`` (dtypes of parameters without masters) and
            ``{names}`` (the dtype names that a router takes). The remedy for one expected dtype has
            a key such as ``"main-grads-dtype fp32"``.
    """

    source: str
    params: torch.dtype | None = None
    main_grads: torch.dtype | None = None
    masters: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    exp_avg: torch.dtype | None = None
    exp_avg_sq: torch.dtype | None = None
    remedies: Mapping[str, str] = field(default_factory=dict)

    def remedy(self, code: str, wanted: str, **words: str) -> str:
        """Return the remedy that ends a problem's message."""
        remedies = self.remedies
        text = remedies.get(f"{code} {wanted}") or remedies.get(code) or "correct the {source}"
        return text.format(wanted=wanted, source=self.source, **words)


@dataclass
class Owned:
    """A parameter, or this rank's shard of a parameter, with its optimizer states.

    Attributes:
        dtype: dtype of the parameter in the model.
        stepped: the tensor that the optimizer updates: the parameter's shard or master.
        masters: the master copy, or only its 16 low bits if a bf16 parameter has the high bits.
        exp_avg, exp_avg_sq: the moments.
        other: state tensors other than masters and moments.
        parameter: the model's parameter.
        lr: learning rate, if the optimizer's rule is one of Adam's kind; else 0.
    """

    dtype: torch.dtype
    stepped: torch.Tensor
    masters: tuple[torch.Tensor, ...] = ()
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None
    other: tuple[torch.Tensor, ...] = ()
    parameter: torch.Tensor | None = None
    lr: float = 0.0

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has created the parameter's states."""
        return self.exp_avg is not None or self.exp_avg_sq is not None or bool(self.other)

    def take(self, state: Mapping[Any, Any]) -> None:
        """Assign the tensors in this parameter's optimizer state to this object's fields."""
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if name in ("exp_avg", "exp_avg_sq"):
                setattr(self, name, value)
            elif name in ("master_param", "master_weight"):
                if all(value is not master for master in self.masters):
                    self.masters += (value,)
            else:
                self.other += (value,)


@dataclass(frozen=True)
class DeclaredStates:
    """The dtypes that an optimizer declares for states that its first step will create.

    Attributes:
        exp_avg, exp_avg_sq: map the updated tensor to a moment's dtype; ``None`` if not declared.
        master: maps a parameter's dtype to its master's; ``None`` if there are no masters.
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
        frozen: frozen parameters of the model.
        buckets: gradient buckets, padding included.
        bucket_views: maps the ``id`` of a parameter to its gradient's view into a bucket.
        local_sums: gradients in fp32 that a rank adds up beside 16-bit buckets.
        owned: the parameters that the optimizer updates on this rank.
        gradients: gradients from ``grad`` and ``decoupled_grad``, and their copies on the host.
        other: tensors that belong to no parameter: scales, the model's buffers, the scaler's.
        also_params: further copies of parameters, such as an offloaded copy.
        data_parallel_size: number of ranks in the data-parallel group.
        shards: number of different shards in the data-parallel group (HSDP: copies); 0: all differ.
        sharded: whether each data-parallel rank stores only a shard of the states.
        params_sharded: whether each data-parallel rank stores only a shard of the parameters.
        scaler: the loss scaler.
        betas: the distinct ``betas`` of the optimizer's parameter groups.
        declared_states: the dtypes of the states that the optimizer has not created yet.
        copies_later: whether a step makes copies of the gradients.
        stateless: whether the optimizer keeps no states at all.
        wanted: the dtypes that the optimizer's config sets; ``None`` without a config.
        whole_sizes: maps the ``id`` of a shard in ``trainable`` to the whole parameter's elements.
        padding: maps the ``id`` of an FSDP1 shard, gradient or state to its padding elements.
        keeps_small_updates: whether small updates of bf16 weights count: by stochastic rounding,
            Kahan's sum, or masters outside the states.
        steppers: the torch optimizers within; a step of the first counts as the optimizer's step.
        mixed: the dtypes of FSDP's mixed precision, as ``COMPUTES`` and ``REDUCES``; may be empty.
        routers: maps the dtypes in which routers should and do compute to the names to choose from.
    """

    framework: str
    name: str
    optimizer: str
    trainable: list[torch.Tensor] = field(default_factory=list)
    frozen: list[torch.Tensor] = field(default_factory=list)
    buckets: list[torch.Tensor] = field(default_factory=list)
    bucket_views: dict[int, torch.Tensor] = field(default_factory=dict)
    local_sums: list[torch.Tensor] = field(default_factory=list)
    owned: list[Owned] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    other: list[torch.Tensor] = field(default_factory=list)
    also_params: list[torch.Tensor] = field(default_factory=list)
    data_parallel_size: int = 1
    shards: int = 0
    sharded: bool = False
    params_sharded: bool = False
    scaler: Any = None
    betas: tuple[tuple[float, ...], ...] = ()
    declared_states: DeclaredStates = field(default_factory=DeclaredStates)
    copies_later: bool = False
    stateless: bool = False
    wanted: Wanted | None = None
    whole_sizes: dict[int, int] = field(default_factory=dict)
    padding: dict[int, int] = field(default_factory=dict)
    keeps_small_updates: bool = False
    steppers: list[Any] = field(default_factory=list)
    mixed: dict[str, torch.dtype] = field(default_factory=dict)
    routers: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def states_unknown(self) -> bool:
        """Whether the states are missing and the optimizer does not declare their dtypes."""
        declared = self.declared_states.exp_avg is not None or self.stateless
        return bool(self.owned) and not (declared or any(state.has_state for state in self.owned))

    @property
    def parameters(self) -> int:
        """Number of trainable parameters of the model."""
        whole = self.whole_sizes
        return sum(whole.get(id(parameter), parameter.numel()) for parameter in self.trainable)

    @property
    def owned_parameters(self) -> int:
        """Number of trainable parameters that the optimizer updates on this rank."""
        return sum(
            local(state.stepped).numel() - self.padding.get(id(state.stepped), 0)
            for state in self.owned
        )

    @property
    def scaler_name(self) -> str | None:
        """Class name of the loss scaler; ``None`` without a scaler or for a disabled scaler."""
        enabled = getattr(self.scaler, "is_enabled", None)
        if self.scaler is None or (callable(enabled) and not enabled()):
            return None
        return type(self.scaler).__name__

    def later(self, component: str) -> set[torch.dtype]:
        """Return the dtypes that a later step will create, of masters or of a moment."""
        waiting = [state for state in self.owned if not state.has_state]
        if len(waiting) < len(self.owned):  # after a step: FSDP1 makes no gradient for empty shards
            waiting = [state for state in waiting if local(state.stepped).numel()]
        tell = getattr(self.declared_states, component)
        if tell is None:
            return set()
        if component == "master":
            found = {tell(state.dtype) for state in waiting if not state.masters}
        else:
            found = {tell(state.stepped) for state in waiting}
        return found - {None}


def unique(tensors: Iterable[Any]) -> list[Any]:
    """Return each object once, in the given order."""
    return list({id(t): t for t in tensors}.values())


def tensors_of(thing: Any) -> list[torch.Tensor]:
    """Return an object's attributes that are tensors."""
    return [value for value in vars(thing).values() if isinstance(value, torch.Tensor)]


def gradients_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return a parameter's ``grad`` and ``decoupled_grad``, if they are tensors."""
    found = (parameter.grad, getattr(parameter, "decoupled_grad", None))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that store a tensor's bytes: the tensor, or the tensors that it wraps."""
    tensor = local(tensor)
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        yield tensor
        return
    inner = [
        held for name in _INNER if isinstance(held := getattr(tensor, name, None), torch.Tensor)
    ]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if not inner and callable(flatten):
        inner = [getattr(tensor, name) for name in flatten()[0]]
    if not inner:
        yield tensor
    for held in inner:
        yield from plain(held)
