"""SkyRL: the table of seams.

Why these layers. SkyRL's ``init_megatron_optim_config`` sees neither the model nor its dtype, and
the bucket is decided before it, in ``make_megatron_module``. So the shim notes which model is being
built around both (``MegatronPolicyWorkerBase.init_model``), looks at the live parameters in
Megatron's own DDP, and lets one plan answer for both. SkyRL's own body still runs: values come in
through the kwargs that it merges over its own, beneath what the user wrote there. What the user
wrote is told from the defaults where the dataclasses are built, and travels with them to the
workers.

On FSDP the strategy object makes the optimizer, runs the backward pass, clips, steps and saves:
everything that loss scaling needs, for policy and critic alike.

Deliberately not patched: the inference engines and the jax backend.

Delete when: SkyRL dispatches on the model's dtype, keeps what was written apart from what was
defaulted, and scales fp16 losses; see each seam.
"""

from __future__ import annotations

from precision_shim.adapting import Adapter, Seam

from .. import megatron, megatron_checkpoint, megatron_offload, megatron_overflow
from ..frameworks import SKYRL

_MEGATRON = "precision_shim_adapters.skyrl.megatron"
_CONFIG = "precision_shim_adapters.skyrl.config"
_OVERFLOW = "precision_shim_adapters.skyrl.overflow"
_FSDP = "precision_shim_adapters.skyrl.fsdp"
_PROCESSES = "precision_shim_adapters.skyrl.processes"
_TRAIN = "skyrl.backends.skyrl_train"
_OPTIMIZER = f"{_TRAIN}.distributed.megatron.optimizer"
_WORKER = f"{_TRAIN}.workers.megatron.megatron_worker"
_STRATEGY = f"{_TRAIN}.distributed.fsdp_strategy:FSDPStrategy"
_BASE = f"{_TRAIN}.workers.worker"
_DATACLASSES = "skyrl.train.config.config"
_PULL = "https://github.com/NovaSky-AI/SkyRL/pull/1805"


_BUILDING = ("bf16-dispatch", "grad-bucket-alignment", "fp16-scaling")
"""The features that need to know which model is being built."""

_WRITTEN_BY = ("bf16-dispatch", "grad-bucket-alignment")
"""The features that need to know what the user wrote."""

_ALL = ("dtype-coercion", *_BUILDING)


def _each(features: tuple[str, ...], target: str, wrapper: str, **common: object) -> list[Seam]:
    """The same entry under several features."""
    values = {"path": "megatron", **common}
    return [
        Seam(target=target, feature=feature, wrapper=wrapper, **values)  # type: ignore[arg-type]
        for feature in features
    ]


def _fp16(target: str, wrapper: str, why: str, *relies_on: str, **more: object) -> Seam:
    values = {"path": "fsdp", "delete_when": "SkyRL scales fp16 losses on FSDP", **more}
    return Seam(
        target=target,
        feature="fp16-scaling",
        wrapper=f"{_FSDP}:{wrapper}" if ":" not in wrapper else wrapper,
        why=why,
        relies_on=relies_on,
        **values,  # type: ignore[arg-type]
    )


_BUILD = "SkyRL decides bucket and optimizer states in one place"
_WRITTEN = "SkyRL's config tells what was written from what was defaulted"

ADAPTER = Adapter(
    **SKYRL.declared(),
    paths={
        **megatron_checkpoint.PATHS,
        **megatron_overflow.PATHS,
        **megatron_offload.PATHS,
        "megatron": "Megatron workers",
        "fsdp": "FSDP workers",
        "trainer": "all workers (the trainer's metrics)",
        "tinker": "all workers (Tinker's metrics)",
        "ray": "all workers (their start in Ray)",
    },
    seams=(
        *megatron.SEAMS,
        *megatron_checkpoint.SEAMS,
        *megatron_overflow.SEAMS,
        # The optimizer's config. Dispatch is the inner layer: it reads coerced dtypes.
        Seam(
            target=f"{_OPTIMIZER}:init_megatron_optim_config",
            feature="bf16-dispatch",
            wrapper=f"{_MEGATRON}:dispatch",
            path="megatron",
            why="the one function that makes SkyRL's OptimizerConfig; it hard-codes bf16",
            delete_when="it is given the model's dtype",
            parameters=("optim_config", "optimizer_config_kwargs"),
            relies_on=("bf16", "params_dtype", "update"),
            aliases=(f"{_WORKER}:init_megatron_optim_config",),
            optional=True,
        ),
        Seam(
            target=f"{_OPTIMIZER}:init_megatron_optim_config",
            feature="dtype-coercion",
            wrapper=f"{_MEGATRON}:coerce_kwargs",
            path="megatron",
            why="optimizer_config_kwargs reach Megatron as YAML wrote them, strings included",
            upstream=_PULL,
            delete_when="SkyRL >= 0.3 is the oldest in use",
            parameters=("optim_config", "optimizer_config_kwargs"),
            relies_on=("update",),
            aliases=(f"{_WORKER}:init_megatron_optim_config",),
            native=f"{_MEGATRON}:native_coercion",
            optional=True,
        ),
        Seam(
            target=f"{_OPTIMIZER}:get_megatron_optimizer",
            feature="grad-bucket-alignment",
            wrapper=f"{_MEGATRON}:check_optimizer",
            path="megatron",
            why="the first call that has config, parameters and buckets in hand",
            delete_when="Megatron checks main_grads_dtype against the bucket",
            parameters=("model", "config"),
            aliases=(f"{_WORKER}:get_megatron_optimizer",),
            optional=True,
        ),
        # Which model is being built: around the DDP and the optimizer of one model.
        *_each(
            _BUILDING,
            f"{_WORKER}:MegatronPolicyWorkerBase.init_model",
            f"{_MEGATRON}:worker_build",
            why="around model and optimizer, with the worker's config",
            delete_when=_BUILD,
            relies_on=("make_megatron_module", "init_megatron_optim_config", "megatron_config"),
            optional=True,
        ),
        *_each(
            _BUILDING,
            f"{_WORKER}:MegatronWorker.make_megatron_module",
            f"{_MEGATRON}:module_build",
            why="a caller outside init_model gets the same bucket",
            delete_when=_BUILD,
            parameters=("self", "ddp_config"),
            relies_on=("provide_distributed_model", "pipeline_dtype"),
            optional=True,
        ),
        # The model's dtype.
        Seam(
            target=f"{_WORKER}:MegatronWorker.init_configs",
            feature="bf16-dispatch",
            wrapper=f"{_MEGATRON}:note_flag",
            path="megatron",
            why="knows trainer.bf16, which beside a bf16 or fp16 checkpoint is not obeyed",
            delete_when="init_configs sets the provider's dtype from its bf16 argument",
            parameters=("self", "bf16"),
            relies_on=("to_megatron_provider", "transformer_config_kwargs", "finalize"),
            optional=True,
        ),
        Seam(
            target="megatron.bridge.models.conversion.auto_bridge:AutoBridge.to_megatron_provider",
            feature="bf16-dispatch",
            wrapper=f"{_MEGATRON}:follow_flag",
            path="megatron",
            why="the checkpoint's dtype is known, and the user's own settings come after",
            delete_when="init_configs sets the provider's dtype from its bf16 argument",
            parameters=("self",),
            optional=True,
        ),
        # What the user wrote, told from the defaults.
        *_each(
            _WRITTEN_BY,
            f"{_DATACLASSES}:MegatronDDPConfig.__init__",
            f"{_CONFIG}:leave_default_to_class",
            why="a written grad_reduce_in_fp32=True looks like the default",
            delete_when=_WRITTEN,
            parameters=("grad_reduce_in_fp32",),
        ),
        *_each(
            _WRITTEN_BY,
            f"{_DATACLASSES}:MegatronConfig.__init__",
            f"{_CONFIG}:note_written_kwargs",
            why="a written use_precision_aware_optimizer=False looks like the default",
            delete_when=_WRITTEN,
            parameters=("ddp_config", "optimizer_config_kwargs"),
        ),
        *_each(
            _WRITTEN_BY,
            f"{_DATACLASSES}:SkyRLTrainConfig.from_cli_overrides",
            f"{_CONFIG}:note_overrides",
            why="overrides in the old style are merged over a YAML that spells out the defaults",
            delete_when=_WRITTEN,
            parameters=("args",),
            relies_on=("from_cli",),
        ),
        *_each(
            _WRITTEN_BY,
            "skyrl.train.config.legacy:translate_legacy_config",
            f"{_CONFIG}:note_old_style",
            why="tells that the YAML was gone through; only the old style comes here",
            delete_when="SkyRL >= 0.3 is the oldest in use",
            optional=True,
        ),
        # Between its phases SkyRL moves the optimizer's states to the CPU and back.
        *megatron_offload.seams(
            f"{_TRAIN}.distributed.megatron.megatron_utils",
            (f"{_TRAIN}.distributed.megatron.megatron_strategy",),
            why="SkyRL leaves FusedAdam's masters on the GPU",
            delete_when="SkyRL moves master_param",
        ),
        # fp16 on Megatron: the scaler's settings, a skipped step, and both in SkyRL's metrics.
        Seam(
            target=f"{_OPTIMIZER}:init_megatron_optim_config",
            feature="fp16-scaling",
            wrapper=f"{_OVERFLOW}:scale_from_settings",
            path="megatron",
            why="its kwargs are the one way to the scaler's fields",
            delete_when="SkyRL's optimizer config has fields for the loss scaler",
            parameters=("optim_config", "optimizer_config_kwargs"),
            relies_on=("update",),
            aliases=(f"{_WORKER}:init_megatron_optim_config",),
            optional=True,
        ),
        _fp16(
            f"{_TRAIN}.distributed.megatron.megatron_strategy:MegatronStrategy.optimizer_step",
            f"{_OVERFLOW}:step",
            "drops what Megatron's step says of success",
            "step",
            "scheduler",
            path="megatron",
            delete_when="SkyRL counts and reports skipped steps",
            parameters=("self", "optimizer", "scheduler"),
            optional=True,
        ),
        _fp16(
            f"{_WORKER}:MegatronPolicyWorkerBase.forward_backward",
            f"{_OVERFLOW}:report",
            "returns the metrics that the trainer logs, reduced over the ranks",
            "all_reduce_metrics",
            path="megatron",
            delete_when="SkyRL reports the loss scale",
            optional=True,
        ),
        _fp16(
            f"{_WORKER}:MegatronWeightExtractor._init_param_buckets",
            f"{_OVERFLOW}:size_fp16",
            "its table of sizes has no fp16: sending the weights would end in a KeyError",
            "prec_to_bytes",
            "get_conversion_tasks",
            path="megatron",
            delete_when="its table of sizes has fp16",
            optional=True,
        ),
        _fp16(
            f"{_TRAIN}.workers.worker_utils:reduce_metrics",
            f"{_OVERFLOW}:keep_last",
            "takes means over a step's mini-batches, of a loss scale and a count too",
            path="trainer",
            delete_when="it has a reduction for the last value",
            parameters=("metrics",),
            aliases=(
                "skyrl.train.trainer:reduce_metrics",
                f"{_BASE}:reduce_metrics",
                f"{_WORKER}:reduce_metrics",
            ),
        ),
        _fp16(
            f"{_TRAIN}.workers.worker_dispatch:WorkerDispatch.forward_backward",
            f"{_OVERFLOW}:note_scaled",
            "the driver sees here which model's workers scale their loss",
            path="tinker",
            delete_when="SkyRL's optim_step says which steps were skipped",
            parameters=("self", "model"),
            optional=True,
        ),
        _fp16(
            "skyrl.backends.skyrl_train_backend:SkyRLTrainBackend.optim_step",
            f"{_OVERFLOW}:report_to_client",
            "the Tinker server's answer is JSON, in which a grad norm of NaN is an error",
            "metrics",
            "grad_norm",
            "_dispatch",
            path="tinker",
            delete_when="it leaves out what is not finite",
            parameters=("self", "model_id"),
            optional=True,
        ),
        # fp16 on FSDP.
        _fp16(
            f"{_STRATEGY}._fsdp_init_model",
            "autocast_in_fp16",
            "every model passes here; the workers' autocast is hard-coded in six places",
            "mixed_precision",
            "param_dtype",
            "device_mesh",
        ),
        _fp16(
            f"{_STRATEGY}._fsdp_init_train_model",
            "scale_train_model",
            "makes the optimizer of policy and critic",
            "AdamW",
        ),
        _fp16(
            f"{_STRATEGY}.backward",
            "scale_loss",
            "every backward pass of the FSDP workers",
            parameters=("self", "loss"),
        ),
        _fp16(
            f"{_STRATEGY}.optimizer_step",
            "step",
            "clips, looks whether the norm is finite, and steps",
            "max_norm",
            "isfinite",
            "zero_grad",
            parameters=("self", "optimizer", "model", "scheduler"),
        ),
        _fp16(
            f"{_STRATEGY}.save_checkpoint",
            "save",
            "client_state is stored with the checkpoint, without a file of its own",
            "client_state",
            "extra_state_dict",
            parameters=("self", "ckpt_dir", "optimizer", "client_state"),
        ),
        _fp16(
            f"{_STRATEGY}.load_checkpoint",
            "load",
            "returns client_state as it was stored",
            "client_state",
            parameters=("self", "ckpt_dir", "optimizer", "load_optimizer_states"),
        ),
        *(
            _fp16(
                f"{_BASE}:{kind}.forward_backward",
                "report",
                "returns the metrics that the trainer logs, reduced over the ranks",
                "all_reduce_metrics",
                "strategy",
            )
            for kind in ("PolicyWorkerBase", "CriticWorkerBase")
        ),
        # Other processes.
        *_each(
            _ALL,
            "skyrl.train.utils.utils:prepare_runtime_environment",
            f"{_PROCESSES}:carry_variables",
            path="ray",
            why="forwards a fixed list of variables to the workers",
            delete_when="it has a place for variables of others",
            parameters=("cfg",),
            relies_on=("env_vars",),
        ),
        *_each(
            _ALL,
            f"{_BASE}:PPORayActorGroup._initiate_actors",
            f"{_PROCESSES}:renew_actor_class",
            path="ray",
            why="the one place that starts workers; their actor classes were made while importing",
            delete_when="SkyRL decorates its workers where it starts them",
            relies_on=("ray_actor_type", "remote"),
        ),
    ),
)
"""SkyRL's seams; the innermost wrapper of a target comes first."""
