"""``Build`` records the model that a framework is building; the backend's seams read the record.

A framework makes the gradient bucket before the OptimizerConfig, in another function, but one plan
must decide the dtypes of both. An adapter puts ``building`` around the code that makes DDP and
optimizer, and passes a function that reads the framework's config into ``RequestedConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from precision_shim.adapting import (
    at_uninstall,
    current_settings,
    decide,
    holding,
    in_force,
    versioned,
)
from precision_shim.precision.model import TrainableDtypes

from ..installed import fused_adam_support
from ..policy.optimizer_plan import OptimizerPlan, plan_optimizer
from ..policy.requested import InForce, RequestedConfig, what_is_in_force


class Build:
    """One model being built by a framework, from its DDP to its optimizer.

    Only the DDP's seam (``ddp.build_ddp``) changes a ``Build``; the optimizer's seams only read.

    Attributes:
        seen: dtypes of the trainable parameters of all chunks with a DDP so far, on all stages.
        distributed: whether the last DDP's config has the distributed optimizer.
        in_fp32: the first chunk's ``grad_reduce_in_fp32``; ``None`` until it is decided. Megatron
            asserts that all chunks of a model have the same DDP config.
    """

    def __init__(self, framework: str, read: Callable[[], RequestedConfig]) -> None:
        """Create a ``Build`` without chunks; the first use of ``requested`` calls ``read``."""
        self.framework = framework
        self._read = read
        self.seen = TrainableDtypes()
        self.distributed = True
        self.in_fp32: bool | None = None
        self._planned: tuple[object, OptimizerPlan] | None = None

    @cached_property
    def requested(self) -> RequestedConfig:
        """What the framework's config requests."""
        return self._read()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in ``seen`` if it has only one, otherwise the framework's declared dtype."""
        return self.seen.single or self.requested.declared

    def plan(self, now: InForce, model: TrainableDtypes | None = None) -> OptimizerPlan:
        """Decide the optimizer's dtypes from the dtypes in ``model`` (default: in ``seen``).

        Raises:
            DtypeError: see ``plan_optimizer``.
        """
        known = self.seen if model is None else model
        # Use the last plan until a chunk has other dtypes, or until an import after the DDP's
        # construction switches features on or off. If all parameters have one dtype, the number
        # of parameters does not affect the plan.
        made_for = known.single or known, self.distributed, now
        if self._planned is None or self._planned[0] != made_for:
            plan = plan_optimizer(self.requested, known, now, distributed=self.distributed)
            self._planned = made_for, plan
        return self._planned[1]

    def in_force(self) -> InForce:
        """The settings and features of this process that the framework's plans depend on."""
        holds = partial(in_force, self.framework)
        return what_is_in_force(current_settings(), holds, fused_adam_support())

    def decide(self, feature: str, chosen: str, because: str) -> None:
        """Report a choice for this model; see ``precision_shim.adapting.decide``."""
        decide(self.framework, self.requested.subject, feature, chosen, because)


DIRECT = Build("megatron", RequestedConfig)
"""A model of a trainer without its own adapter, whose config the shim does not read."""

_build: ContextVar[Build | None] = ContextVar("precision_shim_build", default=None)
"""The ``Build`` in progress: set by ``building``, read by the backend's seams."""

_references: MutableMapping[Any, Build] = WeakIdKeyDictionary()
"""Maps a reference model's DDP config to its ``Build``; equal configs are two objects."""


def current_build(framework: str | None = None) -> Build | None:
    """The ``Build`` in progress (of ``framework``, if ``framework`` is given), or ``None``."""
    build = _build.get()
    return build if build is None or framework in (None, build.framework) else None


@contextmanager
def building(framework: str, read: Callable[[], RequestedConfig]) -> Iterator[Build]:
    """Record that a framework is building a model; if nested, yield the outer record.

    Put ``building`` around the function that builds DDP and optimizer, or around both functions if
    there are two. Outside ``building``, the backend's seams for building a model do nothing.
    """
    outer = _build.get()
    if outer is not None:
        yield outer
        return
    build = Build(framework, read)
    with holding(_build, build):
        yield build


def expect_reference(ddp_config: Any, framework: str, read: Callable[[], RequestedConfig]) -> None:
    """Record a ``Build`` for the DDP that the framework will make with ``ddp_config``.

    For a reference model whose construction no seam can wrap; ``ddp_config`` is weakly referenced.
    """
    _references[ddp_config] = Build(framework, read)
    at_uninstall(_references.clear)


def build_around(ddp_config: Any) -> Build | None:
    """The ``Build`` of a DDP with ``ddp_config``; ``None`` if no adapter recorded a ``Build``."""
    return _build.get() or _references.get(ddp_config)


def megatron_label() -> str:
    """``"megatron-core 0.16.1"``, for messages."""
    return versioned("megatron-core", "megatron")
