"""The rules for contradictions, on hand-made readings like those of Megatron's optimizers.

``tests/audit`` applies the rules to real optimizers with each problem planted. These tests check
each boundary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import audits, counting, rules
from precision_shim.auditing.reading import DeclaredStates, Owned, Reading, Wanted
from precision_shim.auditing.record import AuditPart, Finding
from precision_shim.precision import updates
from precision_shim.precision.dtypes import name_of
from precision_shim_adapters.megatron.audit.reader import REMEDIES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WHERE = "verl 1.0"


def parameter(dtype: torch.dtype = BF16, grad: torch.dtype | None = None) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    if grad is not None:
        made.main_grad = torch.zeros(4, dtype=grad)  # type: ignore[attr-defined]
    return made


def owned(dtype: torch.dtype = BF16, **tensors: torch.dtype) -> Owned:
    """A parameter with its states; a ``master`` may be among them."""
    made = {name: torch.zeros(4, dtype=kind) for name, kind in tensors.items()}
    masters = (made.pop("master"),) if "master" in made else ()
    return Owned(dtype, torch.zeros(4), masters, **made)


def reading(*parameters: Any, wanted: Wanted | None = None, **fields: Any) -> Reading:
    views = {id(p): p.main_grad for p in parameters if hasattr(p, "main_grad")}
    return Reading(
        "core", "model", "Adam", list(parameters), wanted=wanted, bucket_views=views, **fields
    )


def part(one: Reading) -> AuditPart:
    (measured,) = counting.measure([one])
    return audits._part(one, measured)


def problems(one: Reading, **expected: str) -> list[Finding]:
    return rules.find(one, part(one), expected, WHERE)[0]


def notes(one: Reading) -> list[str]:
    return [found.code for found in rules.find(one, part(one), {}, WHERE)[1]]


def told(found: list[Finding]) -> list[tuple[str, str | None, str, str]]:
    return [(one.code, one.component, one.expected, one.found) for one in found]


def wanted(**fields: Any) -> Wanted:
    return Wanted("OptimizerConfig", remedies=REMEDIES, **fields)


def test_a_message_says_where_what_was_expected_and_what_was_found() -> None:
    (found,) = problems(reading(parameter(BF16, FP32), wanted=wanted(main_grads=BF16)))
    assert found.part == "model"
    assert found.message == (
        "verl 1.0, model, grad_buckets: expected bf16, found fp32: the optimizer reads the "
        "gradients as the bucket has them: set grad_reduce_in_fp32=False in the DDP's config, or "
        "main_grads_dtype with use_precision_aware_optimizer in the OptimizerConfig."
    )


@pytest.mark.parametrize(("main_grads", "bucket"), [(BF16, FP32), (FP32, BF16), (FP32, FP16)])
def test_main_gradients_in_another_dtype_than_the_config_says(main_grads: Any, bucket: Any) -> None:
    several = (parameter(BF16, main_grads), parameter(FP16, bucket), parameter(BF16, bucket))
    config, scaler = wanted(main_grads=main_grads), torch.amp.GradScaler("cpu")
    (found,) = problems(reading(*several, wanted=config, scaler=scaler))
    names = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
    assert told([found]) == [("main-grads-dtype", "grad_buckets", names[main_grads], names[bucket])]
    assert f"grad_reduce_in_fp32={main_grads is FP32} " in found.message


@pytest.mark.parametrize(
    ("dtype", "bucket", "main_grads"),
    [
        pytest.param(BF16, BF16, BF16, id="as it says"),
        pytest.param(BF16, None, BF16, id="no bucket yet"),
        pytest.param(BF16, FP32, None, id="it says nothing"),
        pytest.param(FP32, FP32, BF16, id="the gradients of fp32 parameters are fp32"),
    ],
)
def test_main_gradients_that_contradict_nothing(dtype: Any, bucket: Any, main_grads: Any) -> None:
    assert problems(reading(parameter(dtype, bucket), wanted=wanted(main_grads=main_grads))) == []


@pytest.mark.parametrize("component", ["exp_avg", "exp_avg_sq"])
def test_a_moment_in_another_dtype_than_the_config_says(component: str) -> None:
    other = "exp_avg_sq" if component == "exp_avg" else "exp_avg"
    held = [owned(**{component: FP32, other: FP32}), owned(**{component: BF16, other: FP32})]
    config = wanted(**{component: BF16})
    (found,) = problems(reading(owned=held, wanted=config))
    assert told([found]) == [("moment-dtype", component, "bf16", "fp32")]
    assert f"Adam's inner optimizer was not made with the {component}_dtype" in found.message
    assert problems(reading(owned=held, wanted=wanted(**{other: FP32}))) == []


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_moment_that_the_first_step_will_make(dtype: torch.dtype) -> None:
    one = reading(
        owned=[owned()],
        wanted=wanted(exp_avg=BF16),
        declared_states=DeclaredStates(exp_avg=lambda _: dtype),
    )
    expected = [] if dtype is BF16 else [("moment-dtype", "exp_avg", "bf16", "fp32")]
    assert told(problems(one)) == expected


def test_no_moments_and_none_foretold_contradict_nothing() -> None:
    assert problems(reading(owned=[owned()], wanted=wanted(exp_avg=BF16, exp_avg_sq=BF16))) == []


def test_masters_that_are_missing() -> None:
    held = [owned(exp_avg=FP32), owned(FP32), owned(exp_avg=FP32, master=FP32), owned(exp_avg=FP32)]
    (found,) = problems(reading(owned=held, wanted=wanted(masters={BF16: FP32, FP16: FP32})))
    assert told([found]) == [("master-missing", "master", "fp32", "none for 2 of 4 tensors")]
    assert "steps bf16 parameters themselves" in found.message


def test_masters_in_another_dtype() -> None:
    held = [
        owned(master=FP16),
        owned(master=FP16),
        owned(FP16, master=FP32),
        owned(FP16, master=FP16),
    ]
    found = problems(reading(owned=held, wanted=wanted(masters={BF16: torch.int16, FP16: FP32})))
    assert told(found) == [
        ("master-dtype", "master", "int16", "fp16"),
        ("master-dtype", "master", "fp32", "fp16"),
    ]
    assert "store_param_remainders=False" in found[0].message
    assert "store_param_remainders" not in found[1].message
    assert "before the optimizer" in found[1].message


@pytest.mark.parametrize(
    ("stepped", "master", "code"),
    [
        pytest.param(False, FP32, [], id="the first step makes it"),
        pytest.param(False, BF16, ["master-dtype"], id="the first step makes another"),
        pytest.param(False, None, ["master-missing"], id="the first step makes none"),
        pytest.param(True, FP32, ["master-missing"], id="the first step was made"),
    ],
)
def test_masters_that_the_optimizer_foretells(stepped: bool, master: Any, code: list[str]) -> None:
    states = {"exp_avg": FP32} if stepped else {}
    one = reading(
        owned=[owned(**states)],
        wanted=wanted(masters={BF16: FP32}),
        declared_states=DeclaredStates(master={BF16: master}.get),
    )
    assert [found.code for found in problems(one)] == code


@pytest.mark.parametrize(
    ("params", "held", "found"),
    [
        pytest.param(BF16, (BF16, BF16), None, id="as it says"),
        pytest.param(BF16, (BF16, FP32), None, id="a router in fp32"),
        pytest.param(BF16, (FP32, FP32), "fp32", id="all of them fp32"),
        pytest.param(BF16, (FP16, FP32), "fp16", id="some of them fp16"),
        pytest.param(BF16, (BF16, torch.uint8), None, id="what is no floating point"),
        pytest.param(FP32, (FP32,), None, id="fp32"),
        pytest.param(FP32, (BF16, FP16), "bf16+fp16", id="fp32 and they are not"),
        pytest.param(None, (BF16,), None, id="it says nothing"),
    ],
)
def test_the_parameters_of_another_model(params: Any, held: Any, found: str | None) -> None:
    made = [torch.zeros(4, dtype=dtype) for dtype in held]
    # With a scaler, fp16 parameters are no problem.
    one = reading(*made, wanted=wanted(params=params), scaler=torch.amp.GradScaler("cpu"))
    names = {BF16: "bf16", FP32: "fp32", None: ""}
    expected = [("params-dtype", "params", names[params], found)] if found else []
    assert told(problems(one)) == expected


def test_fp16_without_a_scaler() -> None:
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    several = (parameter(BF16), parameter(FP16))
    for scaler in (on, off, None):
        (found, *none) = problems(reading(*several, wanted=wanted(), scaler=scaler)) or [None]
        assert not none
        assert (found is None) == (scaler is on)
        if found is not None:
            assert told([found]) == [("scaler-missing", "params", "a loss scaler", "none")]
            assert "set fp16=True in the OptimizerConfig" in found.message
    assert problems(reading(parameter(BF16), wanted=wanted())) == []


def test_fp16_without_a_scaler_and_without_a_config() -> None:
    """A missing scaler that no config requires is a note; a scaler that is off is a problem."""
    off = torch.amp.GradScaler("cpu", enabled=False)
    turned_off = reading(parameter(FP16), scaler=off)
    assert told(problems(turned_off)) == [
        ("scaler-missing", "params", "a loss scaler that is on", "GradScaler, turned off")
    ]
    assert notes(turned_off) == []
    assert problems(reading(parameter(FP16))) == []
    assert notes(reading(parameter(FP16))) == ["scaler-missing"]
    assert notes(reading(parameter(FP16), wanted=wanted())) == []
    assert notes(reading(parameter(BF16))) == []
    assert problems(reading(parameter(BF16), scaler=off)) == []


def test_what_a_caller_expects_goes_over_the_config() -> None:
    one = reading(
        parameter(BF16, FP32),
        owned=[owned(exp_avg=FP32, exp_avg_sq=BF16)],
        wanted=wanted(main_grads=BF16, exp_avg=BF16, exp_avg_sq=FP32),
    )
    assert [found.component for found in problems(one)] == ["grad_buckets", "exp_avg", "exp_avg_sq"]
    found = problems(one, exp_avg="fp32", exp_avg_sq="fp16")
    assert told(found) == [
        ("unexpected-dtype", "exp_avg_sq", "fp16", "bf16"),
        ("main-grads-dtype", "grad_buckets", "bf16", "fp32"),
    ]
    assert "as audit(expected=...) has it" in found[0].message


def test_what_a_caller_expects_of_what_is_not_there() -> None:
    held = reading(owned=[owned(exp_avg=FP32)])
    assert told(problems(held, master="fp32")) == [("unexpected-dtype", "master", "fp32", "none")]
    # A rank that owns no parameter of a part has no states of the part.
    assert problems(reading(parameter()), master="fp32") == []
    # The first step will tell.
    assert problems(reading(owned=[owned()]), other="fp32") == []
    waits = reading(parameter(), owned=[owned()])
    assert [one.component for one in problems(waits, other="fp32", params="fp16")] == ["params"]
    later = reading(owned=[owned()], declared_states=DeclaredStates(exp_avg=lambda _: BF16))
    assert problems(later, exp_avg="bf16") == []
    assert [one.found for one in problems(later, exp_avg="fp32")] == ["bf16"]


def test_the_problems_of_each_optimizer() -> None:
    models = [torch.nn.Linear(2, 2).half() for _ in range(2)]
    optimizers = [torch.optim.AdamW(one.parameters()) for one in models]
    off = torch.amp.GradScaler("cpu", enabled=False)
    audit = precision_shim.audit(models, optimizers, scaler=off)
    assert [(one.code, one.part) for one in audit.problems] == [
        ("scaler-missing", "model"),
        ("scaler-missing", "model 2"),
    ]
    assert {one.part for one in audit.notes} == {"model", "model 2"}


@pytest.mark.parametrize(
    ("dtype", "states", "declared_states", "noted"),
    [
        pytest.param(BF16, {"exp_avg": FP32}, None, True, id="16 bits are stepped"),
        pytest.param(BF16, {}, None, True, id="before the first step"),
        pytest.param(BF16, {}, FP32, False, id="the first step makes masters"),
        pytest.param(BF16, {"exp_avg": FP32}, FP32, True, id="the first step made none"),
        pytest.param(BF16, {"master": FP32}, None, False, id="masters"),
        pytest.param(FP32, {}, None, False, id="fp32"),
    ],
)
def test_a_note_on_16_bit_weights_without_masters(
    dtype: Any, states: Any, declared_states: Any, noted: bool
) -> None:
    tell = DeclaredStates(master=lambda _: declared_states) if declared_states else DeclaredStates()
    one = reading(owned=[owned(dtype, **states)], declared_states=tell)
    found = ["no-master"] if noted else []
    assert (notes(one), problems(one)) == (found, [])
    one.owned[0].lr = 1e-6  # most of Adam's updates are lost
    assert (notes(one), [problem.code for problem in problems(one)]) == ([], found)
    assert notes(replace(one, wanted=wanted())) == []
    assert problems(replace(one, wanted=wanted())) == []


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("lr", [3e-8, 1e-7, 1e-6, 1e-5, 2e-5, 1e-4, 1e-3, 0.1, 2.0])
def test_what_weights_without_masters_lose(lr: float, dtype: torch.dtype) -> None:
    """The share is that of a normal distribution's quantiles whose rounded sum is the old one."""
    kept, lost = updates.kept(lr, name_of(dtype))
    count = 1 << 15
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    weights = (torch.special.ndtri(at) * updates.SIZE).to(dtype).double()
    same = (weights + lr).to(dtype) == weights
    eps = torch.finfo(dtype).eps  # how far apart the weights are that the dtype has
    assert lost == pytest.approx(same.double().mean().item(), abs=eps)
    assert 0 <= kept <= (8 if dtype is BF16 else 11)
    assert (kept > 0) is (lr >= eps * 2.0**-6)  # the last bit of weights from 2^-6 to 2^-5
    assert updates.without_masters(lr, name_of(dtype))[1] is (lost > 0.5)


@pytest.mark.parametrize(
    ("betas", "dtype", "stuck"),
    [
        (((0.9, 0.999),), BF16, True),
        (((0.9, 0.99), (0.9, 0.999)), BF16, True),
        (((0.9, 0.99),), BF16, False),
        (((0.9, 0.999),), FP32, False),
        (((0.9,),), BF16, False),  # Muon's momentum
        ((), BF16, False),
    ],
)
def test_a_note_on_a_second_moment_that_cannot_decay(betas: Any, dtype: Any, stuck: bool) -> None:
    live = reading(owned=[owned(FP32, exp_avg_sq=dtype), owned(FP32)], betas=betas)
    later = reading(
        owned=[owned(FP32)], betas=betas, declared_states=DeclaredStates(exp_avg_sq=lambda _: dtype)
    )
    for one in (live, later):
        assert notes(one) == (["second-moment-stuck"] if stuck else [])
    if stuck:
        _, (found,) = rules.find(live, part(live), {}, WHERE)
        assert found.found == "bf16 at beta2 0.999"
        assert found.component == "exp_avg_sq"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("bf16", "bf16"),
        (" torch.BFloat16 ", "bf16"),
        (torch.float32, "fp32"),
        ("int16", "int16"),
        (" torch.Int16", "int16"),
        (torch.int16, "int16"),
        ("float64", "float64"),
    ],
)
def test_the_dtypes_that_a_caller_may_expect(written: Any, name: str) -> None:
    assert rules.parse_expected({"master": written}) == {"master": name}


def test_a_caller_who_expects_nothing() -> None:
    assert rules.parse_expected(None) == {}
