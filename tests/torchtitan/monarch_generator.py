"""The actors of ``monarch_driver``: torchtitan's own trainer and generator, with reports.

torchtitan's generator runs vLLM with attention kernels for CUDA. ``Engine`` stands in for vLLM's
engine: it holds torchtitan's model in the dtype that the engine's arguments ask for. The actors'
processes, the messages between them and TorchStore are the real ones.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from . import absent, cpu

sys.meta_path.append(absent.Finder("vllm", "renderers"))

import torch  # noqa: E402
from monarch.actor import endpoint  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.experiments.rl.actors import generator as generators  # noqa: E402
from torchtitan.experiments.rl.actors import trainer as trainers  # noqa: E402

from .monarch_store import Store  # noqa: E402


class Engine:
    """Has the attributes of vLLM's ``LLMEngine`` that a generator uses."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        utils.set_spmd_backend("partial_dtensor")  # as torchtitan's wrapper of its model does
        dtype = getattr(torch, arguments["dtype"])
        self.model = cpu.model_spec().model.build().to(dtype)
        worker = SimpleNamespace(get_model=lambda: SimpleNamespace(model=self.model))
        self.model_executor = SimpleNamespace(driver_worker=worker)
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0)
        )

    def reset_prefix_cache(self, **given: Any) -> None: ...


def replace_vllm() -> None:
    """Replace in this process what torchtitan's actors import from vLLM, and their store."""
    trainers.ts = generators.ts = Store
    generators.EngineArgs = dict
    generators.LLMEngine = SimpleNamespace(from_engine_args=Engine)
    generators.register_to_vllm = lambda *given, **named: None
    generators.AttentionConfig = dict
    generators.AttentionBackendEnum = SimpleNamespace(CUSTOM="CUSTOM")
    generators.has_cuda_capability = lambda *version: True
    generators.VLLMCudagraphConfig.get_vllm_compilation_config = lambda self, **named: None


class Trainer(trainers.PolicyTrainer):
    """The real ``PolicyTrainer`` with ``look`` added."""

    def __init__(self, config: Any, folder: str, generator_dtype: str) -> None:
        replace_vllm()
        super().__init__(
            config,
            model_spec=cpu.model_spec(),
            compile_config=CompileConfig(),
            generator_dtype=generator_dtype,
            output_dir=folder,
        )

    @endpoint
    async def look(self) -> dict[str, Any]:
        """The trainer's fp32 weights, as lists of numbers, and attention's dtypes."""
        weights = self.model.state_dict()
        return {
            "sent": {name: cpu.local(one).tolist() for name, one in weights.items()},
            "attention": sorted(str(one) for one in cpu.SEEN),
        }


class Generator(generators.VLLMGenerator):
    """The real ``VLLMGenerator`` with ``look`` added."""

    def __init__(self, config: Any, folder: str) -> None:
        replace_vllm()
        super().__init__(
            config,
            model_spec=cpu.model_spec(),
            model_path=folder,
            compile_config=CompileConfig(),
            max_num_seqs=8,
            output_dir=folder,
        )

    @endpoint
    async def look(self) -> dict[str, Any]:
        """Whether the shim is on, the dtype in the engine's arguments, and the engine's weights."""
        import precision_shim

        weights = self._get_model().model.state_dict()
        return {
            "enabled": precision_shim.status().enabled,
            "dtype": self._engine.arguments["dtype"],
            "version": self.policy_version,
            "held": sorted({str(one.dtype) for one in weights.values()}),
            "weights": {name: one.float().tolist() for name, one in weights.items()},
        }
