"""Every framework that the shim supports, declared once; it imports nothing.

The keys of a declaration:
    framework: the name that users write.
    distribution: its distribution's name, for its version.
    packages: top-level packages whose import wakes the adapter. The adapter's folder here has the
        same name: the start-up file knows it by that.
    tested: versions that the test environments pin.
    effects: places where a DDP or an optimizer is built, on each path through the framework. Under
        strict a fault is raised there and nowhere earlier. A place that a version lacks is skipped.
    probes: modules whose functions ask whether what the rules assume still holds.
    plan: ``"module:function"``, from a launch line to the models of its job.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MEGATRON_EFFECTS = (
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
)
"""Megatron's part of a framework's effects, and all that is known of a third party's adapter that
cannot be loaded."""

PROBES = ("precision_shim_adapters.megatron.reading.probes", "precision_shim_adapters.fp16.probes")
"""Modules that ask what every framework here is built on."""

VERL: "dict[str, Any]" = {
    "framework": "verl",
    "distribution": "verl",
    "packages": ("verl",),
    "tested": ("0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    "effects": (
        *MEGATRON_EFFECTS,
        # Every FSDP optimizer comes from here: of the engine, and of 0.7.1's legacy workers.
        "verl.workers.config.optimizer:build_optimizer",
    ),
    "probes": (*PROBES, "precision_shim_adapters.verl.probes"),
    "plan": "precision_shim_adapters.verl.plan:plan_job",
}

SKYRL: "dict[str, Any]" = {
    "framework": "skyrl",
    "distribution": "skyrl",
    "packages": ("skyrl",),
    "tested": ("0.2.0", "0.3.0", "0.4.0"),
    "effects": (
        *MEGATRON_EFFECTS,
        "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy._fsdp_init_train_model",
    ),
    "probes": (*PROBES, "precision_shim_adapters.skyrl.probes"),
    "plan": "precision_shim_adapters.skyrl.plan:plan_job",
}

NEMO_RL: "dict[str, Any]" = {
    "framework": "nemo-rl",
    "distribution": "nemo-rl",
    "packages": ("nemo_rl",),
    "tested": ("0.4.0", "0.5.0rc0", "0.6.0", "0.7.0"),
    "effects": (
        *MEGATRON_EFFECTS,
        "nemo_rl.models.dtensor.parallelize:_parallelize_model",
        "nemo_rl.models.automodel.setup:setup_model_and_optimizer",
    ),
    "probes": (*PROBES, "precision_shim_adapters.nemo_rl.probes"),
    "plan": "precision_shim_adapters.nemo_rl.plan:plan_job",
}

TORCHTITAN: "dict[str, Any]" = {
    "framework": "torchtitan",
    "distribution": "torchtitan",
    "packages": ("torchtitan",),
    "tested": ("0.3.0",),
    "effects": ("torchtitan.components.optimizer.optimizer:OptimizersContainer.__init__",),
    "probes": (
        "precision_shim_adapters.fp16.probes",
        "precision_shim_adapters.torchtitan.probes",
    ),
    "plan": "precision_shim_adapters.torchtitan.plan:plan_job",
}

FRAMEWORKS = {
    "precision_shim_adapters.verl:ADAPTER": VERL,
    "precision_shim_adapters.skyrl:ADAPTER": SKYRL,
    "precision_shim_adapters.nemo_rl:ADAPTER": NEMO_RL,
    "precision_shim_adapters.torchtitan:ADAPTER": TORCHTITAN,
}
"""By the place of its ``Adapter``, which adds the seams; in the order in which ``status()`` shows
them."""

SHARED = {
    "megatron.core": "megatron-core",
    "megatron.bridge": "megatron-bridge",
    "nemo_automodel": "nemo-automodel",
}
"""Packages that frameworks build on and that seams are in, with their distributions' names."""

AUDIT_READERS = {"megatron": "precision_shim_adapters.megatron.reading.reader:read"}
"""Top-level package of an optimizer's class, to what reads such optimizers for the audit."""

CHECKPOINT_READERS = {"megatron": "precision_shim_adapters.megatron_checkpoints:read"}
"""Kind of a checkpoint's files, to what sorts their tensors; others are sorted as torch's own."""

CHECKPOINTS: "dict[str, dict[str, Any]]" = {
    "verl": {
        "steps": r"global_step_(\d+)",
        "models": ("actor", "critic"),
        "resuming": {
            "megatron": "precision_shim_adapters.verl.resuming:megatron",
            "shards": "precision_shim_adapters.verl.resuming:fsdp",
        },
    },
    "skyrl": {
        "steps": r"global_step_(\d+)",
        "models": ("policy", "critic"),
        "resuming": {
            "megatron": "precision_shim_adapters.skyrl.resuming:megatron",
            "shards": "precision_shim_adapters.skyrl.resuming:fsdp",
        },
    },
    "nemo-rl": {
        "steps": r"step_(\d+)",
        "models": ("policy", "value"),
        "resuming": {
            "megatron": "precision_shim_adapters.nemo_rl.resuming:megatron",
            "dcp": "precision_shim_adapters.nemo_rl.resuming:dtensor",
            "safetensors": "precision_shim_adapters.nemo_rl.resuming:dtensor",
        },
    },
    "torchtitan": {
        "steps": r"step-(\d+)",
        "models": (),
        "resuming": {"dcp": "precision_shim_adapters.torchtitan.resuming:dcp"},
    },
}
"""By framework: how its directories of steps and of models are called, and by kind of files, what
foretells a resume."""
