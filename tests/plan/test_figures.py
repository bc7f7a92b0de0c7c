"""Known figures of known models, properties of every plan, and the growth of its cost."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.errors import PlanError
from precision_shim.process.settings import resolve
from precision_shim_adapters.megatron.policy.bucket import SUMS
from precision_shim_adapters.megatron.policy.legality import NEWEST
from precision_shim_adapters.megatron.policy.requested import RequestedConfig
from precision_shim_tools.plan import shapes
from precision_shim_tools.plan.counting import Precision, Share, part
from precision_shim_tools.plan.megatron.layout import count, fault, layers_of_stages
from precision_shim_tools.plan.megatron.lora import adapted
from precision_shim_tools.plan.megatron.model import MegatronModel, support_of
from precision_shim_tools.plan.megatron.sizes import Sizes
from precision_shim_tools.plan.record import ModelPlan, Stage

from .models import QWEN3_30B_A3B, mixture, plan_model

SETTINGS = resolve(environ={})
GIB = 1 << 30
PROFILE = hypothesis.settings(
    derandomize="HYPOTHESIS_EXAMPLES" not in os.environ,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "200")),
    database=None,
    deadline=None,
)


def planned(asked: MegatronModel) -> ModelPlan:
    made, found = plan_model(asked, SETTINGS, NEWEST)
    assert made is not None
    assert found == []
    return made


def qwen3(**requested: Any) -> MegatronModel:
    """Qwen3-30B-A3B on 64 GPUs: tensor parallel 2, pipeline parallel 2, expert parallel 8."""
    sizes = Sizes(64, tensor=2, pipeline=2, expert=8)
    return MegatronModel(
        RequestedConfig(**requested), mixture(QWEN3_30B_A3B), sizes, torch.bfloat16
    )


def test_the_figures_of_qwen3_30b_a3b() -> None:
    """A GPU needs 12.57 GiB with fp32 states, 9.27 as NeMo-RL ships it, 7.49 if all is bf16."""
    plain = planned(qwen3())
    assert plain.parameters == 30_532_122_624
    shipped = planned(qwen3(asked={"use_precision_aware_optimizer": True}, bucket_in_fp32=False))
    low = {"main_grads_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    follows = planned(
        qwen3(bucket_in_fp32=False).changed(
            use_precision_aware_optimizer=True, adam_beta2=0.95, **low
        )
    )
    found = [round(one.without[0].totals["bytes"] / GIB, 2) for one in (plain, shipped, follows)]
    assert found == [12.57, 9.27, 7.49]


def test_follow_model_reaches_the_smallest_by_itself() -> None:
    asked = replace(
        qwen3(asked={"adam_beta2": 0.95}), requested=RequestedConfig(asked={"adam_beta2": 0.95})
    )
    settings = resolve(settings={"optimizer_states": "follow-model"}, environ={})
    made, found = plan_model(asked, settings, NEWEST)
    assert made is not None
    assert not found
    assert round(made.without[0].totals["bytes"] / GIB, 2) == 12.57
    assert round(made.with_shim[0].totals["bytes"] / GIB, 2) == 7.49
    assert {one.feature for one in made.decisions} == {"bf16-dispatch", "grad-bucket-alignment"}


def test_a_second_moment_that_cannot_decay_stays_fp32() -> None:
    settings = resolve(settings={"optimizer_states": "auto"}, environ={})
    made, _ = plan_model(qwen3(auto="guarded"), settings, NEWEST)
    assert made is not None
    components = made.with_shim[0].parts[0].components
    assert components["exp_avg"].dtypes == ("bf16",)
    assert components["exp_avg_sq"].dtypes == ("fp32",)
    assert "cannot decay" in made.decisions[0].because


@pytest.mark.parametrize("beta2", [None, 0.95])
def test_a_second_moment_that_the_user_wrote_and_that_cannot_decay(beta2: float | None) -> None:
    written = {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bf16"}
    told = planned(qwen3(asked={**written, **({"adam_beta2": beta2} if beta2 else {})})).warnings
    assert [("cannot decay" in one, "adam_beta2=0.95" in one) for one in told] == (
        [] if beta2 else [(True, True)]
    )


def test_plain_adam_copies_a_16_bit_bucket_for_the_step() -> None:
    dense = planned(qwen3(bucket_in_fp32=False)).without[0].parts[0]
    assert dense.at_step["grad_copies"].group_bytes == 4 * dense.parameters


def test_offload_leaves_parameters_and_gradients_and_says_what_the_host_needs() -> None:
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    made = planned(qwen3(asked=offload))
    aware = planned(
        qwen3(asked={**offload, "use_precision_aware_optimizer": True}, bucket_in_fp32=False)
    )
    for one, per_parameter in ((made, 6 + 4 / 16), (aware, 4)):
        dense = one.without[0].parts[0]
        held = dense.components.values()
        on_gpu = sum(component.bytes - component.host for component in held)
        assert on_gpu == pytest.approx(per_parameter * dense.parameters)
        host = sum(component.host for component in held)
        assert host == pytest.approx(16 * dense.parameters / 16)


def test_fp32_sums_beside_a_bf16_bucket() -> None:
    model = qwen3(bucket_in_fp32=False)
    sums = replace(model, buckets={SUMS: ["all"]})
    for one, per_parameter, copied in ((model, 2, 4), (sums, 6, 0)):
        (dense, *_) = planned(one).without[0].parts
        assert dense.components["grad_buckets"].dtypes == ("bf16",)
        assert dense.components["grad_buckets"].bytes == per_parameter * dense.parameters
        copies = dense.at_step.get("grad_copies")
        assert (copies.group_bytes if copies else 0) == copied * dense.parameters
    _, found = plan_model(
        replace(qwen3(bucket_in_fp32=True), buckets=sums.buckets), SETTINGS, NEWEST
    )
    assert [(one.code, one.key) for one in found] == [("bucket", SUMS)]


ONE = 8 * 48 * (2048 + 1536 + 768 + 2048)
"""The adapters of one of 48 layers' experts, with factors of rank 8."""
SHARED_OUTER = 8 * 48 * (2048 + 16 * 1536 + 16 * 768 + 2048)
QKV, HEAD = 8 * 48 * (2048 + 5120), 8 * (2048 + 151936)


@pytest.mark.parametrize(
    ("asked", "dense", "experts"),
    [
        ({"target_modules": ["linear_fc1", "linear_fc2"]}, 0, ONE),
        ({"target_modules": ["*.experts.*"], "share_expert_adapters": False}, 0, 16 * ONE),
        ({"target_modules": ["*.experts.*"], "normalize_moe_lora": True}, 0, ONE // 8),
        ({"target_modules": ["*.experts.*"], "experts_shared_outer_loras": True}, 0, SHARED_OUTER),
        ({"target_modules": ["*.layers.0.*.linear_qkv"]}, QKV // 48, 0),
        ({"target_modules": [], "exclude_modules": ["linear_proj"]}, QKV + HEAD, 0),
        ({"type": "canonical_lora", "target_modules": ["linear_q"]}, 8 * 48 * (2048 + 4096), 0),
        ({}, QKV + 8 * 48 * (4096 + 2048), ONE),
    ],
)
def test_the_adapters_of_megatron_bridge(asked: dict[str, Any], dense: int, experts: int) -> None:
    sizes = Sizes(8, expert=8)
    made = adapted(mixture(QWEN3_30B_A3B), {"rank": 8, **asked}, sizes, "here")
    (counted,) = count(made, sizes)
    assert (counted.dense, counted.experts) == (dense, experts)
    (frozen,) = count(mixture(QWEN3_30B_A3B), sizes)
    assert counted.frozen == frozen.dense + frozen.experts


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"type": "dora", "rank": 8}, "size of dora adapters"), ({}, "LoRA of rank None: expected")],
)
def test_adapters_of_no_known_size_are_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=f"here: (the )?{told}"):
        adapted(mixture(QWEN3_30B_A3B), asked, Sizes(8), "here")


# -- what cannot be computed, and what is illegal ------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (Sizes(64, tensor=3), "world: 64 GPUs are no multiple of 3"),
        (Sizes(96, tensor=3), "tensor: 32 attention heads cannot be split 3 ways"),
        (Sizes(64, pipeline=5), "world: 64 GPUs are no multiple of 5"),
        (Sizes(80, pipeline=5), "pipeline: 48 layers cannot be split into these 5 stages"),
        (Sizes(64, expert=3), "expert: 64 GPUs are no multiple of 3, which is expert tensor"),
        (Sizes(96, expert=3), "expert: 128 experts cannot be split 3 ways"),
        (Sizes(64, tensor=0), "tensor=0: expected a whole number, at least 1"),
        (Sizes(64, pipeline=2, stages="Et*3|t*40L"), "48 layers cannot be split"),
        (Sizes(64, pipeline=2, stages=[["embedding", "encoder"], ["loss"]]), "48 layers"),
        (Sizes(64, pipeline=2, virtual=5), "48 layers cannot be split"),
        (Sizes(64, tensor="two"), "tensor='two': expected"),  # type: ignore[arg-type]
        (Sizes(64, tensor=2.0), "tensor=2.0: expected"),  # type: ignore[arg-type]
        (Sizes(64, pipeline=2, virtual=-1), "virtual=-1: expected"),
    ],
)
def test_a_layout_that_cannot_be_computed_is_one_sentence(sizes: Sizes, told: str) -> None:
    assert told in fault(sizes, mixture(QWEN3_30B_A3B))
    with pytest.raises(
        PlanError, match=r"its layout cannot be computed: .*Write sizes that divide"
    ):
        planned(replace(qwen3(), sizes=sizes))


def test_the_configs_key_is_named() -> None:
    sizes = Sizes(64, tensor=0, keys={"tensor": "megatron.tensor_model_parallel_size"})
    assert fault(sizes, mixture(QWEN3_30B_A3B)).startswith("megatron.tensor_model_parallel_size=0")


def test_key_value_heads_are_shared_from_megatron_core_0_16() -> None:
    asked = replace(qwen3(), sizes=Sizes(64, tensor=8))
    for release in ((0, 16, 1), None):
        assert plan_model(asked, SETTINGS, NEWEST, release)[1] == []
    with pytest.raises(PlanError, match="4 key-value heads cannot be split 8 ways"):
        plan_model(asked, SETTINGS, NEWEST, (0, 15))


def test_dtypes_are_refused_by_the_rules_of_run_time() -> None:
    made, found = plan_model(qwen3(asked={"exp_avg_dtype": "bf17"}), SETTINGS, NEWEST)
    assert made is None
    assert [(one.code, one.key) for one in found] == [("dtype", "exp_avg_dtype")]
    assert "allowed: fp32" in found[0].message + found[0].remedy
    low = qwen3(asked={"exp_avg_dtype": "bf16"})
    _, found = plan_model(low, SETTINGS, NEWEST)
    assert [one.code for one in found] == ["dtype"]
    old = qwen3(asked={"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"})
    _, found = plan_model(old, SETTINGS, support_of("2.2"))
    assert "2.3" in found[0].message


def test_a_model_that_is_not_trained_has_no_dtype_of_an_optimizer() -> None:
    reference = qwen3(asked={"exp_avg_dtype": "bf17"}, trains=False)
    made, found = plan_model(reference, SETTINGS, NEWEST)
    assert found == []
    assert made is not None
    assert set(made.with_shim[0].parts[0].components) == {"frozen"}


def test_gradients_that_cannot_be_clipped_are_named_by_the_buckets_key() -> None:
    aware = qwen3(asked={"use_precision_aware_optimizer": True}, bucket_in_fp32=False)
    asked = replace(aware, dtype=torch.float16, key="optimizer.{}", bucket_key="ddp.it")
    _, found = plan_model(asked, SETTINGS, NEWEST)
    assert [(one.code, one.key) for one in found] == [("fp16-gradients", "ddp.it")]


def test_megatrons_scaler_is_foreseen_with_the_users_values() -> None:
    asked = replace(qwen3(asked={"initial_loss_scale": 2.0**20}), dtype=torch.float16)
    variables = {"PRECISION_SHIM_GROWTH_FACTOR": "4", "PRECISION_SHIM_LOSS_SCALE_INIT": "8"}
    made, _ = plan_model(asked, resolve(environ=variables), NEWEST)
    assert made is not None
    (told,) = [one for one in made.decisions if one.feature == "fp16-scaling"]
    assert told.chosen.endswith("from 1048576, growth x4 after 1000 steps, backoff x0.5")
    assert told.because == "the model is fp16; growth_factor by the shim's settings"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_scaler_is_foreseen_beside_a_static_scale_or_for_bf16(dtype: torch.dtype) -> None:
    asked = {"loss_scale": 128.0} if dtype is torch.float16 else {}
    made, _ = plan_model(replace(qwen3(asked=asked), dtype=dtype), SETTINGS, NEWEST)
    assert made is not None
    assert "fp16-scaling" not in [one.feature for one in made.decisions]
    assert made.decisions


def test_a_first_scale_below_the_least_is_illegal_before_the_job() -> None:
    settings = resolve(environ={"PRECISION_SHIM_LOSS_SCALE_INIT": "0.5"})
    made, (told,) = plan_model(replace(qwen3(), dtype=torch.float16), settings, NEWEST)
    assert (made, told.code) == (None, "number")
    assert "LOSS_SCALE_INIT=0.5 is below min_loss_scale=1" in told.message


@pytest.mark.parametrize(
    "asked",
    [
        {"adam_beta2": "0.95"},
        {"loss_scale": -1},
        {"hysteresis": 0},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": "all"},
    ],
)
def test_numbers_that_the_worker_refuses_are_illegal(asked: dict[str, Any]) -> None:
    fp16 = replace(qwen3(asked=asked), dtype=torch.float16, key="optim.{}")
    made, (told,) = plan_model(fp16, SETTINGS, NEWEST)
    assert (made, told.code, told.key) == (None, "number", "optim")
    assert f"{list(asked)[-1]}=" in told.message


@pytest.mark.parametrize(
    ("sizes", "layers", "expected"),
    [
        (Sizes(4, pipeline=2), 4, [[0, 1], [2, 3]]),
        (Sizes(4, pipeline=2, virtual=2), 4, [[0, 2], [1, 3]]),
        (Sizes(4, pipeline=2, first=1), 4, [[0], [1, 2, 3]]),
        (Sizes(4, pipeline=4, first=1, last=2), 7, [[0], [1, 2], [3, 4], [5, 6]]),
        (Sizes(4, pipeline=2, count_embedding=True, count_loss=True), 4, [[0, 1], [2, 3]]),
        (Sizes(4, pipeline=2, stages="Et|(tt|)*2tL"), 6, [[0, 3, 4], [1, 2, 5]]),
        (
            Sizes(4, pipeline=2, stages=[["embedding", "decoder"], ["decoder"] * 2 + ["loss"]]),
            3,
            [[0], [1, 2]],
        ),
        (Sizes(4, pipeline=1, virtual=2), 3, [[0, 1, 2]]),
    ],
)
def test_layers_by_stages(sizes: Sizes, layers: int, expected: list[list[int]]) -> None:
    assert layers_of_stages(sizes, layers) == expected


def test_names_of_other_models_before_and_behind_the_layers() -> None:
    """Embeddings and outputs of Nemotron-H and GPT-NeoX are split, on the first and last stage."""
    for prefix, embedding, norm, output in (
        ("backbone.", "embeddings", "norm_f", "lm_head"),
        ("gpt_neox.", "embed_in", "final_layer_norm", "embed_out"),
    ):
        weights = (
            shapes.Weight(f"{prefix}{embedding}.weight", (64, 8)),
            shapes.Weight(f"{prefix}{norm}.weight", (8,)),
            shapes.Weight(f"{output}.weight", (64, 8)),
        )
        model = shapes.Model(weights, {"num_hidden_layers": 2})
        counts = count(model, Sizes(4, tensor=2, pipeline=2))
        assert [one.dense for one in counts] == [256, 256 + 8]
        tied = replace(model, weights=weights[:2], tied=True)
        assert [one.dense for one in count(tied, Sizes(4, tensor=2, pipeline=2))] == [256, 264]


def test_layers_that_predict_further_tokens_are_named() -> None:
    asked = qwen3()
    config = {**asked.model.config, "num_nextn_predict_layers": 1}
    notes = planned(replace(asked, model=replace(asked.model, config=config))).notes
    assert any("not counted: 1 of the layers" in one for one in notes)


# -- properties --------------------------------------------------------------------------------

DTYPES = st.sampled_from(["fp32", "bf16", "fp16"])
STATES = st.sampled_from(["", "fp32", "bf16", "fp16", "fp8"])
PRECISIONS = st.builds(
    Precision,
    params=DTYPES,
    gradients=DTYPES,
    master=st.sampled_from(["", "fp32", "fp16", "int16"]),
    exp_avg=STATES,
    exp_avg_sq=STATES,
    buckets=st.booleans(),
    copies=st.booleans(),
    offloaded=st.sampled_from([0.0, 0.25, 1.0]),
    offload_keeps_master=st.booleans(),
)


@PROFILE
@given(
    precision=PRECISIONS,
    trainable=st.integers(0, 10**13),
    frozen=st.integers(0, 10**13),
    group=st.integers(1, 4096),
    factor=st.integers(1, 8),
    params_sharded=st.booleans(),
    states_sharded=st.booleans(),
)
def test_bytes_are_whole_and_add_up_and_more_sharding_never_costs_more(
    precision: Precision,
    trainable: int,
    frozen: int,
    group: int,
    factor: int,
    params_sharded: bool,
    states_sharded: bool,
) -> None:
    def of(ranks: int) -> Stage:
        share = Share(trainable, frozen, ranks, 1, params_sharded, states_sharded)
        return Stage(0, (part("model", share, precision, "adam"),))

    one, more = of(group), of(group * factor)
    for stage, ranks in ((one, group), (more, group * factor)):
        held = [*stage.parts[0].components.values(), *stage.parts[0].at_step.values()]
        for component in held:
            assert 0 <= component.host <= component.bytes
            assert component.bytes * ranks >= component.group_bytes > 0
            # Each mean is rounded up to a whole byte, on the GPU and on the host.
            assert component.bytes * ranks < component.group_bytes + 2 * ranks
        assert stage.totals["bytes"] == sum(
            component.bytes for component in stage.parts[0].components.values()
        )
        assert stage.totals["gpu"] == stage.totals["bytes"] - stage.totals["host"]
        assert stage.totals["peak"] >= stage.totals["gpu"] >= 0
    assert all(more.totals[key] <= one.totals[key] + 16 for key in one.totals)


POWERS = st.sampled_from([1, 2, 4, 8])


@PROFILE
@given(tensor=POWERS, pipeline=POWERS, expert=POWERS, context=st.sampled_from([1, 2]))
def test_no_parameter_is_lost(tensor: int, pipeline: int, expert: int, context: int) -> None:
    model = mixture({**QWEN3_30B_A3B, "num_hidden_layers": 8, "num_experts": 8})
    sizes = Sizes(1024, tensor, pipeline, context, expert, expert_tensor=1)
    assert fault(sizes, model) == ""
    whole = sum(one.dense + one.experts * expert for one in count(model, sizes))
    split = sum(one.numel for one in model.weights)
    assert whole <= split <= whole * tensor
    for more in ("tensor", "pipeline", "expert"):
        deeper = replace(sizes, **{more: 2 * getattr(sizes, more)})
        if not fault(deeper, model):
            assert largest(model, deeper) <= largest(model, sizes)


def largest(model: shapes.Model, sizes: Sizes) -> int:
    """Parameters of the rank with the most parameters."""
    return max(one.dense + one.experts for one in count(model, sizes))


@pytest.mark.parametrize(
    ("flag", "value", "due"), [("fp16", True, "fp16"), ("bf16", False, "fp32")]
)
def test_a_flag_of_another_dtype_than_the_models_is_told(flag: str, value: bool, due: str) -> None:
    (told,) = planned(qwen3(asked={flag: value})).warnings
    assert f"expected {due}, found bf16" in told
    assert told.endswith(f"{flag} out")
