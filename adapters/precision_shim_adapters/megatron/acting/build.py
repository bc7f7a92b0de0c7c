"""Which model is being built: what the backend's wrappers know of the framework around them.

The bucket is decided before the OptimizerConfig exists, and by another function. So an adapter says
around both that a model is being built and how to read its wishes: these are read once, when the
first of both is made, and one plan answers for both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.precision.model import TrainableDtypes

from ..deciding.wishes import Planned, Wishes, in_force_now, plan_wishes


class Build:
    """One model being built by a framework, from its DDP to its optimizer.

    Only the wrapper around the DDP writes to it (``ddp.build_ddp``); the optimizer's read it.

    Attributes:
        framework: the framework's name.
        seen: trainable parameters of the model's chunks that are in a DDP so far.
        distributed: whether the last of these DDPs has the distributed optimizer.
        in_fp32: ``grad_reduce_in_fp32`` of the first chunk's bucket, once it is decided; Megatron
            asserts that all chunks of a model have the same DDP config.
    """

    def __init__(self, framework: str, read: Callable[[], Wishes]) -> None:
        """Make a build in which no model chunk has been seen yet.

        Args:
            framework: the framework's name.
            read: reads the framework's config; called once, by the first who asks. That is the
                wrapper around the DDP, before which frameworks complete their configs.
        """
        self.framework = framework
        self._read = read
        self.seen = TrainableDtypes()
        self.distributed = True
        self.in_fp32: bool | None = None
        self._planned: tuple[object, Planned] | None = None

    @cached_property
    def wishes(self) -> Wishes:
        """What the framework's config says."""
        return self._read()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the parameters that were seen, or the declared one."""
        return self.seen.single or self.wishes.declared

    def plan(self, model: TrainableDtypes | None = None) -> Planned:
        """The plan of the optimizer for some parameters; for all that were seen by default.

        Raises:
            DtypeError: see ``plan_wishes``.
        """
        known = self.seen if model is None else model
        now = in_force_now(self.framework)
        # Planned anew only for a further chunk of other dtypes, and where an import that came
        # between DDP and optimizer has changed what is in force. How many elements have a model's
        # one dtype changes nothing.
        made_for = known.single or known, self.distributed, now
        if self._planned is None or self._planned[0] != made_for:
            made = plan_wishes(self.wishes, known, now, distributed=self.distributed)
            self._planned = made_for, made
        return self._planned[1]


_build: ContextVar[Build | None] = ContextVar("precision_shim_build", default=None)
"""The build around this call: written by ``building``, read by the backend's wrappers."""

_references: dict[int, tuple[weakref.ref[Any], Build]] = {}
"""DDP configs by ``id``, each with the build of its reference model: written by
``expect_reference``, read by ``build_around``. By identity: two workers' configs may be equal."""


def current_build(framework: str | None = None) -> Build | None:
    """The build around this call, if there is one (and it is that framework's)."""
    build = _build.get()
    return build if build is None or framework in (None, build.framework) else None


@contextmanager
def building(framework: str, read: Callable[[], Wishes]) -> Iterator[Build]:
    """Say that a framework builds a model; an outer build of the same call wins.

    Call it around what builds both DDP and optimizer, or around each; every feature of the backend
    that acts while a model is built acts in it alone.

    Args:
        framework: the framework's name.
        read: see ``Build``.
    """
    outer = _build.get()
    if outer is not None:
        yield outer
        return
    build = Build(framework, read)
    token = _build.set(build)
    try:
        yield build
    finally:
        _build.reset(token)


def expect_reference(ddp_config: Any, framework: str, read: Callable[[], Wishes]) -> None:
    """Say to which build a DDP belongs that is made later, outside ``building``, with this config.

    For a framework that builds its reference model where no seam reaches.

    Args:
        ddp_config: the object; nothing keeps it alive.
        framework: the framework's name.
        read: see ``Build``.
    """
    key = id(ddp_config)

    def forget(gone: weakref.ref[Any]) -> None:
        if key in _references and _references[key][0] is gone:
            del _references[key]

    _references[key] = weakref.ref(ddp_config, forget), Build(framework, read)


def build_around(ddp_config: Any) -> Build | None:
    """The build that a DDP with this config belongs to, if a framework of ours builds it."""
    expected, build = _references.get(id(ddp_config), (None, None))
    return _build.get() or (build if expected is not None and expected() is ddp_config else None)


def megatron_label() -> str:
    """``"megatron-core 0.16.1"``, for messages."""
    return versioned("megatron-core", "megatron")
