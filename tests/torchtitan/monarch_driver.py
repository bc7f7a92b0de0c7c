"""A driver like torchtitan's controller: it starts a trainer in a process of Monarch's.

Prints the actor's results as one line of JSON. The actor's process runs ``prepare`` at the start,
before it imports torchtitan.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from typing import Any


def prepare() -> None:
    """Enter the CPU harness in the actor's process before torchtitan is imported."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    from tests.torchtitan import cpu

    cpu.enter()


async def main(folder: str) -> dict[str, Any]:
    from monarch.actor import this_host

    from tests.torchtitan import cpu

    cpu.answer_for_gpus()
    from tests.torchtitan.monarch_actor import Trainer

    processes = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=prepare)
    actor = processes.spawn("trainer", Trainer, cpu.policy_config(folder), folder)
    metrics = []
    for step in range(3):
        for part in range(2):
            batch = [cpu.microbatch(10 * step + part, advantage=1e9 if step == 1 else 1.0)]
            await actor.forward_backward.call(batch, 4 * cpu.LENGTH)
        ((_, output),) = list((await actor.optim_step.call()).items())
        metrics.append({k: "nan" if math.isnan(v) else v for k, v in output.metrics.items()})
    ((_, found),) = list((await actor.look.call()).items())
    await processes.stop()
    return {"metrics": metrics, **found}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))), flush=True)
    os._exit(0)  # Monarch's shutdown can be slow
