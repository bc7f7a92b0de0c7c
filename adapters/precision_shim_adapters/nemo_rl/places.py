"""Where NeMo-RL's workers are, version by version: nothing is looked at here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from precision_shim.adapting import seam

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
    def metrics(self) -> str:
        """The group of the seams that report figures and do nothing else."""
        return self.group if self.group.endswith("metrics") else f"{self.group} metrics"


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

_MEGATRON = ("MegatronPolicyWorker", "megatron metrics")
POLICIES = (f"{_OLD}.megatron_policy_worker", f"{_NEW}.megatron_policy_worker")
"""Where the Megatron policy worker is: until 0.4, and since."""
VALUE = f"{_VALUES}.megatron_value_worker"
MEGATRON = (
    Worker(POLICIES[0], *_MEGATRON, only_if=(POLICIES[0],)),
    Worker(POLICIES[1], *_MEGATRON, unless=(POLICIES[0],)),
    Worker(VALUE, "MegatronValueWorker", "megatron value metrics"),
)
"""The kinds of Megatron workers, each at each of its places."""

SETUP = "nemo_rl.models.megatron.setup"
INLINE = tuple(f"{module}:setup_megatron_model" for module in POLICIES)
"""Makes model and optimizer in the policy worker's own module (until 0.5)."""


def at_actor_class(
    function: Callable[..., Any],
    feature: str,
    worker: Worker,
    method: str,
    relies_on: tuple[str, ...],
    **declared: Any,
) -> None:
    """Declare that a function makes a worker's actor class anew.

    The actor class holds the methods itself, or, where a class beneath has them, only names that.

    Args:
        function: as ``Seam.wrapper`` with ``replaces``.
        feature: see ``Seam``.
        worker: which one.
        method: the place beneath that tells the two apart.
        relies_on: what the actor class must contain if it holds the methods itself.
        declared: further attributes of ``Seam``.
    """
    for contains, only_if, unless in (
        (relies_on, (), (method,)),
        ((f"{worker.name}Impl",), (method,), ()),
    ):
        seam(
            f"{worker.module}:{worker.name}",
            feature,
            group=worker.group,
            why="the actor class, as NeMo-RL looks it up by name and Ray exports it",
            relies_on=contains,
            replaces=True,
            only_if=(*worker.only_if, *only_if),
            unless=(*worker.unless, *unless),
            **declared,
        )(function)
