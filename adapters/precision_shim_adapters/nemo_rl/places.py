"""Where NeMo-RL's workers are, version by version: nothing is looked at here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_OLD = "nemo_rl.models.policy"  # until 0.4
_NEW = "nemo_rl.models.policy.workers"
_VALUES = "nemo_rl.models.value.workers"


@dataclass(frozen=True)
class Worker:
    """One kind of worker, at one of the places where it has been.

    Attributes:
        module: where it is.
        name: of the actor class.
        group: of its seams.
        clip: the function that first looks at a DTensor worker's gradients.
        optional: whether NeMo-RL may lack it.
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
        """The class beneath the actor class, importable from 0.6 on."""
        return f"{self.module}:{self.name}Impl"

    @property
    def clips(self) -> str:
        """The name of ``clip`` in the worker's module."""
        return self.clip.partition(":")[2]

    @property
    def metrics(self) -> str:
        """The group of the seams that report figures and do nothing else."""
        return self.group if self.group.endswith("metrics") else f"{self.group} metrics"

    def at(self, target: str, *only_if: str, **others: Any) -> dict[str, Any]:
        """A place of this worker, as ``seam`` takes it.

        Args:
            target: see ``Seam``.
            only_if: what must be there beside the worker's own.
            others: further attributes of ``Seam``.
        """
        return {
            "target": target,
            "group": self.group,
            "only_if": (*self.only_if, *only_if),
            "unless": self.unless,
            **others,
        }

    def method(self, name: str, **others: Any) -> dict[str, Any]:
        """A method of the class beneath, where this version has it; ``others`` as for ``at``."""
        target = f"{self.beneath}.{name}"
        return self.at(target, target, **others)

    def actor_class(self, method: str, *relies_on: str) -> tuple[dict[str, Any], ...]:
        """The actor class, which holds the methods or only names a class beneath that has them.

        Args:
            method: the place beneath that tells the two apart.
            relies_on: what the actor class must contain if it holds the methods itself.
        """
        target, optional = f"{self.module}:{self.name}", self.optional
        return (
            self.at(target, method, relies_on=(f"{self.name}Impl",), optional=optional),
            self.at(target, relies_on=relies_on, optional=optional, unless=(*self.unless, method)),
        )


INHERITED = "workers under other names inherit from this class"
EXPORTED = "the actor class, as NeMo-RL looks it up by name and Ray exports it"
"""Why the shim enters at the class beneath, and at the actor class."""


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
"""For some weeks before 0.5 the worker was at its new place and clipped as 0.4 does."""

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
"""The kinds of DTensor workers, each at each of its places."""

_GROUPS = {name: one.group for one in DTENSOR for name in (one.name, f"{one.name}Impl")}


def group_at(instance: Any) -> str:
    """The group of the seams on a DTensor worker; empty where it is none."""
    names = (kind.__name__ for kind in type(instance).__mro__)
    return next((_GROUPS[name] for name in names if name in _GROUPS), "")


_MEGATRON = ("MegatronPolicyWorker", "megatron metrics")
POLICIES = (f"{_OLD}.megatron_policy_worker", f"{_NEW}.megatron_policy_worker")
"""Where the Megatron policy worker is: until 0.4, and since."""
VALUE = f"{_VALUES}.megatron_value_worker"
MEGATRON = (
    Worker(POLICIES[0], *_MEGATRON, optional=True, only_if=(POLICIES[0],)),
    Worker(POLICIES[1], *_MEGATRON, optional=True, unless=(POLICIES[0],)),
    Worker(VALUE, "MegatronValueWorker", "megatron value metrics", optional=True),
)
"""The kinds of Megatron workers, each at each of its places."""

SETUP = "nemo_rl.models.megatron.setup"
INLINE = tuple(f"{module}:setup_megatron_model" for module in POLICIES)
"""Makes model and optimizer in the policy worker's own module (until 0.5)."""
