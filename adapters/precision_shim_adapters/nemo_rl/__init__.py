"""NeMo-RL: the table of seams.

Why these layers. NeMo-RL's workers are Ray actors: ``@ray.remote`` copies their methods while the
module runs, and ``train`` carries a decorator that makes Ray ship it by value. What is wrapped in
the worker's module afterwards, or on its class, vanishes on the way into the actor. So the actor
class itself is replaced where it is exported, by one of the same name and options that is made
from a subclass; and what a worker calls is wrapped where it is defined.

From 0.6 the class beneath is importable. There its methods are wrapped as well, which reaches
workers that inherit from it under other names (``worker_extension_cls_fqn``, quantized workers).

Deliberately not patched: ``begin_train_step`` and ``finish_train_step`` of NeMo-RL's newest state.
DTensor workers do not have them; a Megatron worker's optimizer skips there as anywhere, but the
figures are not in the metrics.

Delete when: NeMo-RL scales the loss of its float16 policies and saves the scaler.
"""

from __future__ import annotations

from precision_shim.adapting import Adapter, Seam, look

from ..frameworks import NEMO_RL
from . import megatron_seams

_DTENSOR = "precision_shim_adapters.nemo_rl.dtensor"
_PULL = "https://github.com/NVIDIA-NeMo/RL/pull/1474"
_FEATURE = "fp16-scaling"
_DELETE = "NeMo-RL scales the loss of float16 policies"

_NEW_HOME = "nemo_rl.models.policy.workers"
_HOME = (
    "nemo_rl.models.policy"  # until 0.4
    if look("nemo_rl.models.policy.dtensor_policy_worker:DTensorPolicyWorker").module_found
    else _NEW_HOME
)
_V1 = f"{_HOME}.dtensor_policy_worker"
_V2 = f"{_HOME}.dtensor_policy_worker_v2"
_VALUE = "nemo_rl.models.value.workers.dtensor_value_worker_v2"

_CLIP_V1 = "nemo_rl.models.dtensor.parallelize:get_grad_norm"
_CLIP_V2 = "nemo_automodel.components.training.utils:scale_grads_and_clip_grad_norm"
_CLIP_V2_OLD = "nemo_automodel.components.distributed.grad_utils:get_grad_norm"  # until 0.4

_METHODS = {
    "__init__": ("build", ("config", "weights_path", "optimizer_path")),
    "train": ("train", ("data", "loss_fn", "eval_mode")),
    "save_checkpoint": ("save_checkpoint", ("weights_path", "optimizer_path")),
    "load_checkpoint": ("load_checkpoint", ("weights_path", "optimizer_path")),
}
"""Methods of a worker, to their wrappers and the parameters that these read."""


def _worker(module: str, name: str, path: str, clip: str, *, optional: bool = False) -> list[Seam]:
    """The seams of one kind of worker."""
    relies_on = (
        *_METHODS,
        *_METHODS["train"][1],
        *("cfg", "optimizer", "step", "scheduler", clip.partition(":")[2]),
    )
    implementation = f"{module}:{name}Impl"
    split = look(implementation).found
    seams = [
        Seam(
            target=clip,
            feature=_FEATURE,
            wrapper=f"{_DTENSOR}:unscale_first",
            path=path,
            why="the first look at the gradients: norm and clipping want them unscaled",
            upstream=_PULL,
            delete_when=_DELETE,
            aliases=(f"{module}:{clip.partition(':')[2]}",),
            optional=True,  # without nemo_automodel there is no such worker in this process
        )
    ]
    if split:
        seams += [
            Seam(
                target=f"{implementation}.{method}",
                feature=_FEATURE,
                wrapper=f"{_DTENSOR}:{wrapper}",
                path=path,
                why="workers under other names inherit from this class",
                upstream=_PULL,
                delete_when=_DELETE,
                parameters=parameters,
                relies_on=relies_on,
            )
            for method, (wrapper, parameters) in _METHODS.items()
        ]
    seams.append(
        Seam(
            target=f"{module}:{name}",
            feature=_FEATURE,
            wrapper=f"{_DTENSOR}:redecorate",
            path=path,
            why="the actor class, as NeMo-RL looks it up by name and Ray exports it",
            upstream=_PULL,
            delete_when=_DELETE,
            relies_on=(f"{name}Impl",) if split else relies_on,
            optional=optional,
            replaces=True,
        )
    )
    return seams


_OLD_CLIP = "get_grad_norm" in look(f"{_V2}:DTensorPolicyWorkerV2").names

ADAPTER = Adapter(
    **NEMO_RL.declared(),
    paths={
        **megatron_seams.PATHS,
        "dtensor v1": "DTensor v1",
        "dtensor v2": "DTensor v2",
        "dtensor value": "DTensor v2 value workers",
    },
    seams=(
        *_worker(_V1, "DTensorPolicyWorker", "dtensor v1", _CLIP_V1),
        *_worker(
            _V2, "DTensorPolicyWorkerV2", "dtensor v2", _CLIP_V2_OLD if _OLD_CLIP else _CLIP_V2
        ),
        *_worker(_VALUE, "DTensorValueWorkerV2", "dtensor value", _CLIP_V2, optional=True),
        *megatron_seams.SEAMS,
    ),
)
"""NeMo-RL's seams; the innermost wrapper of a target comes first."""
