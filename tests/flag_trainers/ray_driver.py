"""A job of slime's or miles': what its ``train.py`` calls, with data in the place of a rollout.

Run as a script, because what it finds is the shim of a process that was started with a variable.
Arguments: the trainer's name, a folder for the rollouts' data, and the job as JSON: its rewards, a
number for each rollout, and its flags. Prints what the job's only actor told.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

SAMPLES = 4
PROMPT, LENGTH = 2, 8
ABSENT = {"enable_gloo_process_groups": True, "sglang_speculative_algorithm": None}
"""Flags that the trainers read, of another version of Megatron and of SGLang."""


def write_rollouts(name: str, folder: Path, rewards: list[float]) -> None:
    """Write rollouts in the format of ``--save-debug-rollout-data``, which the trainers load."""
    import torch

    sample = importlib.import_module(f"{name}.utils.types").Sample
    for number, reward in enumerate(rewards):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, 60, (SAMPLES, LENGTH), generator=generator).tolist()
        samples = [
            sample(
                index=index,
                group_index=index,
                tokens=one,
                response_length=LENGTH - PROMPT,
                reward=reward,
                rollout_log_probs=[-4.0] * (LENGTH - PROMPT),
                status=sample.Status.COMPLETED,
            ).to_dict()
            for index, one in enumerate(tokens)
        ]
        torch.save({"rollout_id": number, "samples": samples}, folder / f"{number}.pt")


def listen(actor: Any, name: str) -> None:
    """Keep the lines that the trainer logs after each step; runs in the actor."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            actor.heard.append(record.getMessage())

    actor.heard = []
    logging.getLogger(f"{name}.backends.megatron_utils.model").addHandler(Keep())


def report(actor: Any, name: str) -> dict[str, Any]:
    """The shim in the actor's process, and what the trainer logged; runs in the actor."""
    shim = sys.modules.get("precision_shim")
    frameworks = shim.status().frameworks if shim is not None else {}
    seams = frameworks[name].seams if name in frameworks else ()

    def wrapped(place: str) -> bool:
        module, _, path = place.partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        return "Seam" in type(found).__name__

    model = f"{name}.backends.megatron_utils.model"
    places = [seam.target for seam in seams if seam.state == "wrapped"]
    return {
        "shim": bool(frameworks),
        "variables": {one: os.environ[one] for one in os.environ if "PRECISION_SHIM" in one},
        "states": {seam.target: seam.state for seam in seams},
        "patched": {one: wrapped(one) for one in [*places, f"{model}:get_megatron_optimizer"]},
        "heard": actor.heard,
        "log": Path(os.readlink("/proc/self/fd/2")).read_text(),
    }


async def train(name: str, flags: list[str]) -> dict[str, Any]:
    """Train as ``train.py`` does; returns the actor's report."""

    async def settle(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value  # miles' driver is async

    from tests.every_framework import lacking

    arguments = importlib.import_module(f"{name}.utils.arguments")
    arguments.sglang_validate_args = lambda args: None  # SGLang's own flags are not there
    sys.argv = ["train.py", *flags]
    args = arguments.parse_args()
    asked = lacking.answers()
    for absent, value in ABSENT.items():
        vars(args).setdefault(absent, value)
    groups = importlib.import_module(f"{name}.ray.placement_group")
    places = groups.create_placement_groups(args)
    if name == "miles":
        store = importlib.import_module("miles.utils.object_store")
        store.init_instance(args, contribute_segment=False)
    manager, _ = groups.create_rollout_manager(args, places["rollout"])
    group, _ = await settle(groups.create_training_models(args, places, manager))
    (actor,) = group._actor_handlers if name == "slime" else group._actor_handles
    await actor.__ray_call__.remote(listen, name)
    await settle(group.update_weights())
    for number in range(args.start_rollout_id, args.num_rollout):
        data = await manager.generate.remote(number)
        if name == "slime":
            await asyncio.gather(*group.async_train(number, data))
        else:
            await group.train(number, data)
        await settle(group.clear_memory())
        await settle(group.update_weights())
    found: dict[str, Any] = await actor.__ray_call__.remote(report, name)
    return {**found, "asked": asked}


def main(name: str, folder: Path, rewards: list[float], flags: list[str]) -> dict[str, Any]:
    import ray

    write_rollouts(name, folder, rewards)
    data = ["--load-debug-rollout-data", f"{folder}/{{rollout_id}}.pt"]
    found = asyncio.run(train(name, [*flags, *data, "--num-rollout", str(len(rewards))]))
    ray.shutdown()
    return found


if __name__ == "__main__":
    from tests.processes.ray_cluster import older, tell

    name, place, job = sys.argv[1:]
    with older(8, num_gpus=2):
        tell(lambda: main(name, Path(place), **json.loads(job)))
