#!/bin/sh
# torch 2.13.0: the norm of fp16 gradients over two ranks is infinite from 256 on.
# Under DTensor (FSDP2) each rank's norm is squared in fp16 before the ranks add up, and 256 squared is
# above fp16's largest number, 65504. clip_grad_norm_ then multiplies finite gradients by 1/inf: all
# become 0, and the step moves nothing. On one rank the same happens from a norm of 65520 on.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - << 'END'
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def rank_main(rank: int, pipe) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29871"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.full((1024,), 10.0, dtype=torch.float16)  # its norm is 320
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(whole, mesh, [Shard(0)])
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0).full_tensor()
    pipe.put((rank, norm.item(), parameter.grad.full_tensor().abs().max().item()))
    dist.destroy_process_group()


context = torch.multiprocessing.get_context("fork")
pipe = context.SimpleQueue()
ranks = [context.Process(target=rank_main, args=(rank, pipe)) for rank in range(2)]
[one.start() for one in ranks]
found = sorted(pipe.get() for _ in ranks)
[one.join() for one in ranks]
print("rank, norm, largest gradient after clipping:", found)
assert found == [(0, float("inf"), 0.0), (1, float("inf"), 0.0)]
one = torch.nn.Parameter(torch.zeros(512, dtype=torch.float16))
one.grad = torch.full_like(one, 4096.0)  # its norm is 92682
norm = torch.nn.utils.clip_grad_norm_([one], 1.0)
print("one process: norm", norm.item(), "largest gradient after clipping", one.grad.max().item())
assert norm.isinf() and not one.grad.any()
END
