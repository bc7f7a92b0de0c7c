"""Two processes of a Monarch mesh, which are the ranks of a process group over gloo.

In the first of two turns both have the shim, in the second only rank 0. Prints what each rank was
told in each turn, as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint, this_host

import precision_shim
from precision_shim.adapting import check_ranks
from precision_shim.process import marks


class Rank(Actor):
    """A rank that looks for the shim on the other rank, before a collective operation."""

    @endpoint
    async def join(self, store: str, with_shim: list[int]) -> str:
        rank, told = current_rank().rank, ""
        marks.PATIENCE = 1.0
        if rank in with_shim:
            precision_shim.install()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        if rank in with_shim:
            try:
                check_ranks()
            except precision_shim.PartialInstallationError as error:
                told = str(error)
        dist.barrier()
        dist.destroy_process_group()
        precision_shim.uninstall()
        return told


async def main(folder: str) -> list[list[str]]:
    mesh = this_host().spawn_procs(per_host={"gpus": 2}, name="ranks")
    ranks = mesh.spawn("ranks", Rank)
    turns = ([0, 1], [0])
    found = [await ranks.join.call(f"{folder}/{len(turn)}", turn) for turn in turns]
    return [[told for _, told in turn.items()] for turn in found]


if __name__ == "__main__":
    print(json.dumps({"told": asyncio.run(main(*sys.argv[1:]))}), flush=True)
    os._exit(0)  # Monarch's shutdown can be slow
