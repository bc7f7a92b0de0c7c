"""The plan compared with built models: audits of all ranks, and parameters on the meta device."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from precision_shim.process.settings import resolve
from precision_shim_adapters.megatron.policy.legality import NEWEST
from precision_shim_adapters.megatron.policy.requested import RequestedConfig
from precision_shim_tools.plan import shapes
from precision_shim_tools.plan.megatron.layout import count, fault
from precision_shim_tools.plan.megatron.lora import adapted
from precision_shim_tools.plan.megatron.model import MegatronModel
from precision_shim_tools.plan.megatron.sizes import Sizes
from precision_shim_tools.plan.record import ModelPlan
from precision_shim_tools.plan.shapes import Model, Weight
from precision_shim_tools.plan.torch_optimizer import ShardedModel

from ..audit import builds
from ..processes.rank_server import Ranks
from .models import DEEPSEEK_V3, QWEN3_30B_A3B, QWEN25_7B, plan_model

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed")


def tiny(experts: bool) -> Model:
    """The harness's tiny GPT, with weight names from which the plan derives their split."""
    hidden, wide = 16, 64
    weights = {"model.embed_tokens.weight": (32, hidden), "lm_head.weight": (32, hidden)}
    shapes_of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "input_layernorm.bias": (hidden,),
        "self_attn.qkv.weight": (3 * hidden, hidden),
        "self_attn.dense.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "post_attention_layernorm.bias": (hidden,),
    }
    if experts:
        shapes_of_layer |= {
            "mlp.gate.weight": (2, hidden),
            "mlp.experts.up_proj": (2, wide, hidden),
            "mlp.experts.down_proj": (2, hidden, wide),
        }
    else:
        shapes_of_layer |= {
            "self_attn.qkv.bias": (3 * hidden,),
            "self_attn.dense.bias": (hidden,),
            "mlp.fc1.weight": (wide, hidden),
            "mlp.fc1.bias": (wide,),
            "mlp.fc2.weight": (hidden, wide),
            "mlp.fc2.bias": (hidden,),
        }
    found: list[Weight] = [Weight(name, shape) for name, shape in weights.items()]
    for layer in range(2):
        found += [Weight(f"model.layers.{layer}.{n}", s) for n, s in shapes_of_layer.items()]
    found += [Weight(f"model.norm.{kind}", (hidden,)) for kind in ("weight", "bias")]
    return Model(tuple(found), {"num_hidden_layers": 2, "num_experts": 2 if experts else 0})


def planned(build: builds.Build, experts: bool, world: int) -> ModelPlan:
    asked = MegatronModel(
        RequestedConfig(asked=build.config, distributed=build.distributed),
        tiny(experts),
        Sizes(world, expert=world if experts else 1),
        build.dtype,
        bucket_in_fp32=build.fp32_bucket,
    )
    made, found = plan_model(asked, resolve(environ={}), NEWEST)
    assert found == []
    assert made is not None
    return made


@needs_megatron
def test_the_groups_bytes_are_those_of_all_ranks_audits(run_ranks: Ranks) -> None:
    world = 2
    audits = run_ranks("audits", world=world)
    cases = {**builds.EIGHT, "copies": builds.Build(fp32_bucket=False)}
    assert len(audits[0]) == 10
    for key in audits[0]:
        kind, _, name = key.partition(": ")
        made = planned(cases[name], kind == "experts", world)
        parts = {one.name: one for one in made.without[0].parts}
        for named in audits[0][key]["parts"]:
            part = parts[_alias(named["name"], parts)]
            of_ranks = [_part(one[key], named["name"]) for one in audits]
            assert {one["data_parallel_size"] for one in of_ranks} == {part.data_parallel_size}
            assert {one["parameters"] for one in of_ranks} == {part.parameters}
            for component in of_ranks[0]["components"]:
                # ``other`` contains scales and step counts, which belong to no parameter
                if component == "other":
                    continue
                found = sum(one["components"][component]["bytes"] for one in of_ranks)
                held = part.components.get(component) or part.at_step.get(component)
                expected = held.group_bytes * part.groups if held else 0
                assert found == expected, (key, part.name, component)
                dtypes = of_ranks[0]["components"][component]["dtypes"]
                assert tuple(dtypes) == (held.dtypes if held else ()), (key, component)


def _alias(name: str, parts: dict[str, Any]) -> str:
    """The audit's part "dense" is the plan's part "model" if the model has only one part."""
    return name if name in parts else "model"


def _part(audit: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in audit["parts"] if one["name"] == name)
    return dict(found)


def test_on_fsdp2_with_two_ranks_too(run_ranks: Ranks) -> None:
    audits = run_ranks("fsdp", world=2)
    weights = (
        Weight("0.weight", (15, 8)),
        Weight("0.bias", (15,)),
        Weight("1.weight", (3, 15)),
        Weight("1.bias", (3,)),
    )
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        sharded: Any = ShardedModel("model", Model(weights), 2, name)
        made, found = sharded.plan(None, None)
        assert found == []
        assert made is not None
        (part,) = made.with_shim[0].parts
        for component in audits[0][str(dtype)]["parts"][0]["components"]:
            if component == "other":
                continue
            total = sum(
                one[str(dtype)]["parts"][0]["components"][component]["bytes"] for one in audits
            )
            held = part.components.get(component)
            assert total == (held.group_bytes if held else 0), component
        assert part.components["exp_avg"].group_bytes == 183 * (4 if name == "fp32" else 2)


CASES: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "world": 16,
        "hf": QWEN25_7B,
        "groups": {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
        "fields": {"add_qkv_bias": True},
    },
    "Qwen3-30B-A3B": {
        "world": 64,
        "hf": QWEN3_30B_A3B,
        "groups": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 2,
        },
        "fields": {"qk_layernorm": True},
    },
    "DeepSeek-V3": {
        "world": 512,
        "hf": DEEPSEEK_V3,
        "groups": {"pipeline_model_parallel_size": 16, "expert_model_parallel_size": 32},
        "fields": {"qk_layernorm": True, "num_layers_in_last_pipeline_stage": 1},
    },
}

LATENT = ["linear_q_up_proj", "linear_kv_up_proj", "linear_proj", "*.shared_experts.linear_fc1"]
TARGETS = {"Qwen2.5-7B": {}, "Qwen3-30B-A3B": {}, "DeepSeek-V3": {"target_modules": LATENT}}
CASES |= {
    f"{name}, adapted": {**CASES[name], "lora": {"dim": 8, **fields}}
    for name, fields in TARGETS.items()
}
"""The real models' experts are modules of their own, so each of them has an adapter."""


def sizes_of(case: dict[str, Any]) -> Sizes:
    groups, fields = case["groups"], case["fields"]
    return Sizes(
        case["world"],
        tensor=groups.get("tensor_model_parallel_size", 1),
        pipeline=groups["pipeline_model_parallel_size"],
        expert=groups.get("expert_model_parallel_size", 1),
        expert_tensor=groups.get("expert_tensor_parallel_size"),
        last=fields.get("num_layers_in_last_pipeline_stage"),
    )


@needs_megatron
def test_parameters_of_a_rank_are_those_of_real_models(run_ranks: Ranks) -> None:
    (real,) = run_ranks("parameters", world=1, cases=CASES)
    for name, case in CASES.items():
        model = shapes.from_config(case["hf"], name)
        sizes = sizes_of(case)
        assert fault(sizes, model) == ""
        if "lora" in case:
            asked = {**case["lora"], "share_expert_adapters": False}
            model = adapted(model, asked, sizes, name)
        counted = count(model, sizes)
        ends = [[one.dense, one.experts] for one in (counted[0], counted[-1])]
        assert ends == real[name], name
    assert real["DeepSeek-V3"][0] == [2_910_126_080, 352_321_536]
