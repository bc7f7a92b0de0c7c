"""A driver like torchtitan's controller: a trainer and a generator in processes of Monarch's.

The trainer takes two steps, the second of which overflows, and sends its weights over TorchStore
after each; the generator's own loop pulls them. Prints the actors' results as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from typing import Any


def prepare() -> None:
    """Enter the CPU harness in an actor's process before torchtitan is imported."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    from tests.torchtitan import cpu

    cpu.enter()


async def main(folder: str, trained: str, generated: str) -> dict[str, Any]:
    from monarch.actor import this_host

    from . import cpu

    cpu.answer_for_gpus()
    from .monarch_generator import Generator, Trainer
    from .monarch_store import start

    host = this_host()
    mesh = host.spawn_procs(per_host={"gpus": 1}, bootstrap=prepare, name="trainer")
    trainer = mesh.spawn("trainer", Trainer, cpu.policy_config(folder, trained), folder, generated)
    processes = host.spawn_procs(per_host={"gpus": 1}, bootstrap=prepare, name="generator")
    settings = Generator.Config(model_dtype=generated)
    settings.debug.enable_structured_logging = False
    generator = processes.spawn("generator", Generator, settings, folder)
    await start(mesh)

    await generator.start_engine_loop.call()
    metrics = []
    for version in (1, 2):
        batch = [cpu.microbatch(version, advantage=1e9 if version == 2 else 1.0)]
        await trainer.forward_backward.call(batch, 4 * cpu.LENGTH)
        ((_, output),) = list((await trainer.optim_step.call()).items())
        metrics.append({k: "nan" if math.isnan(v) else v for k, v in output.metrics.items()})
        await trainer.push_model_state_dict.call()
        await generator.pull_model_state_dict.call(version)
    ((_, sent),) = list((await trainer.look.call()).items())
    ((_, found),) = list((await generator.look.call()).items())
    await generator.close.call()
    return {"metrics": metrics, **sent, **found}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))), flush=True)
    os._exit(0)  # Monarch's shutdown can be slow
