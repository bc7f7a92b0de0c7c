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

from precision_shim.adapting import Adapter, Seam

from .. import megatron, megatron_checkpoint, megatron_offload, megatron_overflow
from ..frameworks import VERL

_MEGATRON = "precision_shim_adapters.verl.megatron"
_PULL = "https://github.com/verl-project/verl/pull/6526"
_CONFIG = "verl.utils.megatron.optimizer:init_megatron_optim_config"
_FIELDS = "verl.workers.config.optimizer:McoreOptimizerConfig.__init__"
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"
_LEGACY = "verl.workers.megatron_workers"
_OVERFLOW = "precision_shim_adapters.verl.overflow"
_FSDP = "precision_shim_adapters.verl.fsdp"
_METRICS = "precision_shim_adapters.verl.metrics"
_SHARDED = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
_MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"


def _each(target: str, wrapper: str, **common: object) -> tuple[Seam, ...]:
    """The same entry under the features that need to know which model is being built."""
    return tuple(
        Seam(
            target=target,
            feature=feature,
            wrapper=wrapper,
            delete_when="verl decides bucket and optimizer states in one place",
            **common,  # type: ignore[arg-type]
        )
        for feature in ("bf16-dispatch", "grad-bucket-alignment", "fp16-scaling")
    )


ADAPTER = Adapter(
    **VERL.declared(),
    paths={
        **megatron_checkpoint.PATHS,
        **megatron_overflow.PATHS,
        **megatron_offload.PATHS,
        "megatron": "Megatron engine",
        "native": "Megatron engine",
        "legacy workers": "legacy Megatron workers",
        "fsdp engine": "FSDP engine",
        "legacy fsdp workers": "legacy FSDP workers",
        "metrics": "all engines (metrics)",
        "tinker metrics": "all engines (Tinker's metrics)",
        "veomni engine": "VeOmni engine",
        "fsdp_turbo engine": "FSDP Turbo engine",
        "torchtitan engine": "torchtitan engine",
        "automodel engine": "Automodel engine",
    },
    seams=(
        *megatron.SEAMS,
        *megatron_checkpoint.SEAMS,
        *megatron_overflow.SEAMS,
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
        *_each(
            f"{_ENGINE}.initialize",
            f"{_MEGATRON}:engine_build",
            path="megatron",
            why="the engine around both decisions; knows dtype, optimizer and DDP config",
            relies_on=("param_dtype", "optimizer_config", "engine_config", "_build_optimizer"),
            optional=True,
        ),
        *_each(
            f"{_LEGACY}:ActorRolloutRefWorker._build_model_optimizer",
            f"{_MEGATRON}:legacy_actor_build",
            path="legacy workers",
            why="0.7.1's default actor builds model and optimizer in this one method",
            parameters=("optim_config", "override_ddp_config"),
            relies_on=("dtype", "init_megatron_optim_config"),
            optional=True,
        ),
        *_each(
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
        # fp16 on Megatron: the scaler's settings, a skipped step, and both in verl's metrics.
        Seam(
            target=_CONFIG,
            feature="fp16-scaling",
            wrapper=f"{_OVERFLOW}:scale_from_settings",
            path="megatron",
            why="its override merge is the one way to fields that verl's fp16 branch sets",
            delete_when="verl's optimizer config has fields for the loss scaler",
            parameters=("optim_config", "fp16"),
            relies_on=("override_optimizer_config", "initial_loss_scale"),
        ),
        Seam(
            target=f"{_ENGINE}.optimizer_step",
            feature="fp16-scaling",
            wrapper=f"{_OVERFLOW}:step_engine",
            path="megatron",
            why="the engine's step, which raises for one that Megatron skipped",
            delete_when="verl takes a skipped step for one",
            relies_on=("optimizer", "NotImplementedError"),
            optional=True,
        ),
        *(
            Seam(
                target=f"verl.workers.{module}:{kind}.{method}",
                feature="fp16-scaling",
                wrapper=f"{_OVERFLOW}:{method}",
                path="legacy workers",
                why="0.7.1 raises inline: only the optimizer's step inside can be answered for",
                delete_when="verl 0.8 is the oldest in use",
                relies_on=(optimizer, "NotImplementedError"),
                optional=True,
            )
            for module, kind, method, optimizer in (
                ("actor.megatron_actor", "MegatronPPOActor", "update_policy", "actor_optimizer"),
                (
                    "critic.megatron_critic",
                    "MegatronPPOCritic",
                    "update_critic",
                    "critic_optimizer",
                ),
            )
        ),
        Seam(
            target="verl.workers.engine_workers:TrainingWorker._postprocess_output",
            feature="fp16-scaling",
            wrapper=f"{_METRICS}:report",
            path="metrics",
            why="where verl puts the grad norm, after the metrics of all ranks are gathered",
            delete_when="verl reports the loss scale",
            parameters=("output",),
            relies_on=("grad_norm", "engine"),
            optional=True,
        ),
        Seam(
            target="verl.workers.engine_workers_tinker:TinkerTrainingWorker.optimizer_step",
            feature="fp16-scaling",
            wrapper=f"{_METRICS}:report_step",
            path="tinker metrics",
            why="steps outside train_batch and has a dict of metrics of its own",
            delete_when="verl reports the loss scale",
            relies_on=("grad_norm", "engine"),
            optional=True,
        ),
        # Between its phases verl moves the optimizer's states to the CPU and back.
        *megatron_offload.seams(
            "verl.utils.megatron_utils",
            ("verl.workers.engine.megatron.transformer_impl", _LEGACY),
            why="before 0.9 verl leaves FusedAdam's masters on the GPU",
            delete_when="verl >= 0.9 is the oldest in use",
        ),
        # fp16 on FSDP: the scaler that verl makes or lacks, its metrics and its checkpoints.
        *(
            Seam(
                target=f"{_SHARDED}.{method}",
                feature="fp16-scaling",
                wrapper=f"{_FSDP}:{wrapper}",
                path="fsdp engine",
                optional=True,
                **facts,  # type: ignore[arg-type]
            )
            for method, wrapper, facts in (
                (
                    "_build_fsdp_module",
                    "build_engine",
                    {
                        "why": "where verl >= 0.8 makes its scaler, and 0.7.1 none",
                        "delete_when": "verl's scaler takes settings and counts skipped steps",
                        "relies_on": ("engine_config", "mixed_precision", "param_dtype"),
                    },
                ),
                (
                    "forward_backward_batch",
                    "scale_engine_loss",
                    {
                        "why": "0.7.1's loop knows no scaler: its loss comes from this argument",
                        "delete_when": "verl >= 0.8 is the oldest in use",
                        "parameters": ("loss_function", "forward_only"),
                        "relies_on": ("backward",),
                        "native": f"{_FSDP}:native_loop",
                    },
                ),
                (
                    "optimizer_step",
                    "step",
                    {
                        "why": "a skipped step has grad norm NaN; around 0.7.1's, which unscales "
                        "nothing, the rest of the scaler's work",
                        "delete_when": "verl reports skipped steps",
                        "relies_on": ("optimizer", "isfinite"),
                    },
                ),
                (
                    "save_checkpoint",
                    "save_engine",
                    {
                        "why": "the engine has the scaler, verl's manager has not",
                        "delete_when": "verl keeps the scaler in its checkpoints",
                        "parameters": ("local_path",),
                        "relies_on": ("checkpoint_manager",),
                        "native": f"{_FSDP}:native_checkpoint",
                    },
                ),
                (
                    "load_checkpoint",
                    "load_engine",
                    {
                        "why": "the engine has the scaler, verl's manager has not",
                        "delete_when": "verl keeps the scaler in its checkpoints",
                        "parameters": ("local_path",),
                        "relies_on": ("checkpoint_manager",),
                        "native": f"{_FSDP}:native_checkpoint",
                    },
                ),
            )
        ),
        *(
            Seam(
                target=target,
                feature="fp16-scaling",
                wrapper=f"{_FSDP}:{wrapper}",
                path="legacy fsdp workers",
                why=why,
                delete_when="verl 0.8 is the oldest in use",
                parameters=parameters,
                relies_on=relies_on,
                native=f"{_FSDP}:no_legacy_workers" if shared else "",
                optional=True,
            )
            for target, wrapper, why, parameters, relies_on, shared in (
                (
                    "verl.workers.actor.dp_actor:DataParallelPPOActor.__init__",
                    "build_actor",
                    "where the legacy actor's scaler is made",
                    ("config", "actor_optimizer"),
                    ("scaler", "ShardedGradScaler", "param_dtype", "fsdp_config"),
                    False,
                ),
                (
                    "verl.workers.actor.dp_actor:DataParallelPPOActor.update_policy",
                    "update_policy",
                    "its dict of metrics",
                    ("data",),
                    ("scaler", "actor_optimizer"),
                    False,
                ),
                (
                    "verl.workers.actor.dp_actor:DataParallelPPOActor._optimizer_step",
                    "step",
                    "a skipped step has grad norm NaN",
                    (),
                    ("scaler", "actor_optimizer"),
                    False,
                ),
                (
                    "verl.workers.critic.dp_critic:DataParallelPPOCritic.__init__",
                    "build_critic",
                    "the legacy critic trains fp16 parameters without a scaler",
                    ("config", "critic_optimizer"),
                    ("critic_optimizer",),
                    False,
                ),
                (
                    "verl.workers.critic.dp_critic:DataParallelPPOCritic.update_critic",
                    "update_critic",
                    "tells whose loss is being made; its dict of metrics",
                    ("data",),
                    ("compute_value_loss", "backward", "_optimizer_step"),
                    False,
                ),
                (
                    "verl.workers.critic.dp_critic:DataParallelPPOCritic._optimizer_step",
                    "step",
                    "unscale before its clipping, update after its step",
                    (),
                    ("critic_optimizer", "isfinite"),
                    False,
                ),
                (
                    "verl.trainer.ppo.core_algos:compute_value_loss",
                    "scale_value_loss",
                    "the loss of the legacy critic, before its backward",
                    ("vpreds",),
                    (),
                    True,
                ),
                (
                    f"{_MANAGER}.save_checkpoint",
                    "save_manager",
                    "one place for actor and critic; its optimizer tells which scaler",
                    ("local_path",),
                    ("optimizer",),
                    True,
                ),
                (
                    f"{_MANAGER}.load_checkpoint",
                    "load_manager",
                    "one place for actor and critic; its optimizer tells which scaler",
                    ("local_path",),
                    ("optimizer",),
                    True,
                ),
            )
        ),
        *(
            Seam(
                target=f"verl.workers.engine.{module}:{method}",
                feature="fp16-scaling",
                wrapper="precision_shim_adapters.verl.engines:refuse_fp16",
                path=f"{name} engine",
                why="says so where fp16 is asked of the engine, instead of training unscaled",
                delete_when="the engine is supported",
                optional=True,
                refusal=f"verl's {name} engine {reason}",
            )
            for module, method, name, reason in (
                (
                    "veomni.transformer_impl",
                    "VeOmniEngine.initialize",
                    "veomni",
                    "takes no float16: it trains in bfloat16 or float32 with bfloat16, and its "
                    "optimizer step knows no loss scaler",
                ),
                (
                    "fsdp.fsdp_turbo_impl",
                    "FSDPTurboEngineWithLMHead._build_fsdp_module",
                    "fsdp_turbo",
                    "shards the model by its own turbo_config, under a bfloat16 autocast, and "
                    "makes no loss scaler",
                ),
                (
                    "torchtitan.transformer_impl",
                    "TorchTitanEngine.initialize",
                    "torchtitan",
                    "runs its forward under a bfloat16 autocast and steps without a loss scaler",
                ),
                (
                    "automodel.transformer_impl",
                    "AutomodelEngine.initialize",
                    "automodel",
                    "runs its forward under a bfloat16 autocast and steps without a loss scaler",
                ),
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
