"""The device that the parts run on: one GPU, or a CPU instead of the GPU in a dry run.

Only this module calls device-specific functions, so that the parts run the same code on both
devices. A figure that a CPU cannot measure is ``None``.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

ENGINE = "transformer_engine"
SYNCHRONISING = "synchronizing CUDA operation"
"""Text of the warning that torch's sync debug mode gives for each synchronisation."""
NOT_COUNTED = "torch counts host synchronisations on a GPU only (torch.cuda.set_sync_debug_mode)"
NO_ALLOCATOR = "a CPU has no torch.cuda allocator to ask"
NO_TIMES = "times of a CPU with a stand-in say nothing about a GPU"


@dataclass
class Syncs:
    """Number of times that the host waited for the device; ``None`` on a CPU."""

    count: int | None = None


class Place:
    """The device that a part runs on.

    Attributes:
        dry: whether a CPU replaces the GPU.
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"

    # -- memory ------------------------------------------------------------------------------

    def allocated(self) -> int | None:
        """Bytes on the GPU that torch's allocator has given to tensors."""
        self.synchronize()
        return None if self.dry else torch.cuda.memory_allocated()

    def free(self) -> int | None:
        """Bytes that are free on the GPU after torch has released its cached memory."""
        self.tidy()
        return None if self.dry else int(torch.cuda.mem_get_info()[0])

    def peak_in(self, function: Callable[[], Any]) -> int | None:
        """The highest number of allocated bytes while a function runs."""
        if not self.dry:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        function()
        self.synchronize()
        return None if self.dry else torch.cuda.max_memory_allocated()

    def allocator(self) -> dict[str, int] | None:
        """Number of torch's memory allocations through the driver so far, and of retries."""
        if self.dry:
            return None
        known = torch.cuda.memory_stats()
        return {key: int(known.get(key, 0)) for key in ("num_device_alloc", "num_alloc_retries")}

    def tidy(self) -> None:
        """Collect unreachable objects, and release torch's cached memory to the driver."""
        gc.collect()
        if not self.dry:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    # -- time --------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def milliseconds(self, function: Callable[[], Any], repeat: int) -> list[float]:
        """Time ``repeat`` calls; the device is idle before and after each call."""
        taken = []
        for _ in range(repeat):
            self.synchronize()
            began = time.perf_counter()
            function()
            self.synchronize()
            taken.append((time.perf_counter() - began) * 1e3)
        return taken

    def copy_bandwidth(self) -> dict[str, float]:
        """Measure how many bytes per second a copy on the device reads and writes.

        Each buffer is 16 times as large as the device's L2 cache.
        """
        cache = 1 << 18 if self.dry else torch.cuda.get_device_properties(0).L2_cache_size
        size = 16 * max(cache, 1 << 18)
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        taken = self.milliseconds(lambda: target.copy_(source), 3 if self.dry else 30)
        typical = statistics.median(taken[len(taken) // 5 :])
        return {"bytes": size, "milliseconds": typical, "per_second": 2 * size / typical * 1e3}

    @contextmanager
    def host_syncs(self) -> Iterator[Syncs]:
        """Count how often the host waits for the device within the block."""
        seen = Syncs()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with self._sync_debug_mode():
                yield seen
        if not self.dry:
            seen.count = sum(SYNCHRONISING in str(one.message) for one in caught)

    @contextmanager
    def _sync_debug_mode(self) -> Iterator[None]:
        if self.dry:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    # -- the same bits each time -------------------------------------------------------------

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Make torch use deterministic kernels within the block, as far as they exist."""
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    # -- TransformerEngine -------------------------------------------------------------------

    def fused_adam(self) -> Any:
        """The FusedAdam class that Megatron uses on this device."""
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam


_place: Place | None = None
"""The ``Place`` of this process: written by ``enter``."""


def enter(dry: bool, stack: ExitStack, tell: Callable[..., None]) -> Place:
    """Return this process's ``Place``. The first call sets it up; ``stack`` ends it."""
    global _place
    if _place is None:
        engine = stack.enter_context(on_cpu() if dry else on_gpu())
        _place = Place(dry)
        tell(kind="machine", **machine(dry), transformer_engine=engine)
    return _place


@contextmanager
def on_cpu() -> Iterator[str]:
    """Run Megatron on a CPU with the stand-in for FusedAdam; yield the version it imitates."""
    from precision_shim_tools.testing import (
        megatron_on_cpu,
        model_parallel,
        stand_in_transformer_engine,
    )

    torch.set_num_threads(1)
    # Megatron calls kernels that need a GPU if it can import TransformerEngine.
    own = {name: sys.modules[name] for name in list(sys.modules) if name.startswith(ENGINE)}
    for name in own:
        del sys.modules[name]
    sys.modules[ENGINE] = None  # type: ignore[assignment]
    try:
        with stand_in_transformer_engine() as stand_in, megatron_on_cpu(), model_parallel():
            yield f"{stand_in.version} (the stand-in of precision_shim.testing)"
    finally:
        del sys.modules[ENGINE]
        sys.modules.update(own)


@contextmanager
def on_gpu() -> Iterator[str]:
    """Set up Megatron for one rank on one GPU; yield TransformerEngine's version."""
    from megatron.core import parallel_state, tensor_parallel

    from precision_shim_tools.testing import real_transformer_engine

    real = real_transformer_engine()
    if real is None:
        raise RuntimeError("TransformerEngine cannot be imported; see requirements.txt")
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/rendezvous", world_size=1, rank=0
        )
        try:
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(1234)
            yield real[0]
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def machine(dry: bool) -> dict[str, Any]:
    """Versions of the installed software, and properties of the device."""
    known: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": installed("megatron-core"),
        "precision_shim": _shim_version(),
        "commit": _output("git", "rev-parse", "--short=12", "HEAD"),
    }
    if dry:
        return {**known, "device": f"a CPU ({platform.machine()})"}
    properties = torch.cuda.get_device_properties(0)
    return {
        **known,
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
        "capability": list(torch.cuda.get_device_capability(0)),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "driver": _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        ),
    }


def installed(distribution: str) -> str | None:
    """The version of a distribution; ``None`` if it is not installed."""
    try:
        return str(version(distribution))
    except PackageNotFoundError:
        return None


def _shim_version() -> str:
    import precision_shim

    return precision_shim.__version__


def _output(*command: str) -> str | None:
    """A command's standard output; ``None`` if the command is missing, fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
