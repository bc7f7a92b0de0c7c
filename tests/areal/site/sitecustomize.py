"""Lets each process of an AReaL job run on a CPU; ``tests/areal/cpu.py`` has the stand-ins."""

import importlib
import sys

from precision_shim.process.finders import Watcher

ENGINE = "areal.engine.megatron_engine"
LOGGER = "areal.utils.stats_logger"
ABSENT = ("pybase64", "swanlab", "tabulate", "tensorboardX", "trackio", "wandb")
"""Packages that AReaL's trainer imports, and that no test calls."""


def _prepare(name: str) -> None:
    if name == ENGINE:
        importlib.import_module("tests.areal.cpu").stay_on_cpu()
    else:
        sys.meta_path.append(
            importlib.import_module("tests.stand_ins.empty_packages").Empty(*ABSENT)
        )


def _name_device(name: str) -> None:
    """AReaL's launcher writes the name in front of a shell command; a CPU's is empty."""
    sys.modules[name].CpuPlatform.device_control_env_var = "CUDA_VISIBLE_DEVICES"


def _stay_here(name: str) -> None:
    """AReaL looks for a route to the internet, which a machine of the tests may not have."""
    sys.modules[name].gethostip = lambda *_, **__: "127.0.0.1"


Watcher(_prepare, before=True).watch([ENGINE, LOGGER])
Watcher(_name_device).watch(["areal.infra.platforms.cpu"])
Watcher(_stay_here).watch(["areal.utils.network"])
