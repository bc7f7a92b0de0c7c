"""Compare in verl's driver the dtypes in which actor, reference model and rollout compute.

Every entry point of verl first calls ``auto_set_device`` on its config, in the driver, before Ray
starts a worker. A program that itself calls ``run_ppo`` calls only ``validate_config``, which runs
in a Ray actor up to 0.8. A user's driver may call neither, so the actor's workers compare the
dtypes again.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from precision_shim.adapting import Call, current_settings, in_force, seam, versioned

from ...agreement.names import engine_name
from ...agreement.report import FEATURE, report_sides
from ...common.omegaconf_values import plain
from ..config import WORKERS
from . import dtypes, weight_sync

GROUP = "rollout"
_PROGRAMS = (
    "verl.trainer.main_ppo",
    "verl.trainer.main_ppo_v0",
    "verl.trainer.main_ppo_sync",
    "verl.experimental.fully_async_policy.fully_async_main",
    "verl.experimental.one_step_off_policy.main_ppo",
)
"""verl's programs that import ``auto_set_device`` and ``validate_config`` by value."""
_WORKERS = ("engine_workers", "fsdp_workers", "megatron_workers")
"""verl's modules of workers; ``fsdp_workers`` and ``megatron_workers`` exist up to 0.7.1."""


@seam(
    "verl.workers.config.rollout:RolloutConfig.__post_init__",
    FEATURE,
    group=GROUP,
    why="vLLM ends on another spelling of a dtype in a server's process, and SGLang names no key",
    delete_when="verl checks the name",
    relies_on=("engine_kwargs",),
)
def name_dtype(call: Call) -> Any:
    """Convert the dtype names in a rollout's config to names that the engines accept.

    Raises:
        DtypeError: a value is no dtype name.
    """
    config, where = call.instance, versioned("verl")
    # Assign by ``object.__setattr__``, because the dataclass is frozen.
    if config.dtype is not None:  # If the dtype is None, the engine chooses.
        object.__setattr__(config, "dtype", engine_name(config.dtype, "rollout.dtype", where))
    kwargs = {}
    for name, inner in (config.engine_kwargs or {}).items():
        value = inner.get("dtype") if hasattr(inner, "get") else None
        if value is not None:
            key = f"rollout.engine_kwargs.{name}.dtype"
            kwargs[name] = {**inner, "dtype": engine_name(value, key, where)}
    if kwargs:
        object.__setattr__(config, "engine_kwargs", {**config.engine_kwargs, **kwargs})
    return call.proceed()


@seam(
    feature=FEATURE,
    group=GROUP,
    at=[
        {
            "target": "verl.utils.device:auto_set_device",
            "aliases": tuple(f"{program}:auto_set_device" for program in _PROGRAMS),
        },
        {
            "target": "verl.utils.config:validate_config",
            "aliases": tuple(f"{module}:validate_config" for module in (*_PROGRAMS, "verl.utils")),
        },
    ],
    why="the rollout's and the reference model's dtypes have defaults of their own",
    delete_when="verl compares them",
)
def compare_engines(call: Call, config: Any) -> Any:
    """Compare the dtypes of a job's actor, reference model and rollout in the driver.

    Raises:
        DtypeError: a key's value is no dtype name.
        UnsupportedPrecisionError: strict mode is on, the actor is fp16, and an engine is not; or
            verl's delta checkpoint engine cannot send weights in the rollout's dtype.
    """
    if hasattr(config, "get") and config.get("actor_rollout_ref") is not None:
        found = plain(config, dtypes.SECTIONS)
        sides = dtypes.read_sides(found, partial(in_force, "verl"))
        if sides is not None:
            report_sides(sides, partial(write_key, config))
            if sides.trainer is not None:
                weight_sync.report_delta(found["actor_rollout_ref"])
    return call.proceed()


@seam(
    feature=FEATURE,
    group=GROUP,
    at=[
        {"target": f"verl.workers.{module}:ActorRolloutRefWorker.init_model", "optional": True}
        for module in _WORKERS
    ],
    why="a driver of the user's own around verl's trainer calls none of the functions above",
    delete_when="verl compares them in its trainer",
    relies_on=("role", "config", "rank"),
)
def compare_in_worker(call: Call) -> Any:
    """Compare a job's dtypes in the actor's workers: on rank 0, or in strict mode on all ranks.

    Raises:
        DtypeError: a key's value is no dtype name.
        UnsupportedPrecisionError: strict mode is on, the actor is fp16, and an engine is not.
    """
    worker = call.instance
    if "actor" in worker.role and (worker.rank == 0 or current_settings().strict):
        trains_by_engine = type(worker).__module__.endswith(_WORKERS[0])
        trainer = {WORKERS: "disable"} if trains_by_engine else {}
        config = {"actor_rollout_ref": plain(worker.config), "trainer": trainer}
        sides = dtypes.read_sides(config, partial(in_force, "verl"))
        if sides is not None:
            report_sides(sides)
    return call.proceed()


def write_key(config: Any, key: str, value: object) -> None:
    """Write a key into verl's config, whose sections may be read-only or lack the key."""
    from omegaconf import OmegaConf, read_write

    with ExitStack() as writable:
        section = config
        for part in key.split("."):
            if OmegaConf.is_config(section):
                writable.enter_context(read_write(section))
                section = section.get(part)
        OmegaConf.update(config, key, value, force_add=True)
