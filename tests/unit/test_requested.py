"""The plan for Megatron's optimizer: equal for equal requested, and consistent with the bucket."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.precision.model import TrainableDtypes
from precision_shim_adapters.megatron import Build
from precision_shim_adapters.megatron.policy.bucket import choose_bucket
from precision_shim_adapters.megatron.policy.legality import FusedAdamSupport
from precision_shim_adapters.megatron.policy.optimizer_plan import plan_optimizer
from precision_shim_adapters.megatron.policy.requested import InForce, RequestedConfig

from ..every_framework.requested_configs import (
    AWARE,
    BF16,
    FP16,
    FP32,
    Case,
    each_case,
    expected,
    outcome,
)

HAS_IT = FusedAdamSupport((2, 11), True, "")

requested = st.builds(
    RequestedConfig,
    asked=st.fixed_dictionaries(
        {},
        optional={
            AWARE: st.booleans(),
            "main_grads_dtype": st.sampled_from([BF16, FP32]),
            "exp_avg_dtype": st.sampled_from([BF16, FP32]),
            "adam_beta2": st.sampled_from([0.95, 0.999]),
            "optimizer": st.sampled_from(["adam", "sgd"]),
            "fp16": st.booleans(),
            "bf16": st.booleans(),
        },
    ),
    declared=st.sampled_from([None, BF16, FP16, FP32]),
    auto=st.sampled_from(["as-configured", "guarded"]),
    blockers=st.sampled_from([(), ("a reason",)]),
    distributed=st.booleans(),
    bucket_in_fp32=st.sampled_from([None, True, False]),
)
models = st.builds(
    TrainableDtypes,
    st.dictionaries(st.sampled_from([BF16, FP16, FP32]), st.just(8), min_size=1, max_size=2),
)
in_force = st.builds(
    InForce,
    states=st.sampled_from(["auto", "follow-model", "as-configured"]),
    dispatches=st.booleans(),
    aligns=st.booleans(),
    over_user=st.booleans(),
    whole_masters=st.booleans(),
    support=st.just(HAS_IT),
)


@each_case
def test_the_table(case: Case) -> None:
    now = InForce(
        states=case.settings["optimizer_states"],
        over_user=case.settings.get("grad_bucket") == "align",
        support=HAS_IT,
    )
    asks = RequestedConfig(asked=case.asked, bucket_in_fp32=case.bucket)
    planned = plan_optimizer(asks, TrainableDtypes({case.dtype: 8}), now)
    assert outcome(case, asks, planned) == expected(case)


def bucket(asks, model, now, planned, present):
    user_set = asks.bucket_in_fp32 is not None
    return choose_bucket(
        present=present if not user_set else asks.bucket_in_fp32,
        user_set=user_set,
        align=now.over_user,
        main_grads=planned.main_grads,
        model=model,
    )


@given(requested, models, in_force, st.booleans())
def test_main_grads_of_the_shims_have_the_buckets_dtype(asks, model, now, present):
    """Main grads and bucket agree if the bucket is as planned: aligned, or as the user wrote it."""
    planned = plan_optimizer(asks, model, now)
    added = planned.added.get("main_grads_dtype")
    if added is None:
        return
    if not now.aligns:
        assert added is (BF16 if asks.bucket_in_fp32 is False else FP32)
        return
    choice = bucket(asks, model, now, planned, present)
    if planned.main_grads is added:
        assert choice.grad_reduce_in_fp32 is (added is FP32)
        assert choice.problem == ""


@given(requested, models, in_force)
def test_what_the_user_wrote_is_in_the_config(asks, model, now):
    planned = plan_optimizer(asks, model, now)
    both = asks.asked.get("fp16") and asks.asked.get("bf16")
    for key, value in asks.asked.items():
        assert key not in planned.added
        assert planned.asked[key] == (False if both and key == "bf16" else value)


@given(requested, models, in_force)
def test_states_follow_only_where_that_is_in_force(asks, model, now):
    planned = plan_optimizer(asks, model, replace(now, dispatches=False))
    assert not {AWARE, "exp_avg_dtype", "main_grads_dtype"} & set(planned.adds)


@given(requested, models, in_force)
def test_an_opt_in_requests_the_same_as_the_fields_themselves(asks, model, now):
    """verl's own fields have the same effect in versions that read them and in all others."""
    fields = {AWARE: True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": FP32}
    asked = {key: value for key, value in asks.asked.items() if key not in fields}
    model = TrainableDtypes({torch.bfloat16: 8})
    now = replace(now, dispatches=True)
    by_fields = plan_optimizer(replace(asks, asked=asked, opt_in=fields), model, now)
    brought = plan_optimizer(
        replace(asks, asked=asked, opt_in=fields, reads_opt_in=False), model, now
    )
    written = plan_optimizer(replace(asks, asked={**fields, **asked}), model, now)
    assert by_fields == replace(brought, by_user=by_fields.by_user)
    assert by_fields.by_user is written.by_user
    assert brought.by_user is bool(asked.get(AWARE))
    assert by_fields.main_grads is written.main_grads
    assert by_fields.fields == written.fields


def test_a_build_reads_once_and_plans_anew_only_for_another_dtype():
    reads = []
    build = Build("verl", lambda: reads.append(1) or RequestedConfig())
    bf16, more, fp16 = ({BF16: 8}, {BF16: 99}, {FP16: 8})
    first = build.plan(build.in_force(), TrainableDtypes(bf16))
    assert build.plan(build.in_force(), TrainableDtypes(more)) is first
    other = build.plan(build.in_force(), TrainableDtypes(fp16))
    assert (first.dtype, other.dtype) == (BF16, FP16)
    build.distributed = False
    assert build.plan(build.in_force(), TrainableDtypes(fp16)) is not other
    assert len(reads) == 1
