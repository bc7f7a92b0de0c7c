"""The dispatch table, the obstacles to it, and the precedence of the user's settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from precision_shim.errors import SettingsError
from precision_shim.precision.effect import without_effect
from precision_shim.precision.model import TrainableDtypes
from precision_shim.precision.moments import second_moment_can_decay
from precision_shim_adapters.megatron.policy.legality import FusedAdamSupport
from precision_shim_adapters.megatron.policy.optimizer_plan import plan_optimizer
from precision_shim_adapters.megatron.policy.requested import InForce, RequestedConfig

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
PAO = "use_precision_aware_optimizer"


def te(*version):
    return FusedAdamSupport(version, True, "")


def aware(result):
    """Whether the text of the choice describes a precision-aware optimizer."""
    return result.chosen.startswith("precision-aware optimizer: ")


def plan_for(dtype=BF16, *, asked=None, policy="follow-model", model=None, **fields):
    """Plan with dtypes as the user wrote them, so that illegal ones are planned, too."""
    known = {key: fields.pop(key) for key in ("aligns", "whole_masters") if key in fields}
    now = InForce(states=policy, coerces=False, support=fields.pop("support", te(2, 11)), **known)
    requested = RequestedConfig(
        asked={} if asked is None else asked,
        declared=fields.pop("declared", dtype),
        auto=policy,
        native={dtype: fields.pop("native", {})},
        **fields,
    )
    return plan_optimizer(requested, TrainableDtypes({dtype: 100}) if model is None else model, now)


# -- the dispatch table ---------------------------------------------------------------------------

FLAGS = {
    "bf16": {"bf16": True, "fp16": False, "params_dtype": BF16},
    "fp16": {"bf16": False, "fp16": True, "params_dtype": FP16},
    "fp32": {"bf16": False, "fp16": False, "params_dtype": FP32},
}
BF16_STATES = {PAO: True, "main_grads_dtype": BF16, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
SCALER = {"initial_loss_scale": 32768, "min_loss_scale": 1}
FP16_STATES = {**SCALER, PAO: True, "store_param_remainders": False}
TABLE = [
    ("bf16", "follow-model", 0.999, BF16_STATES),
    ("bf16", "follow-model", 0.95, BF16_STATES),
    ("bf16", "guarded", 0.95, BF16_STATES),
    ("bf16", "guarded", 0.999, {**BF16_STATES, "exp_avg_sq_dtype": FP32}),
    ("bf16", "as-configured", 0.95, {}),
    ("fp16", "follow-model", 0.999, FP16_STATES),
    ("fp16", "guarded", 0.999, FP16_STATES),
    ("fp16", "as-configured", 0.999, SCALER),
    ("fp32", "follow-model", 0.999, {}),
    ("fp32", "guarded", 0.999, {}),
    ("fp32", "as-configured", 0.999, {}),
]


@pytest.mark.parametrize(("name", "policy", "beta2", "states"), TABLE)
def test_the_dispatch_table(name, policy, beta2, states):
    result = plan_for(DTYPES[name], policy=policy, asked={"adam_beta2": beta2})
    assert result.adds == {**FLAGS[name], **states}
    assert aware(result) is states.get(PAO, False)
    assert result.main_grads is states.get("main_grads_dtype", FP32)


@pytest.mark.parametrize("name", DTYPES)
def test_the_declared_dtype_holds_where_no_parameter_is_known(name):
    known = plan_for(DTYPES[name])
    unknown = plan_for(declared=DTYPES[name], model=TrainableDtypes())
    assert unknown.adds == known.adds


def test_the_parameters_win_over_the_declared_dtype():
    assert plan_for(FP32, declared=BF16).adds == FLAGS["fp32"]
    assert plan_for(FP16, declared=BF16).adds == plan_for(FP16).adds


def test_nothing_is_known_and_nothing_added():
    assert plan_for(declared=None, model=TrainableDtypes()).adds == {}


def test_a_dtype_without_a_rule_adds_nothing():
    result = plan_for(torch.float64)
    assert result.adds == {}
    assert "float64" in result.because


# -- models with parameters of several kinds ------------------------------------------------------


@pytest.mark.parametrize("declared", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("policy", ["follow-model", "guarded", "as-configured"])
def test_mixed_dtypes_keep_fp32_states_and_give_the_counts(declared, policy):
    model = TrainableDtypes({BF16: 1234, FP32: 56})
    result = plan_for(model=model, declared=DTYPES[declared], policy=policy)
    assert result.adds == {**(SCALER if declared == "fp16" else {}), **FLAGS[declared]}
    assert result.main_grads is FP32
    assert not aware(result)
    assert "1,234" in result.because
    assert "56" in result.because
    assert "FusedAdam has one dtype for each moment of all parameters" in result.because


@pytest.mark.parametrize("native", [True, False])
def test_mixed_dtypes_turn_a_native_precision_aware_optimizer_off(native):
    mixed = TrainableDtypes({BF16: 3, FP32: 4})
    result = plan_for(model=mixed, declared=BF16, native={PAO: True} if native else {})
    assert result.adds == {**FLAGS["bf16"], **({PAO: False} if native else {})}
    assert not aware(result)


@pytest.mark.parametrize("declared", [None, torch.float64])
def test_mixed_dtypes_whose_declared_one_has_no_row_get_nothing(declared):
    result = plan_for(model=TrainableDtypes({BF16: 3, FP32: 4}), declared=declared)
    assert result.adds == {}


def test_fp8_parameters_get_nothing():
    result = plan_for(model=TrainableDtypes({BF16: 100}, quantized=True))
    assert result.adds == {}
    assert "fp8" in result.because


# -- the guard on the second moment ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("beta2", "decays"),
    [
        (0.0, True),
        (0.95, True),
        (0.99, True),
        (0.996, True),
        (1 - 2**-8, False),  # 0.99609375: half an ulp exactly
        (0.997, False),
        (0.999, False),
        (1.0, False),
    ],
)
def test_the_guards_threshold(beta2, decays):
    assert second_moment_can_decay(beta2) is decays
    guarded = plan_for(policy="guarded", asked={"adam_beta2": beta2})
    assert guarded.adds["exp_avg_sq_dtype"] is (BF16 if decays else FP32)
    assert ("2^-8" in guarded.because) is not decays
    assert guarded.warnings == ()
    followed = plan_for(policy="follow-model", asked={"adam_beta2": beta2})
    assert followed.adds["exp_avg_sq_dtype"] is BF16
    assert len(followed.warnings) == (0 if decays else 1)


@pytest.mark.parametrize("policy", ["follow-model", "guarded"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_second_moment_that_the_user_chose_is_not_guarded(policy, dtype):
    result = plan_for(policy=policy, asked={"exp_avg_sq_dtype": dtype, "adam_beta2": 0.999})
    assert merged(result, {"exp_avg_sq_dtype": dtype})["exp_avg_sq_dtype"] is dtype
    assert result.warnings == ()
    assert "2^-8" not in result.because


# -- obstacles to the table -----------------------------------------------------------------------

OBSTACLES = {
    "not adam": ({"optimizer": "sgd"}, "'sgd'"),
    "muon": ({"optimizer": "muon"}, "'muon'"),
    "no distributed optimizer": ({"distributed": False}, "distributed optimizer is off"),
    "offload": ({"asked": {"optimizer_cpu_offload": True}}, "optimizer_cpu_offload"),
    "fp8 recipe": ({"asked": {"fp8_recipe": "mxfp8"}}, "'mxfp8'"),
    "framework": ({"blockers": ("Megatron-FSDP builds no FusedAdam",)}, "Megatron-FSDP"),
    "no TE": ({"support": FusedAdamSupport()}, "TransformerEngine is not installed"),
    "old TE": ({"support": FusedAdamSupport((1, 9), False, "has no argument x")}, "no argument x"),
}


@pytest.mark.parametrize("policy", ["follow-model", "guarded"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(("fields", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_every_obstacle_withdraws_everything_and_says_why(name, policy, fields, reason):
    result = plan_for(DTYPES[name], policy=policy, **fields)
    kept = dict(FLAGS[name])
    if name == "fp16":
        kept |= {"initial_loss_scale": 32768, "min_loss_scale": 1}
    assert result.adds == {**kept, PAO: False}
    assert result.main_grads is FP32
    assert not aware(result)
    assert reason in result.because
    assert result.warnings == ()


@pytest.mark.parametrize(
    ("dtype", "asked", "reason"),
    [(FP16, {}, "bf16 parameters"), (BF16, {"optimizer_cuda_graph": True}, "optimizer_cuda_graph")],
)
def test_remainders_that_the_user_wrote_rule_out_what_cannot_stand_beside_them(
    dtype, asked, reason
):
    result = plan_for(dtype, asked={"store_param_remainders": True, **asked})
    assert result.adds[PAO] is False
    assert reason in result.because
    assert aware(plan_for(dtype, asked={"store_param_remainders": False, **asked}))
    assert aware(plan_for(BF16, asked={"store_param_remainders": True}))


@pytest.mark.parametrize(("version", "blocked"), [((2, 1), True), ((2, 0), False)])
def test_remainders_rule_out_fp16_from_the_release_that_has_them(version, blocked):
    """The rule also applies to a model whose parameters are not known yet."""
    asked = {"store_param_remainders": True}
    for model in (TrainableDtypes({FP16: 1}), TrainableDtypes()):
        result = plan_for(FP16, model=model, support=te(*version), asked=asked)
        assert ("takes bf16 parameters, they are fp16" in result.because) is blocked
        assert aware(result) is not blocked


@pytest.mark.parametrize("asked", [{PAO: True}, {}])
def test_what_the_user_asked_for_is_not_said_to_be_withdrawn(asked):
    result = plan_for(asked=asked, optimizer="muon")
    assert ("cannot run" in result.because) is not bool(asked)


def test_states_that_the_user_asked_for_are_not_taken_the_native_optimizer_away():
    native = {PAO: True, "store_param_remainders": False}
    asked = {"exp_avg_dtype": BF16, "optimizer_cpu_offload": True}
    result = plan_for(FP16, asked=asked, native=native)
    assert merged(result, asked, native)[PAO] is True


def test_moments_that_an_offloaded_optimizer_ignores_are_told():
    """Megatron's HybridDeviceOptimizer ignores the moments' dtypes, but uses the bucket."""
    asked = {PAO: True, "optimizer_cpu_offload": True, "main_grads_dtype": BF16}
    for spelled in (BF16, "bfloat16"):
        asked = {**asked, "exp_avg_dtype": spelled}
        told = plan_for(asked=asked)
        assert told.chosen.endswith("main grads bf16, exp_avg fp32, exp_avg_sq fp32")
        assert told.main_grads is BF16
        written = RequestedConfig(asked=asked).written("optim.{}")
        held = {"exp_avg": ["fp32"], "grad_buckets": ["bf16"]}
        (fault,) = without_effect(written, held).problems
        assert fault.message.startswith(f"optim.exp_avg_dtype={spelled} has no effect")
        assert fault.remedy.startswith("Write optim.optimizer_cpu_offload=False, or leave")


@pytest.mark.parametrize("spelled", [FP32, "fp32", "torch.float32"])
def test_states_that_the_user_wants_in_fp32_are_no_reason_to_keep_it(spelled):
    native = {PAO: True, "store_param_remainders": False}
    result = plan_for(FP16, asked={"exp_avg_dtype": spelled}, native=native, optimizer="sgd")
    assert result.adds[PAO] is False


def test_the_fp8_recipe_that_fused_adam_supports_is_no_obstacle():
    assert aware(plan_for(asked={"fp8_recipe": "delayed"}))
    assert aware(plan_for(asked={"fp8_recipe": None}))


@pytest.mark.parametrize("version", [(1, 13), (2, 1), (2, 2, 1)])
def test_a_transformer_engine_without_bf16_moments_withdraws_the_bf16_row_only(version):
    result = plan_for(BF16, support=te(*version))
    assert result.adds == {**FLAGS["bf16"], PAO: False}
    assert "2.3" in result.because
    assert plan_for(FP16, support=te(*version)).adds == {**FLAGS["fp16"], **FP16_STATES}


# -- limits of the bucket and the checkpoints -----------------------------------------------------


@pytest.mark.parametrize("written", [True, False])
def test_main_grads_stay_fp32_where_the_bucket_does(written):
    bucket = {"bucket_in_fp32": True} if written else {"aligns": False}
    result = plan_for(asked={"adam_beta2": 0.95}, **bucket)
    assert result.adds == {**FLAGS["bf16"], **BF16_STATES, "main_grads_dtype": FP32}
    assert result.main_grads is FP32
    assert aware(result)
    assert "main grads stay fp32: " in result.because
    assert ("grad_reduce_in_fp32=True is the user's" in result.because) is written
    assert ("the gradient bucket is not aligned with them" in result.because) is not written
    assert bool(result.warnings) is written
    if written:
        assert result.warnings[0].endswith(
            ": 2 bytes per parameter more. Leave grad_reduce_in_fp32 out, write False, or set "
            "PRECISION_SHIM_GRAD_BUCKET=align."
        )


def test_an_fp32_bucket_is_nothing_to_warn_of_without_the_precision_aware_optimizer():
    asked = {PAO: False}
    assert plan_for(bucket_in_fp32=True, asked=asked).warnings == ()
    fp16 = plan_for(FP16, bucket_in_fp32=True)
    assert "main_grads_dtype" not in fp16.adds
    assert fp16.warnings == ()


def test_whole_masters_where_checkpoints_hold_none():
    result = plan_for(whole_masters=False, asked={"adam_beta2": 0.95})
    assert result.adds == {**FLAGS["bf16"], **BF16_STATES, "store_param_remainders": False}
    told = "whole fp32 masters: checkpoints could not be read without the shim otherwise"
    assert told in result.because
    # fp16 has whole masters anyway.
    fp16 = plan_for(FP16, whole_masters=False)
    assert fp16.adds == {**FLAGS["fp16"], **FP16_STATES}
    assert told not in fp16.because


# -- optimizer_cuda_graph -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "policy", "moments"),
    [
        ((2, 11), "follow-model", FP32),  # a capturable optimizer accepts no bf16 moments yet
        ((2, 14), "follow-model", BF16),
        ((2, 14), "guarded", FP32),  # bf16 needs both moments, and the guard keeps one in fp32
    ],
)
def test_under_cuda_graphs_both_moments_are_what_capturable_takes(version, policy, moments):
    result = plan_for(
        policy=policy,
        support=te(*version),
        asked={"optimizer_cuda_graph": True, "adam_beta2": 0.999},
    )
    assert result.adds["exp_avg_dtype"] is result.adds["exp_avg_sq_dtype"] is moments
    assert result.adds["store_param_remainders"] is False
    assert result.adds["main_grads_dtype"] is BF16
    assert "optimizer_cuda_graph" in result.because


@pytest.mark.parametrize("key", ["exp_avg_dtype", "exp_avg_sq_dtype"])
def test_under_cuda_graphs_the_users_moment_counts_as_one_of_both(key):
    asked = {"optimizer_cuda_graph": True, "adam_beta2": 0.95, key: FP32}
    result = plan_for(support=te(2, 14), asked=asked)
    assert result.adds["exp_avg_dtype"] is result.adds["exp_avg_sq_dtype"] is FP32
    assert "moments stay fp32: optimizer_cuda_graph takes" in result.because


def test_cuda_graphs_do_not_turn_the_fp16_row_around():
    result = plan_for(FP16, asked={"optimizer_cuda_graph": True})
    assert result.adds == {**FLAGS["fp16"], **FP16_STATES}


# -- the user -------------------------------------------------------------------------------------


def merged(result, asked, native=None):
    """The OptimizerConfig's fields that a framework ends up with."""
    return {**(native or {}), **result.adds, **asked}


@pytest.mark.parametrize("policy", ["follow-model", "guarded"])
def test_turning_the_precision_aware_optimizer_off_withdraws_everything(policy):
    for dtype in (BF16, FP16):
        result = plan_for(dtype, policy=policy, asked={PAO: False, "adam_beta2": 0.95})
        assert not {"main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"} & set(result.adds)
        assert not aware(result)
        assert result.main_grads is FP32
        assert "the user" in result.because


@pytest.mark.parametrize(("fields", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_asking_for_the_precision_aware_optimizer_goes_through_as_asked(fields, reason):
    asked = {**fields.get("asked", {}), PAO: True}
    result = plan_for(BF16, **{**fields, "asked": asked})
    assert aware(result)
    assert merged(result, asked)[PAO] is True
    # The plan adds no dtypes to an optimizer that cannot run.
    assert not {"main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"} & set(result.adds)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_users_main_grads_are_the_plans(dtype):
    result = plan_for(asked={"main_grads_dtype": dtype})
    assert result.main_grads is dtype
    assert result.adds["exp_avg_dtype"] is BF16


def test_main_grads_count_only_with_the_precision_aware_optimizer():
    assert plan_for(FP32, asked={"main_grads_dtype": BF16}).main_grads is FP32
    assert plan_for(FP32, asked={"main_grads_dtype": BF16, PAO: True}).main_grads is BF16


@pytest.mark.parametrize("text", ["bf16", "torch.bfloat16", " BFloat16 "])
def test_main_grads_that_are_not_coerced_yet_are_understood(text):
    # If the dtype-coercion feature is off, the bucket must follow a dtype's name all the same.
    assert plan_for(asked={"main_grads_dtype": text}).main_grads is BF16


def test_main_grads_that_are_no_dtype_are_left_to_the_message_that_refuses_them():
    assert plan_for(asked={PAO: True, "main_grads_dtype": "bf17"}).main_grads is FP32


def test_a_beta2_that_is_text_is_refused():
    with pytest.raises(SettingsError, match=r"adam_beta2='0\.95' is not allowed"):
        plan_for(policy="guarded", asked={"adam_beta2": "0.95"})


# -- properties -----------------------------------------------------------------------------------

HARMLESS = {
    "lr": st.floats(1e-6, 1e-2),
    "adam_beta2": st.sampled_from([0.95, 0.99, 0.999]),
    "optimizer_cuda_graph": st.booleans(),
    "optimizer_cpu_offload": st.booleans(),
    "fp8_recipe": st.sampled_from([None, "delayed", "mxfp8", "tensorwise"]),
}
PRECISION = {
    PAO: st.booleans(),
    "main_grads_dtype": st.sampled_from([FP32, BF16]),
    "exp_avg_dtype": st.sampled_from([FP32, BF16, FP16, FP8]),
    "exp_avg_sq_dtype": st.sampled_from([FP32, BF16, FP16, FP8]),
    "main_params_dtype": st.sampled_from([FP32, FP16]),
    "store_param_remainders": st.booleans(),
}
VERL_FP16 = {PAO: True, "store_param_remainders": False}  # verl's own fp16 branch


@st.composite
def requests(draw, asked):
    dtype = draw(st.sampled_from([BF16, FP16, FP32]))
    return SimpleNamespace(
        dtype=dtype,
        model=draw(st.sampled_from([TrainableDtypes({dtype: 9}), TrainableDtypes()])),
        asked=draw(st.fixed_dictionaries({}, optional=asked)),
        policy=draw(st.sampled_from(["follow-model", "guarded"])),
        optimizer=draw(st.sampled_from(["adam", "adam", "adam", "sgd"])),
        distributed=draw(st.sampled_from([True, True, True, False])),
        support=draw(
            st.sampled_from(
                [
                    FusedAdamSupport(),
                    FusedAdamSupport((1, 9), False, "lacks arguments"),
                    te(2, 1),
                    te(2, 3),
                    te(2, 11),
                    te(2, 14),
                ]
            )
        ),
        native=draw(st.sampled_from([{}, VERL_FP16])) if dtype is FP16 else {},
    )


def can_be_built(request, config):
    """Whether Megatron's OptimizerConfig and TransformerEngine's FusedAdam accept a config."""
    dtypes = {key: config.get(key, FP32) for key in PRECISION if key.endswith("_dtype")}
    if not config.get(PAO, False):
        return set(dtypes.values()) == {FP32}
    if request.optimizer != "adam" or not request.distributed:
        return False
    if config.get("optimizer_cpu_offload"):
        return True
    version = request.support.version
    if request.support.problem or version is None:
        return False
    moments = [dtypes["exp_avg_dtype"], dtypes["exp_avg_sq_dtype"]]
    if BF16 in moments and version < (2, 3):
        return False
    remainders = version >= (2, 1) and config.get("store_param_remainders", True)
    if remainders and dtypes["main_params_dtype"] is not FP32:
        return False
    if remainders and request.dtype is FP16:  # remainders rebuild fp32 from bf16 parameters only
        return False
    if config.get("optimizer_cuda_graph"):
        both_bf16 = moments == [BF16, BF16] and version >= (2, 14)
        return not remainders and (moments == [FP32, FP32] or both_bf16)
    return True


@given(requests(HARMLESS))
def test_what_the_shim_adds_can_always_be_built(request):
    result = plan_for(**vars(request))
    config = merged(result, request.asked, request.native)
    assert can_be_built(request, config), config


@given(requests({**HARMLESS, **PRECISION}))
def test_the_shim_breaks_no_config_that_could_be_built_without_it(request):
    assume(can_be_built(request, {**request.native, **request.asked}))
    result = plan_for(**vars(request))
    config = merged(result, request.asked, request.native)
    assert can_be_built(request, config), config


@given(requests({**HARMLESS, **PRECISION}))
def test_the_plan_is_the_merged_config_with_the_users_fields_on_top(request):
    asked = dict(request.asked)
    result = plan_for(**vars(request))
    config = merged(result, asked, request.native)
    assert request.asked == asked
    assert aware(result) is config.get(PAO, False)
    main_grads = config.get("main_grads_dtype", FP32) if aware(result) else FP32
    assert result.main_grads is main_grads
    for key, value in asked.items():
        if key not in request.native and result.adds.get(key, value) != value:
            assert f"{key} is the user's" in result.because
    assert result.because
    assert result.chosen


@given(requests({**HARMLESS, **PRECISION}))
def test_nothing_of_ours_is_bf16_where_transformer_engine_takes_no_bf16_moments(request):
    assume(not request.support.bf16_moments)
    adds = plan_for(**vars(request)).adds
    assert BF16 not in [adds.get(name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    assert adds.get("main_grads_dtype") is not BF16


@given(requests({**HARMLESS, **PRECISION}))
def test_as_configured_adds_the_models_flags_and_nothing_else(request):
    result = plan_for(**{**vars(request), "policy": "as-configured"})
    name = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[request.dtype]
    scaler = SCALER if request.dtype is FP16 else {}
    assert result.adds == {**scaler, **request.native, **FLAGS[name]}
