#!/bin/sh
# torch 2.13.0: FSDP2 without gradient synchronization sums the gradients of fp32 parameters in bf16.
# MixedPrecisionPolicy(param_dtype=bf16) computes each micro-batch's gradient in bf16, and adds it to an
# fp32 one if every micro-batch synchronizes. With set_requires_gradient_sync(False), which is meant to
# save only communication, the sum itself is kept in bf16 until the last one: 400 gradients of 1 add up
# to 256. reduce_dtype=torch.float32 sums in fp32 both ways.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29875"}
dist.init_process_group("gloo", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def accumulated(reduce_dtype: torch.dtype | None, every: bool) -> tuple[torch.dtype, float]:
    """dtype and value of a weight's gradient after 400 micro-batches, each with a gradient of 1."""
    layer = torch.nn.Linear(1, 1, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    fully_shard(layer, mesh=mesh, mp_policy=policy)
    for left in reversed(range(400)):
        layer.set_requires_gradient_sync(every or left == 0)
        layer(torch.ones(1, 1)).sum().backward()
    return layer.weight.grad.dtype, layer.weight.grad.full_tensor().item()


for reduce_dtype in (None, torch.float32):
    both = [accumulated(reduce_dtype, every) for every in (True, False)]
    print("reduce_dtype", reduce_dtype, "synchronized each time, and at the end:", both)
    last = 400.0 if reduce_dtype else 256.0
    assert both == [(torch.float32, 400.0), (torch.float32, last)]
dist.destroy_process_group()
END
