"""Which adapters there are: our own by name, third parties' through an entry point.

An entry point of the group ``precision_shim.adapters`` names a ``seams.Adapter`` object; its name
is the framework's. Adapter modules are imported only when one of the framework's packages is, so
ours are listed here; the packages that wake them, in ``_startup``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._settings import FEATURES
from ._startup import ENTRY_POINTS, PACKAGES
from .errors import SeamError
from .seams import Adapter
from .seams._wrapper import resolve


@dataclass(frozen=True)
class Entry:
    """How to find an adapter without importing it.

    Attributes:
        framework: the name users write.
        distribution: name of the framework's distribution.
        packages: top-level packages whose import wakes the adapter.
        adapter: ``"module:attribute"`` of the ``Adapter``.
        effects: where a feature first takes effect, should the adapter itself be broken.
    """

    framework: str
    distribution: str
    packages: tuple[str, ...]
    adapter: str
    effects: tuple[str, ...] = ()

    def load(self) -> Adapter:
        """Import the adapter.

        Raises:
            SeamError: its module cannot be imported, or holds something else, or its table names
                a feature that there is not.
        """
        try:
            adapter = resolve(self.adapter)
        except (Exception, SystemExit) as error:  # nothing here may end the process
            raise SeamError(
                f"{self.framework}: the adapter {self.adapter} cannot be loaded: {error!r}. "
                f"Repair or remove it, or leave {self.framework} out with "
                "PRECISION_SHIM_FRAMEWORKS."
            ) from error
        if not isinstance(adapter, Adapter):
            raise SeamError(
                f"{self.framework}: {self.adapter} is a {type(adapter).__name__}, allowed: "
                "precision_shim.adapting.Adapter. Correct the entry point."
            )
        adapter.check(FEATURES)
        return adapter


MEGATRON_EFFECTS = (
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
)

BUILTIN = (
    Entry(
        "verl",
        "verl",
        PACKAGES["verl"],
        "precision_shim_adapters.verl:ADAPTER",
        MEGATRON_EFFECTS,
    ),
    Entry(
        "skyrl",
        "skyrl",
        PACKAGES["skyrl"],
        "precision_shim_adapters.skyrl:ADAPTER",
        (
            *MEGATRON_EFFECTS,
            "skyrl.backends.skyrl_train.distributed.fsdp_strategy:"
            "FSDPStrategy._fsdp_init_train_model",
        ),
    ),
    Entry(
        "nemo-rl",
        "nemo-rl",
        PACKAGES["nemo-rl"],
        "precision_shim_adapters.nemo_rl:ADAPTER",
        MEGATRON_EFFECTS,
    ),
)


def entries(*, third_party: bool = True) -> dict[str, Entry]:
    """All known adapters by framework name; ours cannot be displaced by an entry point."""
    found = {one.framework: one for one in BUILTIN}
    if third_party:
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS):
            name = point.name.strip().lower()
            found.setdefault(
                name, Entry(name, name, (name.replace("-", "_"),), point.value, MEGATRON_EFFECTS)
            )
    return found
