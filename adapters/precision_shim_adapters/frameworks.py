"""Every framework that the shim supports, declared once.

Processes that train nothing read this too: it imports nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

MEGATRON_EFFECTS: "Final" = (
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
)
"""Megatron's part of a framework's effects, and all that is known of a third party's adapter that
cannot be loaded."""


class Framework:
    """One framework, as far as it is known without torch and without its adapter.

    Attributes:
        name: the name that users write.
        distribution: the name of its distribution, for its version.
        packages: top-level packages whose import wakes the adapter.
        tested: versions that the test environments pin.
        adapter: ``"module:attribute"`` of the ``Adapter``, which holds the seams; imported when
            one of the packages is.
        effects: ``"module:attribute"`` targets where a feature first takes effect. Where a DDP or
            an optimizer is built on each path through the framework: in strict mode a fault is
            raised there, and nowhere earlier. One that a version lacks is passed over.
    """

    def __init__(
        self,
        *,
        name: str,
        distribution: str,
        packages: "tuple[str, ...]",
        tested: "tuple[str, ...]",
        adapter: str,
        effects: "tuple[str, ...]",
    ) -> None:
        self.name = name
        self.distribution = distribution
        self.packages = packages
        self.tested = tested
        self.adapter = adapter
        self.effects = effects

    def declared(self) -> "dict[str, Any]":
        """What the adapter's own record repeats; the seams are all that it adds."""
        return {
            "framework": self.name,
            "distribution": self.distribution,
            "packages": self.packages,
            "tested": self.tested,
            "effects": self.effects,
        }


VERL = Framework(
    name="verl",
    distribution="verl",
    packages=("verl",),
    tested=("0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    adapter="precision_shim_adapters.verl:ADAPTER",
    effects=(
        *MEGATRON_EFFECTS,
        # Every FSDP optimizer comes from here: of the engine, and of 0.7.1's legacy workers.
        "verl.workers.config.optimizer:build_optimizer",
    ),
)

SKYRL = Framework(
    name="skyrl",
    distribution="skyrl",
    packages=("skyrl",),
    tested=("0.2.0", "0.3.0"),
    adapter="precision_shim_adapters.skyrl:ADAPTER",
    effects=(
        *MEGATRON_EFFECTS,
        "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy._fsdp_init_train_model",
    ),
)

NEMO_RL = Framework(
    name="nemo-rl",
    distribution="nemo-rl",
    packages=("nemo_rl",),
    tested=("0.4.0", "0.5.0rc0", "0.6.0", "0.7.0"),
    adapter="precision_shim_adapters.nemo_rl:ADAPTER",
    effects=(
        *MEGATRON_EFFECTS,
        "nemo_rl.models.dtensor.parallelize:_parallelize_model",
        "nemo_rl.models.automodel.setup:setup_model_and_optimizer",
    ),
)

FRAMEWORKS = (VERL, SKYRL, NEMO_RL)
"""In the order in which ``status()`` shows them."""
