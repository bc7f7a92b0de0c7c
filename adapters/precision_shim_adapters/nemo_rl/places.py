"""Where NeMo-RL's workers are in the version that is installed; read from source, not imported."""

from __future__ import annotations

from dataclasses import dataclass

from precision_shim.adapting import look

_OLD = "nemo_rl.models.policy"  # until 0.4
_NEW = "nemo_rl.models.policy.workers"
_VALUES = "nemo_rl.models.value.workers"


def _home(module: str, name: str) -> str:
    old = f"{_OLD}.{module}"
    return old if look(f"{old}:{name}").module_found else f"{_NEW}.{module}"


@dataclass(frozen=True)
class Worker:
    """One kind of DTensor worker.

    Attributes:
        module: where it is.
        name: of the actor class.
        group: of its seams.
        clip: the function that first looks at its gradients.
        optional: whether NeMo-RL may lack it.
    """

    module: str
    name: str
    group: str
    clip: str
    optional: bool = False

    @property
    def beneath(self) -> str:
        """The class beneath the actor class, importable from 0.6 on."""
        return f"{self.module}:{self.name}Impl"

    @property
    def split(self) -> bool:
        """Whether this version has it."""
        return look(self.beneath).found


_V2 = _home("dtensor_policy_worker_v2", "DTensorPolicyWorkerV2")
_CLIP_V1 = "nemo_rl.models.dtensor.parallelize:get_grad_norm"
_CLIP_V2 = "nemo_automodel.components.training.utils:scale_grads_and_clip_grad_norm"
_CLIP_OLD = "nemo_automodel.components.distributed.grad_utils:get_grad_norm"  # until 0.4

DTENSOR = (
    Worker(
        _home("dtensor_policy_worker", "DTensorPolicyWorker"),
        "DTensorPolicyWorker",
        "dtensor v1",
        _CLIP_V1,
    ),
    Worker(
        _V2,
        "DTensorPolicyWorkerV2",
        "dtensor v2",
        _CLIP_OLD if "get_grad_norm" in look(f"{_V2}:DTensorPolicyWorkerV2").names else _CLIP_V2,
    ),
    Worker(
        f"{_VALUES}.dtensor_value_worker_v2",
        "DTensorValueWorkerV2",
        "dtensor value",
        _CLIP_V2,
        optional=True,
    ),
)
"""The kinds of DTensor workers."""

POLICY = _home("megatron_policy_worker", "MegatronPolicyWorker")
VALUE = f"{_VALUES}.megatron_value_worker"
MEGATRON = (
    (POLICY, "MegatronPolicyWorker", "megatron metrics"),
    (VALUE, "MegatronValueWorker", "megatron value metrics"),
)
"""Modules of the Megatron workers, the names of their actor classes, the groups of their seams."""

SETUP = "nemo_rl.models.megatron.setup"
INLINE = look(f"{POLICY}:setup_megatron_model").found
"""Whether model and optimizer are made in the policy worker's own module (until 0.5)."""
