"""verl: the table of seams.

Why these layers. verl decides the bucket before the optimizer's config exists, in another
function, and from 0.7.1's workers and 0.8's engines alike; so the shim notes which model is being
built around both (``MegatronEngine.initialize``, the legacy workers' build methods) and lets one
plan answer for both. ``init_megatron_optim_config`` is entered and verl's own body still runs:
values come in through its override merge, beneath what the user wrote there.

Deliberately not patched: verl's FSDP optimizer (torch's AdamW follows its parameters), and the
engines whose optimizer is not Megatron's, which are refused by name below.

Delete when: verl's native options cover overrides, names and every engine; see each seam.
"""

from __future__ import annotations

from precision_shim.adapting import MEGATRON_EFFECTS, Adapter, Seam

from .. import megatron, megatron_checkpoint

_MEGATRON = "precision_shim_adapters.verl.megatron"
_PULL = "https://github.com/verl-project/verl/pull/6526"
_CONFIG = "verl.utils.megatron.optimizer:init_megatron_optim_config"
_FIELDS = "verl.workers.config.optimizer:McoreOptimizerConfig.__init__"
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"
_LEGACY = "verl.workers.megatron_workers"


def _both(target: str, wrapper: str, **common: object) -> tuple[Seam, Seam]:
    """The same entry under the two features that need to know which model is being built."""
    return tuple(  # type: ignore[return-value]
        Seam(
            target=target,
            feature=feature,
            wrapper=wrapper,
            delete_when="verl decides bucket and optimizer states in one place",
            **common,  # type: ignore[arg-type]
        )
        for feature in ("bf16-dispatch", "grad-bucket-alignment")
    )


ADAPTER = Adapter(
    framework="verl",
    distribution="verl",
    packages=("verl",),
    tested=("0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    effects=MEGATRON_EFFECTS,
    seams=(
        *megatron.SEAMS,
        *megatron_checkpoint.SEAMS,
        # The optimizer's config. Dispatch is the inner layer: it reads coerced dtypes.
        Seam(
            target=_CONFIG,
            feature="bf16-dispatch",
            wrapper=f"{_MEGATRON}:dispatch",
            path="megatron",
            why="the one function that makes verl's OptimizerConfig, for actor and critic",
            upstream=_PULL,
            delete_when="verl >= 0.9 is the oldest in use, whose config has the opt-in",
            parameters=("optim_config", "fp16"),
            relies_on=("override_optimizer_config", "params_dtype"),
            native=f"{_MEGATRON}:native_dispatch",
        ),
        Seam(
            target=_CONFIG,
            feature="dtype-coercion",
            wrapper=f"{_MEGATRON}:coerce_overrides",
            path="megatron",
            why="override_optimizer_config reaches Megatron as YAML wrote it, strings included",
            upstream="https://github.com/NovaSky-AI/SkyRL/pull/1805",
            delete_when="verl coerces override_optimizer_config itself",
            parameters=("optim_config",),
            relies_on=("override_optimizer_config",),
        ),
        Seam(
            target=_FIELDS,
            feature="bf16-dispatch",
            wrapper=f"{_MEGATRON}:accept_fields",
            path="megatron",
            why="brings the fields of verl 0.9's opt-in to versions whose config lacks them",
            upstream=_PULL,
            delete_when="verl >= 0.9 is the oldest in use",
            relies_on=("override_optimizer_config",),
            native=f"{_MEGATRON}:native_fields",
            optional=True,
        ),
        Seam(
            target=_FIELDS,
            feature="dtype-coercion",
            wrapper=f"{_MEGATRON}:spell_fields",
            path="megatron",
            why="verl's fields know five spellings; the others end in an AssertionError",
            delete_when="verl's fields take every spelling",
            relies_on=("override_optimizer_config",),
            optional=True,
        ),
        # Which model is being built: around the DDP and the optimizer of one model.
        *_both(
            f"{_ENGINE}.initialize",
            f"{_MEGATRON}:engine_build",
            path="megatron",
            why="the engine around both decisions; knows dtype, optimizer and DDP config",
            relies_on=("param_dtype", "optimizer_config", "engine_config", "_build_optimizer"),
            optional=True,
        ),
        *_both(
            f"{_LEGACY}:ActorRolloutRefWorker._build_model_optimizer",
            f"{_MEGATRON}:legacy_actor_build",
            path="legacy workers",
            why="0.7.1's default actor builds model and optimizer in this one method",
            parameters=("optim_config", "override_ddp_config"),
            relies_on=("dtype", "init_megatron_optim_config"),
            optional=True,
        ),
        *_both(
            f"{_LEGACY}:CriticWorker._build_critic_model_optimizer",
            f"{_MEGATRON}:legacy_critic_build",
            path="legacy workers",
            why="0.7.1's default critic builds model and optimizer in this one method",
            parameters=("optim_config", "override_ddp_config"),
            relies_on=("dtype", "init_megatron_optim_config"),
            optional=True,
        ),
        # Direct callers, outside any engine.
        Seam(
            target="verl.utils.megatron_utils:get_model",
            feature="grad-bucket-alignment",
            wrapper=f"{_MEGATRON}:direct_build",
            path="megatron",
            why="a direct caller is taken at its model's dtype",
            upstream=_PULL,
            delete_when="get_model aligns the bucket itself",
            parameters=("wrap_with_ddp", "use_distributed_optimizer", "override_ddp_config"),
            aliases=("verl.workers.megatron_workers:get_model",),
        ),
        Seam(
            target="verl.utils.megatron_utils:make_megatron_module",
            feature="grad-bucket-alignment",
            wrapper=f"{_MEGATRON}:direct_build",
            path="megatron",
            why="the same for mbridge and the Megatron-Bridge provider",
            upstream="https://github.com/verl-project/verl/pull/7485",
            delete_when="make_megatron_module aligns the bucket itself",
            parameters=("override_ddp_config",),
        ),
        Seam(
            target="verl.utils.megatron.optimizer:get_megatron_optimizer",
            feature="grad-bucket-alignment",
            wrapper=f"{_MEGATRON}:check_optimizer",
            path="megatron",
            why="the first call that has config, parameters and buckets in hand",
            delete_when="Megatron checks main_grads_dtype against the bucket",
            parameters=("model", "config"),
        ),
        Seam(
            target=f"{_ENGINE}._resolve_override_ddp_config",
            feature="grad-bucket-alignment",
            wrapper="",
            path="native",
            why="verl's own alignment, left alone; the DDP seam adds what it leaves out",
            upstream="https://github.com/verl-project/verl/pull/7485",
            native=f"{_MEGATRON}:native_bucket",
            optional=True,
        ),
        # Between its phases verl moves the optimizer's states to the CPU and back.
        *(
            Seam(
                target=f"verl.utils.megatron_utils:{name}",
                feature="bf16-dispatch",
                wrapper=f"{_MEGATRON}:{wrapper}",
                path="offload",
                why="before 0.9 verl leaves FusedAdam's masters on the GPU",
                delete_when="verl >= 0.9 is the oldest in use",
                parameters=("optimizers",),
                relies_on=("exp_avg", "exp_avg_sq"),
                aliases=(
                    f"verl.workers.engine.megatron.transformer_impl:{name}",
                    f"{_LEGACY}:{name}",
                ),
                native=f"{_MEGATRON}:native_offload",
            )
            for name, wrapper in (
                ("offload_megatron_optimizer", "offload_masters"),
                ("load_megatron_optimizer", "load_masters"),
            )
        ),
        # Engines whose optimizer is not Megatron's.
        *(
            Seam(
                target=f"verl.workers.engine.{module}.transformer_impl:{engine}.initialize",
                feature=feature,
                wrapper="precision_shim_adapters.verl.engines:refuse",
                path=f"{module} engine",
                why="says so where the engine is used, instead of leaving a silent gap",
                delete_when="the engine is supported",
                optional=True,
                refusal=f"verl's {module} engine {reason}",
            )
            for module, engine, reason in (
                (
                    "torchtitan",
                    "TorchTitanEngine",
                    "builds torchtitan's own optimizer, whose states follow its parameters",
                ),
                (
                    "automodel",
                    "AutomodelEngine",
                    "builds its optimizer from its own dtype strings (optimizer_config."
                    "exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype)",
                ),
            )
            for feature in ("bf16-dispatch", "grad-bucket-alignment")
        ),
    ),
)
"""verl's seams; the innermost wrapper of a target comes first."""
