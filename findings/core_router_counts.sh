#!/bin/sh
# megatron-core 0.16.1: a bf16 model's router counts at most 256 tokens for an expert.
# A router with an expert bias counts in fp32 which experts the tokens went to. Float16Module, which
# wraps every 16-bit model, casts buffers too; from 256 on bf16 has no odd numbers, and adding 1 rounds
# back. The biases, which follow these counts, then follow the roundings. Needs no GPU.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1
"$folder/venv/bin/python" -W ignore - << 'END'
import os

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29873"}
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
torch.cuda.current_device = lambda: "cpu"  # the router asks for a GPU's number, and gets the host
parallel_state.initialize_model_parallel()
groups = ProcessGroupCollection.use_mpu_process_groups()
found = {}
for dtype in (torch.float32, torch.bfloat16):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    router = TopKRouter(config, pg_collection=groups)
    if config.bf16:
        router = Float16Module(config, router).module
    token = torch.tensor([[True, False, True, False]])  # goes to the first and the third expert
    for _ in range(300):
        router._apply_expert_bias(token)
    found[dtype] = router.local_tokens_per_expert.tolist()
torch.distributed.destroy_process_group()
print("tokens counted of 300:", found)
assert found[torch.float32] == [300.0, 0.0, 300.0, 0.0]
assert found[torch.bfloat16] == [256.0, 0.0, 256.0, 0.0]
END
