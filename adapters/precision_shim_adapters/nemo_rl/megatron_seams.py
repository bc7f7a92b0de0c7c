"""NeMo-RL on Megatron: its part of the table of seams.

Why these layers. The function that makes a worker's model and optimizer has the policy config and
Bridge's in hand, for policy and value workers alike; Ray takes it along by reference, other than
the worker's own methods. The live parameters are looked at in Megatron's DDP. Bridge's
``setup_optimizer`` is where every kind of optimizer is made from the OptimizerConfig.

Coercion needs no place of its own: Bridge's OptimizerConfig of 0.4 runs Megatron's check when it
is made, and that of later versions in ``finalize()``, which the worker's ``validate()`` calls
before anything is built.

Deliberately not patched: the conversion of a Hugging Face checkpoint, which trains nothing.

Delete when: see each seam.
"""

from __future__ import annotations

from precision_shim.adapting import Seam, look

from .. import megatron, megatron_checkpoint, megatron_overflow

_HERE = "precision_shim_adapters.nemo_rl.megatron"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_OLD_HOME = "nemo_rl.models.policy.megatron_policy_worker"  # until 0.4
_WORKER = (
    _OLD_HOME
    if look(f"{_OLD_HOME}:MegatronPolicyWorker").module_found
    else "nemo_rl.models.policy.workers.megatron_policy_worker"
)
_VALUE = "nemo_rl.models.value.workers.megatron_value_worker"
_SETUP = "nemo_rl.models.megatron.setup"
_INLINE = look(f"{_WORKER}:setup_megatron_model").found  # until 0.5

_FEATURES = ("bf16-dispatch", "grad-bucket-alignment", megatron_overflow.FEATURE)
_ONE_PLACE = "NeMo-RL decides bucket and optimizer states in one place"
_SETUP_OPTIMIZER = {
    "target": "megatron.bridge.training.optim:setup_optimizer",
    "path": "megatron",
    "parameters": ("optimizer_config", "scheduler_config", "model"),
    "aliases": (
        "megatron.bridge.training.setup:setup_optimizer",
        f"{_WORKER if _INLINE else _SETUP}:setup_optimizer",
    ),
    "optional": True,
}


def _present(*seams: Seam) -> tuple[Seam, ...]:
    """Those whose symbol this version has: a lack of the others is no fault."""
    return tuple(seam for seam in seams if look(seam.target).found)


def _build() -> tuple[Seam, ...]:
    """Around the function that makes model and optimizer, under each feature that needs it."""
    if _INLINE:
        target, container = f"{_WORKER}:setup_megatron_model", "cfg"
        aliases: tuple[str, ...] = ()
    else:
        target, container = f"{_SETUP}:setup_model_and_optimizer", "megatron_cfg"
        aliases = tuple(f"{module}:setup_model_and_optimizer" for module in (_WORKER, _VALUE))
    return tuple(
        Seam(
            target=target,
            feature=feature,
            wrapper=f"{_HERE}:worker_build",
            path="megatron",
            why="model and optimizer are made here, from the policy config and Bridge's",
            delete_when=_ONE_PLACE,
            parameters=("policy_cfg", container, "load_optimizer"),
            relies_on=("get_model", "setup_optimizer", "ddp", "optimizer"),
            aliases=aliases,
            optional=True,
        )
        for feature in _FEATURES
    )


def _worker(module: str, name: str, path: str) -> tuple[Seam, ...]:
    """A worker's metrics: its method where Ray has it by reference, and the actor class."""
    common = {
        "feature": megatron_overflow.FEATURE,
        "path": path,
        "delete_when": "NeMo-RL reports the loss scale",
        "optional": True,
    }
    method = f"{module}:{name}Impl.train"
    relies_on = ("train", "optimizer", "all_mb_metrics", "grad_norm", "eval_mode")
    return (
        *_present(
            *(
                Seam(
                    target=f"{module}:{name}Impl.{setter}",
                    wrapper=f"{_HERE}:scale_own",
                    why="a scale of its own, which Megatron from 0.19 takes for the loss scale",
                    parameters=("func",),
                    **{**common, "delete_when": "it has the loss scale in it"},  # type: ignore[arg-type]
                )
                for setter in ("_set_moe_grad_scale_func", "_set_mtp_grad_scale_func")
            ),
            Seam(
                target=method,
                wrapper=f"{_HERE}:report",
                why="workers under other names inherit from this class",
                parameters=("eval_mode",),
                relies_on=relies_on,
                **common,  # type: ignore[arg-type]
            ),
        ),
        Seam(
            target=f"{module}:{name}",
            wrapper=f"{_HERE}:redecorate",
            why="the actor class, as NeMo-RL looks it up by name and Ray exports it",
            relies_on=(f"{name}Impl",) if look(method).found else relies_on,
            replaces=True,
            **common,  # type: ignore[arg-type]
        ),
    )


PATHS = {
    **megatron_checkpoint.PATHS,
    **megatron_overflow.PATHS,
    "megatron": "Megatron workers",
    "megatron metrics": "Megatron workers (policy metrics)",
    "megatron value metrics": "Megatron workers (value metrics)",
}
"""What users call the paths of these seams."""

SEAMS: tuple[Seam, ...] = (
    *megatron.SEAMS,
    *megatron_checkpoint.SEAMS,
    *megatron_overflow.SEAMS,
    *_build(),
    *(
        Seam(
            target=megatron.DDP,
            feature=feature,
            wrapper=f"{_HERE}:reference_build",
            path="megatron",
            why="the reference model is built outside that function, with the same DDP config",
            delete_when=_ONE_PLACE,
            parameters=("self", "config", "ddp_config", "module"),
            optional=True,
        )
        for feature in _FEATURES
    ),
    # The scaler's part is the inner one: whether the optimizer is fp16 is settled by then.
    Seam(
        feature=megatron_overflow.FEATURE,
        wrapper=f"{_HERE}:scale",
        why="the scaler is made from these fields, and the optimizer comes out here",
        delete_when="NeMo-RL gives a loss scaler settings that suit a start at fp16",
        **_SETUP_OPTIMIZER,  # type: ignore[arg-type]
    ),
    Seam(
        feature="bf16-dispatch",
        wrapper=f"{_HERE}:dispatch",
        why="the parameters are known, and the optimizer is not yet made",
        delete_when="NeMo-RL dispatches on policy.precision",
        **_SETUP_OPTIMIZER,  # type: ignore[arg-type]
    ),
    *_present(
        Seam(
            target=f"{_SETUP}:make_policy_like_config",
            feature=megatron_overflow.FEATURE,
            wrapper=f"{_HERE}:keep_block",
            path="megatron",
            why="a value worker's config is copied key by key, without the shim's block",
            delete_when="it copies what it does not know",
            parameters=("config",),
            aliases=(f"{_VALUE}:make_policy_like_config",),
            optional=True,
        )
    ),
    # Over the wrapper that answers for a skip: it asks whose step it is.
    *(
        Seam(
            target=f"{_OPTIMIZER}:{kind}.step",
            feature=megatron_overflow.FEATURE,
            wrapper=f"{_HERE}:step",
            path="megatron",
            why="a worker's train is out of reach in an actor, its optimizer's class is not",
            delete_when="NeMo-RL takes a skipped step's grad norm of None",
            parameters=("self",),
            optional=True,
        )
        for kind in ("ChainedOptimizer", "MixedPrecisionOptimizer")
    ),
    *_worker(_WORKER, "MegatronPolicyWorker", "megatron metrics"),
    *_worker(_VALUE, "MegatronValueWorker", "megatron value metrics"),
)
"""The seams of NeMo-RL's Megatron workers; the innermost wrapper of a target comes first."""
