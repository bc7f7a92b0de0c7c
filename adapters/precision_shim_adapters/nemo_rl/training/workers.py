"""The modules of NeMo-RL's workers in each version; importing this file does not import NeMo-RL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from precision_shim.adapting import around, seam

_F = TypeVar("_F", bound=Callable[..., Any])

_OLD = "nemo_rl.models.policy"  # until 0.4
_NEW = "nemo_rl.models.policy.workers"
_VALUES = "nemo_rl.models.value.workers"

TRAIN = ("data", "loss_fn", "eval_mode")
"""The first parameters of a worker's ``train``, whose decorator hides the signature."""


@dataclass(frozen=True)
class Worker:
    """One kind of NeMo-RL worker in one module; other versions may define it in another module.

    Attributes:
        module: the worker's module.
        name: the name of the actor class.
        group: the group name (see ``Seam``) of all seams on the worker.
        clip: the function before which the shim unscales a DTensor worker's gradients.
        optional: whether NeMo-RL may lack this worker.
        only_if: see ``Seam``.
        unless: see ``Seam``.
    """

    module: str
    name: str
    group: str
    clip: str = ""
    optional: bool = False
    only_if: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    @property
    def beneath(self) -> str:
        """Symbol of the class that ``ray.remote`` decorates; older NeMo-RL does not export it."""
        return f"{self.module}:{self.name}Impl"

    @property
    def clips(self) -> str:
        """The name under which the worker's module imports ``clip``."""
        return self.clip.partition(":")[2]

    @property
    def metrics(self) -> str:
        """The group name (see ``Seam``) of the seams that only report the worker's metrics."""
        return self.group if self.group.endswith("metrics") else f"{self.group} metrics"

    def at(self, target: str, *only_if: str, **others: Any) -> dict[str, Any]:
        """The arguments for ``seam`` to patch a function of this worker; see ``Seam`` for them."""
        return {
            "target": target,
            "group": self.group,
            "only_if": (*self.only_if, *only_if),
            "unless": self.unless,
            **others,
        }

    def method(self, name: str, **others: Any) -> dict[str, Any]:
        """The arguments for ``seam`` to patch a method of ``beneath``, if the method exists."""
        target = f"{self.beneath}.{name}"
        return self.at(target, target, optional=True, **others)

    def actor_class(self, method: str, *relies_on: str) -> tuple[dict[str, Any], ...]:
        """The targets of the seams on an actor class, for all versions of NeMo-RL.

        ``method`` is ``beneath``, which only some versions export, or a method of it; if it is
        missing, the actor class's source must have the names ``relies_on``.
        """
        target, optional = f"{self.module}:{self.name}", self.optional
        return (
            self.at(target, method, relies_on=(f"{self.name}Impl",), optional=optional),
            self.at(target, relies_on=relies_on, optional=optional, unless=(*self.unless, method)),
        )


INHERITED = "workers under other names inherit from this class"
EXPORTED = "the actor class, as NeMo-RL looks it up by name and Ray exports it"
"""The ``why`` of seams on ``Worker.beneath`` (``INHERITED``) and actor classes (``EXPORTED``)."""


def exported(places: Iterable[Iterable[dict[str, Any]]], **given: Any) -> Callable[[_F], _F]:
    """The decorator of a seam on actor classes; ``places`` are of ``Worker.actor_class``."""
    at = [place for each in places for place in each]
    return seam(at=at, why=EXPORTED, replaces=True, **given)


def mixin(module: str, name: str, **wrappers: Sequence[Callable[..., Any]]) -> type:
    """Make a class for ``put_in_front``: seams' functions, the innermost first, around its methods.

    Ray pickles the class by reference: it must be the global ``name`` of ``module``.
    """
    made = type(name, (), {"__module__": module})
    for method, functions in wrappers.items():
        setattr(made, method, _calling(made, method, functions))
    return made


def _calling(made: type, name: str, functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        beneath = getattr(super(made, self), name)
        for function in functions:
            beneath = partial(_around, function, beneath, self, TRAIN if name == "train" else ())
        return beneath(*args, **kwargs)

    method.__module__, method.__qualname__ = made.__module__, f"{made.__name__}.{name}"
    return method


def _around(function: Any, method: Any, instance: Any, names: Any, /, *args: Any, **kw: Any) -> Any:
    return around(function, method, instance, args, kw, positional=names)


_CLIP_V1 = "nemo_rl.models.dtensor.parallelize:get_grad_norm"
_CLIP_V2 = "nemo_automodel.components.training.utils:scale_grads_and_clip_grad_norm"
_CLIP_OLD = "nemo_automodel.components.distributed.grad_utils:get_grad_norm"  # until 0.4

V1, V2, VALUE_V2 = "dtensor v1", "dtensor v2", "dtensor value"
"""The groups of the seams on the DTensor workers."""

_V1 = ("DTensorPolicyWorker", V1, _CLIP_V1)
_V1_OLD = f"{_OLD}.dtensor_policy_worker"
_V2 = ("DTensorPolicyWorkerV2", V2)
_V2_OLD = f"{_OLD}.dtensor_policy_worker_v2"
_V2_NEW = f"{_NEW}.dtensor_policy_worker_v2"
_CLIPS_AS_BEFORE = f"{_V2_NEW}:DTensorPolicyWorkerV2 mentions get_grad_norm"
"""A condition: the V2 worker is in its new module, but clips gradients with 0.4's function."""

DTENSOR = (
    Worker(_V1_OLD, *_V1, only_if=(_V1_OLD,)),
    Worker(f"{_NEW}.dtensor_policy_worker", *_V1, unless=(_V1_OLD,)),
    Worker(_V2_OLD, *_V2, _CLIP_OLD, only_if=(_V2_OLD,)),
    Worker(_V2_NEW, *_V2, _CLIP_OLD, only_if=(_CLIPS_AS_BEFORE,), unless=(_V2_OLD,)),
    Worker(_V2_NEW, *_V2, _CLIP_V2, unless=(_V2_OLD, _CLIPS_AS_BEFORE)),
    Worker(
        f"{_VALUES}.dtensor_value_worker_v2",
        "DTensorValueWorkerV2",
        VALUE_V2,
        _CLIP_V2,
        optional=True,
    ),
)
"""All DTensor workers; a worker that NeMo-RL moved has one entry for each module."""

_GROUPS = {name: worker.group for worker in DTENSOR for name in (worker.name, f"{worker.name}Impl")}


def group_of(name: str, *, second: bool) -> str:
    """The group of the seams on a model's DTensor workers; ``second`` is ``dtensor_cfg._v2``."""
    return VALUE_V2 if name == "value" else V2 if second else V1


def group_at(instance: Any) -> str:
    """The group name (see ``Seam``) of the seams on a DTensor worker; empty for other workers."""
    names = (kind.__name__ for kind in type(instance).__mro__)
    return next((_GROUPS[name] for name in names if name in _GROUPS), "")


_MEGATRON = ("MegatronPolicyWorker", "megatron metrics")
POLICIES = (f"{_OLD}.megatron_policy_worker", f"{_NEW}.megatron_policy_worker")
"""Modules of the Megatron policy worker: until NeMo-RL 0.4, and in later versions."""
VALUE = f"{_VALUES}.megatron_value_worker"
MEGATRON = (
    Worker(POLICIES[0], *_MEGATRON, optional=True, only_if=(POLICIES[0],)),
    Worker(POLICIES[1], *_MEGATRON, optional=True, unless=(POLICIES[0],)),
    Worker(VALUE, "MegatronValueWorker", "megatron value metrics", optional=True),
)
"""All Megatron workers; a worker that NeMo-RL moved has one entry for each module."""

SETUP = "nemo_rl.models.megatron.setup"
INLINE = tuple(f"{module}:setup_megatron_model" for module in POLICIES)
"""The policy worker module's function that builds model and optimizer, until NeMo-RL 0.5."""
