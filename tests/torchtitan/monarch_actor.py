"""The actor of ``monarch_driver``: the real ``PolicyTrainer`` and a report method."""

from __future__ import annotations

from typing import Any

from monarch.actor import endpoint
from torchtitan.config import CompileConfig
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

from . import cpu


class Trainer(PolicyTrainer):
    """The real ``PolicyTrainer`` with ``look`` added."""

    def __init__(self, config: Any, folder: str) -> None:
        super().__init__(
            config, model_spec=cpu.model_spec(), compile_config=CompileConfig(), output_dir=folder
        )

    @endpoint
    async def look(self) -> dict[str, Any]:
        """Whether the shim is on, whether all values are finite, and attention's dtypes."""
        import precision_shim

        values = cpu.values(self).values()
        return {
            "enabled": precision_shim.status().enabled,
            "finite": all(bool(one.isfinite().all()) for one in values),
            "attention": sorted(str(one) for one in cpu.SEEN),
        }
