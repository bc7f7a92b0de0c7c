"""An ``Adapter`` for each framework that the shim supports, and a ``Backend`` for Megatron.

``status()`` shows the frameworks in the order of ``FRAMEWORKS``. ``zz_precision_shim.py`` repeats
the frameworks' package names. ``precision_shim.process.framework`` explains the objects' fields.
"""

from precision_shim.process.framework import Adapter, Backend, Checkpoints, Config

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MEGATRON_EFFECTS = (
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
)
"""Megatron's functions that raise an error in strict mode if an adapter has a fault. If a third
party's adapter cannot be loaded, only these functions raise its import error."""

MEGATRON_PATHS = {
    "megatron checkpoint states": "Megatron (states in checkpoints)",
    "megatron checkpoint keys": "Megatron (keys in checkpoints)",
    "megatron-fsdp": "Megatron-FSDP",
    "megatron weights alone": "Megatron (weights loaded without states)",
    "megatron offloaded states": "Megatron (resume of an offloaded optimizer)",
    "audit": "Megatron's optimizers",
}
"""Names for users of the groups on Megatron's functions, besides an adapter's groups."""

MEGATRON = Backend(
    config=Config(
        "Megatron's OptimizerConfig",
        "megatron.core.optimizer.optimizer_config:OptimizerConfig.__init__",
        fields=(
            "adam_beta2",
            "bf16",
            "decoupled_lr",
            "decoupled_min_lr",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "fp16",
            "loss_scale",
            "lr",
            "main_grads_dtype",
            "main_params_dtype",
            "min_lr",
            "optimizer",
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "params_dtype",
            "store_param_remainders",
            "use_distributed_optimizer",
            "use_precision_aware_optimizer",
        ),
        beside=("grad_reduce_in_fp32",),  # a field of DDP's config
        numbers=("adam_beta2", "decoupled_lr", "decoupled_min_lr", "lr", "min_lr"),
        remedies=(
            {"exp_avg_sq_dtype": "fp32"},
            {"exp_avg_dtype": "fp32"},
            {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"},
            {"use_precision_aware_optimizer": False},
            {"use_precision_aware_optimizer": True},
        ),
    ),
    limits="precision_shim_adapters.megatron.policy.limits:describe_limits",
    shared={
        "megatron.core": "megatron-core",
        "megatron.bridge": "megatron-bridge",
        "nemo_automodel": "nemo-automodel",
    },
    audit_readers={"megatron": "precision_shim_adapters.megatron.audit.reader:read_optimizers"},
    checkpoint_readers={"megatron": "precision_shim_tools.checkpoint.megatron_files:fill_part"},
)
BACKENDS = (MEGATRON,)

FLAGS_RESUME = "precision_shim_tools.checkpoint.megatron:predict_by_flags"
"""Predicts how a trainer with Megatron's flags resumes."""


def _ours(framework: str, **facts: "Any") -> Adapter:
    """Return the record of an adapter of ours, which lies in a folder with the framework's name."""
    name = framework.replace("-", "_")
    place = f"precision_shim_adapters.{name}.adapter:SEAMS"
    facts = {"packages": (name,), "effects": MEGATRON_EFFECTS, **facts}
    return Adapter(framework, facts.pop("distribution", framework), place=place, **facts)


VERL = _ours(
    "verl",
    paths={
        **MEGATRON_PATHS,
        "offload": "Megatron (offload of states)",
        "megatron": "Megatron engine",
        "native": "Megatron engine",
        "legacy workers": "legacy Megatron workers",
        "fsdp engine": "FSDP engine",
        "legacy fsdp workers": "legacy FSDP workers",
        "metrics": "all engines (metrics)",
        "tinker metrics": "all engines (Tinker's metrics)",
        "legacy metrics": "legacy workers (metrics)",
        "rollout": "driver (both sides)",
        "veomni engine": "VeOmni engine",
        "fsdp_turbo engine": "FSDP Turbo engine",
        "torchtitan engine": "torchtitan engine",
        "automodel engine": "Automodel engine",
        "fsdp weights": "FSDP engine (weights to the rollout)",
        "torchtitan weights": "torchtitan engine (weights to the rollout)",
        "checkpoint engines": "checkpoint engines (weights to the rollout)",
        "LM head": "FSDP engine (LM head)",
        "legacy LM head": "legacy FSDP workers (LM head)",
        "Megatron LM head": "Megatron engine (LM head)",
        "legacy Megatron LM head": "legacy Megatron workers (LM head)",
        "weights audit": "all engines (audit of the weights to the rollout)",
        "legacy weights audit": "legacy workers (audit of the weights to the rollout)",
    },
    tested=("0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    effects=(
        *MEGATRON_EFFECTS,
        # ``build_optimizer`` makes every FSDP optimizer, also in verl 0.7.1's legacy workers.
        "verl.workers.config.optimizer:build_optimizer",
        "verl.workers.engine.veomni.transformer_impl:VeOmniEngine._build_optimizer",
        "verl.workers.engine.automodel.transformer_impl:AutomodelEngine._build_optimizer",
    ),
    plan="precision_shim_tools.plan.verl.job:plan_job",
    actors=r"verl\.",
    checkpoints=Checkpoints(
        steps=r"(?:global_step_|step-)(\d+)",  # verl's torchtitan engine writes "step-"
        models=("actor", "critic"),
        resuming={
            "megatron": "precision_shim_tools.checkpoint.verl:megatron",
            "shards": "precision_shim_tools.checkpoint.verl:fsdp",
            "dcp": "precision_shim_tools.checkpoint.verl:distributed",
            "safetensors": "precision_shim_tools.checkpoint.verl:distributed",
        },
        fields={"use_legacy_worker_impl": ("auto", "enable", "disable")},
    ),
)

SKYRL = _ours(
    "skyrl",
    paths={
        **MEGATRON_PATHS,
        "offload": "Megatron (offload of states)",
        "megatron": "Megatron workers",
        "megatron weight sync": "Megatron workers (weight sync)",
        "fsdp": "FSDP workers",
        "metrics": "all workers (metrics)",
        "trainer": "all workers (the trainer's metrics)",
        "tinker": "all workers (Tinker's metrics)",
        "ray": "all workers (their start in Ray)",
        "rollout": "the driver, for the inference engines",
        "rollout tinker": "the driver, for the inference engines (Tinker's server)",
        "LM head": "FSDP workers (LM head)",
        "Megatron LM head": "Megatron workers (LM head)",
        "weights audit": "all workers (audit of the weights to the inference engines)",
        "rollout weight sync": "the driver, for the inference engines (the delta sync's sender)",
    },
    tested=("0.2.0", "0.3.0", "0.4.0"),
    effects=(
        *MEGATRON_EFFECTS,
        "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy._fsdp_init_train_model",
    ),
    plan="precision_shim_tools.plan.skyrl:plan_job",
    # Its entry points and workers; its RegistryActor trains nothing.
    actors=r"skyrl\.(train\.|backends\.skyrl_train\.workers\.)",
    checkpoints=Checkpoints(
        steps=r"global_step_(\d+)",
        models=("policy", "critic"),
        resuming={
            "megatron": "precision_shim_tools.checkpoint.skyrl:megatron",
            "shards": "precision_shim_tools.checkpoint.skyrl:fsdp",
        },
    ),
)

NEMO_RL = _ours(
    "nemo-rl",
    paths={
        **MEGATRON_PATHS,
        "megatron": "Megatron workers",
        "megatron metrics": "Megatron workers (policy metrics)",
        "megatron value metrics": "Megatron workers (value metrics)",
        "dtensor v1": "DTensor v1",
        "dtensor v1 metrics": "DTensor v1 (metrics)",
        "dtensor v2": "DTensor v2",
        "dtensor v2 metrics": "DTensor v2 (metrics)",
        "dtensor value": "DTensor v2 value workers",
        "dtensor value metrics": "DTensor v2 value workers (metrics)",
        "rollout": "driver (both sides)",
        "weights audit": "all workers (audit of the weights to the rollout)",
    },
    tested=("0.4.0", "0.5.0rc0", "0.6.0", "0.7.0"),
    effects=(
        *MEGATRON_EFFECTS,
        "nemo_rl.models.dtensor.parallelize:_parallelize_model",
        "nemo_rl.models.automodel.setup:setup_model_and_optimizer",
    ),
    plan="precision_shim_tools.plan.nemo_rl:plan_job",
    # The workers that train, and the actors in their environments that start them.
    actors=r"nemo_rl\..*\bmodels\.(policy|value)\.",
    checkpoints=Checkpoints(
        steps=r"step_(\d+)",
        models=("policy", "value"),
        resuming={
            "megatron": "precision_shim_tools.checkpoint.nemo_rl:megatron",
            "dcp": "precision_shim_tools.checkpoint.nemo_rl:dtensor",
            "safetensors": "precision_shim_tools.checkpoint.nemo_rl:dtensor",
        },
    ),
)

TITAN_PRETRAINING = "pretraining"
"""The group of the seams on torchtitan's ``Trainer``, which verl's engine builds, too."""

TORCHTITAN = _ours(
    "torchtitan",
    paths={
        "rl": "RL trainer",
        "weights audit": "RL trainer (audit of the weights to the generators)",
        "rl metrics": "RL trainer (metrics)",
        TITAN_PRETRAINING: "pre-training and SFT",
        "pretraining metrics": "pre-training and SFT (metrics)",
        "attention": "varlen attention",
        "names": "config and command line",
        "rollout": "RL trainer and generator",
        "torchft": "TorchFT's trainer",
        "forge": "Forge's engine",
    },
    tested=("0.3.0",),
    effects=("torchtitan.components.optimizer.optimizer:OptimizersContainer.__init__",),
    plan="precision_shim_tools.plan.torchtitan:plan_job",
    checkpoints=Checkpoints(
        steps=r"step-(\d+)", resuming={"dcp": "precision_shim_tools.checkpoint.torchtitan:dcp"}
    ),
)

ROLL = _ours(
    "roll",
    paths={
        **MEGATRON_PATHS,
        "megatron": "Megatron",
        "fsdp2": "FSDP2",
        "rollout": "driver (both sides)",
    },
    tested=("0.3.0",),
    effects=(
        *MEGATRON_EFFECTS,
        "roll.distributed.strategy.fsdp2_strategy:FSDP2TrainStrategy.setup_fsdp2_configuration",
    ),
    # Not its workers that make rewards, environments and rollouts.
    actors=r"roll\.pipeline\.(base_worker\.(Actor|Critic|Infer)|distill\..*\.Student)Worker ",
    checkpoints=Checkpoints(
        steps=r"checkpoint-(\d+)",
        resuming={
            "megatron": FLAGS_RESUME,
            "dcp": "precision_shim_tools.checkpoint.roll:predict_sharded",
            "safetensors": "precision_shim_tools.checkpoint.roll:predict_sharded",
        },
    ),
    checkpoint_readers={"megatron": "precision_shim_tools.checkpoint.roll:fill_part"},
)

_BY_FLAGS: "dict[str, Any]" = {
    "paths": {
        **MEGATRON_PATHS,
        "megatron": "trainer",
        "rollout": "driver (both sides)",
        "LM head": "trainer (LM head)",
    },
    "checkpoints": Checkpoints(steps=r"iter_(\d+)", resuming={"megatron": FLAGS_RESUME}),
}
_TRAINS = r"\.backends\.megatron_utils\.actor\."
SLIME = _ours("slime", tested=("0.3.1",), actors=f"slime{_TRAINS}", **_BY_FLAGS)
MILES = _ours("miles", tested=("0.1.0",), actors=f"miles{_TRAINS}", **_BY_FLAGS)

AREAL = _ours(
    "areal",
    paths={**MEGATRON_PATHS, "megatron": "MegatronEngine", "rollout": "driver (both sides)"},
    tested=("1.0.4",),
    # Its scheduler's worker, and its launcher's task, of trainers and of rollouts.
    actors=r"areal\.infra\.(rpc\.ray_rpc_server\.|launcher\.ray\.run_func )",
    checkpoints=Checkpoints(
        steps=r"epoch\d+epochstep\d+globalstep(\d+)",  # recover_checkpoint/ has no number
        resuming={"megatron": "precision_shim_tools.checkpoint.trainers:areal"},
    ),
)

MS_SWIFT = _ours(
    "ms-swift",
    packages=("swift",),
    paths={
        **MEGATRON_PATHS,
        "megatron": "Megatron trainers",
        "ms-swift metrics": "Megatron trainers (metrics)",
        "rollout": "Ray driver (both sides)",
    },
    tested=("4.6.0",),
    checkpoints=Checkpoints(
        steps=r"checkpoint-(\d+)",
        resuming={"megatron": "precision_shim_tools.checkpoint.trainers:ms_swift"},
    ),
)

ANY_MEGATRON = _ours(
    "megatron",
    distribution="megatron-core",
    paths={**MEGATRON_PATHS, "megatron": "any job"},
    tested=("0.16.1", "0.18.2", "0.19.2"),
    by_name=True,
)
"""Any job on Megatron-core. ``PRECISION_SHIM_FRAMEWORKS=all`` does not include this record, because
otherwise the shim would patch Megatron in every process that imports Megatron."""

FRAMEWORKS = (VERL, SKYRL, NEMO_RL, TORCHTITAN, AREAL, MS_SWIFT, ROLL, SLIME, MILES, ANY_MEGATRON)
