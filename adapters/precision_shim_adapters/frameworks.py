"""A ``Framework`` object for each framework that the shim supports, and a ``Backend`` for Megatron.

``status()`` shows the frameworks in the order of ``FRAMEWORKS``. ``zz_precision_shim.py`` repeats
the frameworks' package names. ``precision_shim.process.framework`` explains the objects' fields.
"""

from precision_shim.process.framework import Backend, Checkpoints, Config, Framework

MEGATRON_EFFECTS = (
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
)
"""Megatron's functions that raise an error in strict mode if an adapter has a fault. If a third
party's adapter cannot be loaded, only these functions raise its import error."""

MEGATRON = Backend(
    config=Config(
        "Megatron's OptimizerConfig",
        "megatron.core.optimizer.optimizer_config:OptimizerConfig.__init__",
        fields=(
            "adam_beta2",
            "bf16",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "fp16",
            "loss_scale",
            "main_grads_dtype",
            "main_params_dtype",
            "optimizer",
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "params_dtype",
            "store_param_remainders",
            "use_distributed_optimizer",
            "use_precision_aware_optimizer",
        ),
        beside=("grad_reduce_in_fp32",),  # a field of DDP's config
        numbers=("adam_beta2",),
        remedies=(
            {"exp_avg_sq_dtype": "fp32"},
            {"exp_avg_dtype": "fp32"},
            {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"},
            {"use_precision_aware_optimizer": False},
            {"use_precision_aware_optimizer": True},
        ),
    ),
    limits="precision_shim_adapters.megatron_limits:told",
    shared={
        "megatron.core": "megatron-core",
        "megatron.bridge": "megatron-bridge",
        "nemo_automodel": "nemo-automodel",
    },
    audit_readers={"megatron": "precision_shim_adapters.megatron.reading.reader:read_optimizers"},
    checkpoint_readers={"megatron": "precision_shim_adapters.megatron_checkpoints:fill_part"},
)
BACKENDS = (MEGATRON,)

VERL = Framework(
    framework="verl",
    distribution="verl",
    packages=("verl",),
    adapter="precision_shim_adapters.verl:ADAPTER",
    tested=("0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    effects=(
        *MEGATRON_EFFECTS,
        # ``build_optimizer`` makes every FSDP optimizer, also in verl 0.7.1's legacy workers.
        "verl.workers.config.optimizer:build_optimizer",
        "verl.workers.engine.veomni.transformer_impl:VeOmniEngine._build_optimizer",
        "verl.workers.engine.automodel.transformer_impl:AutomodelEngine._build_optimizer",
    ),
    plan="precision_shim_adapters.verl.plan:plan_job",
    checkpoints=Checkpoints(
        steps=r"(?:global_step_|step-)(\d+)",  # verl's torchtitan engine writes "step-"
        models=("actor", "critic"),
        resuming={
            "megatron": "precision_shim_adapters.verl.resuming:megatron",
            "shards": "precision_shim_adapters.verl.resuming:fsdp",
            "dcp": "precision_shim_adapters.verl.resuming:distributed",
            "safetensors": "precision_shim_adapters.verl.resuming:distributed",
        },
        fields={"use_legacy_worker_impl": ("auto", "enable", "disable")},
    ),
)

SKYRL = Framework(
    framework="skyrl",
    distribution="skyrl",
    packages=("skyrl",),
    adapter="precision_shim_adapters.skyrl:ADAPTER",
    tested=("0.2.0", "0.3.0", "0.4.0"),
    effects=(
        *MEGATRON_EFFECTS,
        "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy._fsdp_init_train_model",
    ),
    plan="precision_shim_adapters.skyrl.plan:plan_job",
    checkpoints=Checkpoints(
        steps=r"global_step_(\d+)",
        models=("policy", "critic"),
        resuming={
            "megatron": "precision_shim_adapters.skyrl.resuming:megatron",
            "shards": "precision_shim_adapters.skyrl.resuming:fsdp",
        },
    ),
)

NEMO_RL = Framework(
    framework="nemo-rl",
    distribution="nemo-rl",
    packages=("nemo_rl",),
    adapter="precision_shim_adapters.nemo_rl:ADAPTER",
    tested=("0.4.0", "0.5.0rc0", "0.6.0", "0.7.0"),
    effects=(
        *MEGATRON_EFFECTS,
        "nemo_rl.models.dtensor.parallelize:_parallelize_model",
        "nemo_rl.models.automodel.setup:setup_model_and_optimizer",
    ),
    plan="precision_shim_adapters.nemo_rl.plan:plan_job",
    checkpoints=Checkpoints(
        steps=r"step_(\d+)",
        models=("policy", "value"),
        resuming={
            "megatron": "precision_shim_adapters.nemo_rl.resuming:megatron",
            "dcp": "precision_shim_adapters.nemo_rl.resuming:dtensor",
            "safetensors": "precision_shim_adapters.nemo_rl.resuming:dtensor",
        },
    ),
)

TORCHTITAN = Framework(
    framework="torchtitan",
    distribution="torchtitan",
    packages=("torchtitan",),
    adapter="precision_shim_adapters.torchtitan:ADAPTER",
    tested=("0.3.0",),
    effects=("torchtitan.components.optimizer.optimizer:OptimizersContainer.__init__",),
    plan="precision_shim_adapters.torchtitan.plan:plan_job",
    checkpoints=Checkpoints(
        steps=r"step-(\d+)",
        resuming={"dcp": "precision_shim_adapters.torchtitan.resuming:dcp"},
    ),
)

ROLL = Framework(
    framework="roll",
    distribution="roll",
    packages=("roll",),
    adapter="precision_shim_adapters.roll:ADAPTER",
    tested=("0.3.0",),
    effects=(
        *MEGATRON_EFFECTS,
        "roll.distributed.strategy.fsdp2_strategy:FSDP2TrainStrategy.setup_fsdp2_configuration",
    ),
    checkpoints=Checkpoints(
        steps=r"checkpoint-(\d+)",
        resuming={
            "megatron": "precision_shim_adapters.by_flags:roll",
            "dcp": "precision_shim_adapters.by_flags:roll_sharded",
            "safetensors": "precision_shim_adapters.by_flags:roll_sharded",
        },
    ),
    checkpoint_readers={"megatron": "precision_shim_adapters.roll_checkpoints:fill_part"},
)

SLIME = Framework(
    framework="slime",
    distribution="slime",
    packages=("slime",),
    adapter="precision_shim_adapters.slime:ADAPTER",
    tested=("0.3.1",),
    effects=MEGATRON_EFFECTS,
    checkpoints=Checkpoints(
        steps=r"iter_(\d+)",
        resuming={"megatron": "precision_shim_adapters.by_flags:slime"},
    ),
)

MILES = Framework(
    framework="miles",
    distribution="miles",
    packages=("miles",),
    adapter="precision_shim_adapters.miles:ADAPTER",
    tested=("0.1.0",),
    effects=MEGATRON_EFFECTS,
    checkpoints=Checkpoints(
        steps=r"iter_(\d+)",
        resuming={"megatron": "precision_shim_adapters.by_flags:miles"},
    ),
)

AREAL = Framework(
    framework="areal",
    distribution="areal",
    packages=("areal",),
    adapter="precision_shim_adapters.areal:ADAPTER",
    tested=("1.0.4",),
    effects=MEGATRON_EFFECTS,
    checkpoints=Checkpoints(
        steps=r"epoch\d+epochstep\d+globalstep(\d+)",  # recover_checkpoint/ has no number
        resuming={"megatron": "precision_shim_adapters.areal:foretell"},
    ),
)

MS_SWIFT = Framework(
    framework="ms-swift",
    distribution="ms-swift",
    packages=("swift",),
    adapter="precision_shim_adapters.ms_swift:ADAPTER",
    tested=("4.6.0",),
    effects=MEGATRON_EFFECTS,
    checkpoints=Checkpoints(
        steps=r"checkpoint-(\d+)",
        resuming={"megatron": "precision_shim_adapters.ms_swift:foretell"},
    ),
)

ANY_MEGATRON = Framework(
    framework="megatron",
    distribution="megatron-core",
    packages=("megatron",),
    adapter="precision_shim_adapters.megatron_alone:ADAPTER",
    tested=("0.16.1", "0.18.2", "0.19.2"),
    effects=MEGATRON_EFFECTS,
    by_name=True,
)
"""Any job on Megatron-core. ``PRECISION_SHIM_FRAMEWORKS=all`` does not include this record, because
otherwise the shim would patch Megatron in every process that imports Megatron."""

FRAMEWORKS = (
    VERL,
    SKYRL,
    NEMO_RL,
    TORCHTITAN,
    AREAL,
    MS_SWIFT,
    ROLL,
    SLIME,
    MILES,
    ANY_MEGATRON,
)
