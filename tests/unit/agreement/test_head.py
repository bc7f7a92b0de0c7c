"""An LM head in fp32 in all engines of a job, or in none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import precision_shim
from precision_shim.errors import PrecisionShimWarning, UnsupportedPrecisionError
from precision_shim.precision.findings import Findings
from precision_shim.precision.lm_head import Head
from precision_shim.process.settings import Settings, resolve
from precision_shim.reporting import journal
from precision_shim_adapters.agreement import lm_head
from precision_shim_adapters.agreement.lm_head import (
    by_megatron,
    compute_in_fp32,
    is_marked,
    names_head,
    of_automodel,
    of_rollout,
    of_trainer,
    unchanged_heads,
)
from precision_shim_adapters.agreement.report import Sides, Write, report_sides

from ...stand_ins.planted_engines import NEW, plant

JOB = "toyfw", "toyfw 1.0"
WHERE = JOB[1]
ON = resolve(settings={"head": "fp32"}, environ={})
ACTOR = Head("actor", "model.head_dtype")
ROLLOUT = Head("rollout", "engine.head_dtype")
NO = Head("rollout", "engine.head_dtype", refusal="the engine has none", remedy="Take another")
THERE = Head("rollout", "engine.head_dtype", refusal="not installed here", known=False)
REFUSED = (
    "toyfw 1.0: PRECISION_SHIM_HEAD=fp32 is refused, because it takes effect in all engines or in "
    "none: rollout: the engine has none. The shim changes no LM head. Take another. Or unset "
    "PRECISION_SHIM_HEAD."
)


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    journal.clear()
    yield
    precision_shim.uninstall()


def report_heads(heads: list[Head], write: Write | None) -> None:
    report_sides(Sides(*JOB, heads=heads), write)


def planned(heads: list[Head], settings: Settings = ON) -> Findings:
    """What the command ``plan`` finds, which may run on another machine than the job."""
    return Sides(*JOB, heads=heads).judge(settings, may_write=True, here=False)[0]


def decided() -> list[tuple[str, str]]:
    return [(made.subject, made.chosen) for made in precision_shim.status().decisions]


# -- both or none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "chosen"),
    [
        ([ACTOR, ROLLOUT], []),
        ([replace(ACTOR, in_fp32=True), replace(ROLLOUT, in_fp32=True)], []),
        ([ACTOR, replace(ROLLOUT, in_fp32=True)], ["fp32 in rollout, the model's dtype in actor"]),
        # The engine ignores its option.
        ([ACTOR, replace(NO, in_fp32=True)], ["the model's dtype in actor and rollout"]),
    ],
)
def test_without_the_setting_a_head_on_one_side_is_said(
    heads: list[Head], chosen: list[str]
) -> None:
    precision_shim.install(strict=True, settings={"log": "quiet"})
    report_heads(heads, None)
    assert decided() == [("LM head", one) for one in chosen]
    assert planned(heads, resolve(environ={})) == Findings(precision_shim.status().decisions)


def test_all_keys_are_written_and_it_is_said_once() -> None:
    precision_shim.install(settings={"head": "fp32", "log": "quiet"})
    wrote: list[str] = []
    done = Head("ref", "ref.head_dtype", in_fp32=True)
    for _ in range(2):
        report_heads([ACTOR, done, ROLLOUT], lambda key, _: wrote.append(key))
    assert wrote == ["model.head_dtype", "engine.head_dtype"] * 2
    assert decided() == [("LM head", "fp32 in trainer and rollout")]


@pytest.mark.parametrize("heads", [[ACTOR, NO], [NO, ACTOR]])
def test_one_refusal_leaves_all_heads(heads: list[Head]) -> None:
    precision_shim.install(settings={"head": "fp32", "log": "quiet"})
    wrote: list[str] = []
    with pytest.warns(PrecisionShimWarning) as told:
        report_heads(heads, lambda key, _: wrote.append(key))
    assert [str(one.message) for one in told] == [REFUSED]
    assert not wrote
    assert decided() == [("LM head", "each engine's own dtype")]
    assert [str(one) for one in planned(heads).problems] == [REFUSED]


def test_strict_raises() -> None:
    precision_shim.install(strict=True, settings={"head": "fp32", "log": "quiet"})
    with pytest.raises(UnsupportedPrecisionError) as raised:
        report_heads([ACTOR, NO], lambda key, value: None)
    assert str(raised.value) == REFUSED


def test_a_worker_cannot_write() -> None:
    precision_shim.install(settings={"head": "fp32", "log": "quiet"})
    with pytest.warns(PrecisionShimWarning, match="Write engine.head_dtype=float32. Or unset"):
        report_heads([Head("actor", "a", in_fp32=True), ROLLOUT], None)
    assert decided() == [("LM head", "each engine's own dtype")]


def test_an_engine_on_another_machine_is_a_note_in_the_plan() -> None:
    found = planned([ACTOR, THERE])
    assert found.problems == ()
    assert ["not installed here" in one.because for one in found.decisions] == [True]


# -- what a config says ----------------------------------------------------------------------------


KEY = {"vllm": "kw.hf_overrides.head_dtype", "sglang": "kw.enable_fp32_lm_head"}
WORD: dict[str, Any] = {"vllm": "float32", "sglang": True}


@pytest.mark.parametrize("name", NEW)
def test_an_engine_that_has_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plant(tmp_path, monkeypatch)
    head = of_rollout(name, {}, "kw")
    assert head == Head("rollout", KEY[name], value=WORD[name])
    option = KEY[name].rpartition(".")[2]
    written = {option: WORD[name]}
    head = of_rollout(name, {"hf_overrides": written} if name == "vllm" else written, "kw")
    assert head == Head("rollout", KEY[name], in_fp32=True, value=WORD[name])


@pytest.mark.parametrize("name", NEW)
def test_an_engine_without_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plant(tmp_path, monkeypatch, {name: "pass"})
    head = of_rollout(name, {}, "kw")
    assert "does not use" in head.refusal
    assert (head.remedy.startswith("Install"), head.known) == (True, True)


@pytest.mark.parametrize(
    ("name", "options", "quantised", "said"),
    [
        ("vllm", {"hf_overrides": {"head_dtype": "model"}}, "", "kw.hf_overrides.head_dtype=model"),
        ("sglang", {"enable_fp32_lm_head": False}, "", "kw.enable_fp32_lm_head=False"),
        ("vllm", {"hf_overrides": "a function"}, "", "is no mapping"),
        ("vllm", {}, "rollout.quantization", "rollout.quantization makes hf_overrides of its own"),
        ("hf", {}, "", "the shim does not set the LM head of hf"),
    ],
)
def test_what_the_user_wrote_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    quantised: str,
    said: str,
) -> None:
    plant(tmp_path, monkeypatch)
    assert said in of_rollout(name, options, "kw", quantised).refusal


def test_a_trainers_key() -> None:
    assert of_trainer("actor", {}, "m") == Head("actor", "m.head_dtype")
    assert of_trainer("actor", {"head_dtype": "float32"}, "m").in_fp32
    assert of_trainer("actor", {"head_dtype": "model"}, "m").refusal == "m.head_dtype=model"
    assert of_trainer("actor", None, "m", "fused").refusal == "fused"


def test_a_model_is_marked_by_its_overrides() -> None:
    assert is_marked({"head_dtype": "float32"})
    assert is_marked({"head_dtype": torch.float32})
    for other in ({}, None, {"head_dtype": "bfloat16"}, {"head_dtype": None}):
        assert not is_marked(other)


@pytest.mark.parametrize(
    ("targets", "has"),
    [
        ("all-linear", False),
        (None, False),
        (["q_proj", "lm_head"], True),
        (["linear_qkv", "output_layer"], True),
        (".*(q_proj|lm_head)", True),
        ((), False),
    ],
)
def test_target_modules_of_lora(targets: object, has: bool) -> None:
    assert names_head(targets) is has
    assert names_head(None, targets) is has


def test_a_key_of_the_users_acts_beside_a_refusal() -> None:
    precision_shim.install(settings={"head": "fp32", "log": "quiet"})
    theirs = Head("actor", "model.head_dtype", in_fp32=True)
    with pytest.warns(
        PrecisionShimWarning, match=r"no LM head, but model\.head_dtype in the config"
    ):
        report_heads([theirs, NO], lambda key, value: None)


def test_the_plan_says_what_is_sure_beside_an_engine_that_is_not_here() -> None:
    fused = Head("actor", "model.head_dtype", refusal="a fused product")
    (problem,) = planned([fused, THERE]).problems
    assert "a fused product" in problem.message
    assert "not installed" not in problem.message


SERVED = Head("rollout", "engine.head_dtype", in_fp32=True)


def test_heads_that_the_shim_leaves() -> None:
    (trained,) = unchanged_heads("actor", "Toy", [ROLLOUT])
    assert trained.refusal == "the shim does not change the LM heads of Toy"
    (made,) = planned(unchanged_heads("actor", "Toy", [SERVED]), resolve(environ={})).decisions
    because = f"engine.head_dtype; actor: {trained.refusal}"
    assert (made.chosen, made.because) == ("fp32 in rollout, the model's dtype in actor", because)
    own = replace(ACTOR, in_fp32=True)
    assert unchanged_heads("actor", "Toy", [ROLLOUT], ACTOR) == [trained]
    found = planned(unchanged_heads("actor", "Toy", [ROLLOUT], own))
    assert (found.problems, found.decisions[0].chosen) == ((), "fp32 in trainer and rollout")


def test_an_engine_that_is_not_here_may_compute_its_head_in_fp32() -> None:
    (made,) = planned([ACTOR, replace(THERE, in_fp32=True)], resolve(environ={})).decisions
    assert made.chosen == "fp32 in rollout, the model's dtype in actor"
    assert made.because == "engine.head_dtype; rollout: not installed here"


@pytest.mark.parametrize(
    ("options", "experts", "found"),
    [
        ({}, 2, None),
        ({"lm_head_precision": "bfloat16"}, 2, None),
        ({"lm_head_precision": "float32"}, None, "takes effect with expert parallelism only"),
        ({"lm_head_precision": "torch.float32"}, 2, "Automodel then rounds the logits"),
        ({"lm_head_precision": "float32", "wrap_outer_model": False}, 2, ""),
    ],
)
def test_automodels_own_head(options: dict[str, Any], experts: object, found: str | None) -> None:
    head = of_automodel("policy", options, "moe", experts)
    if found is None or head is None:
        assert head is found
        return
    assert (head.key, head.in_fp32, head.idle) == ("moe.lm_head_precision", True, bool(found))
    assert found in head.refusal


@pytest.mark.parametrize("newest", [False, True])
def test_megatrons_own_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: bool) -> None:
    name = "newest" if newest else "older"
    more = ", logit_dtype=None" if newest else ""
    (tmp_path / f"{name}.py").write_text(f"class Model:\n    def __init__(self{more}): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lm_head, "_MEGATRONS_MODEL", f"{name}:Model.__init__")
    found = Head("actor", "k", in_fp32=True) if newest else None
    for written in ("fp32", "float32", torch.float32):
        assert by_megatron("actor", {"logit_dtype": written}, "k") == found
    for written in (None, "bf16", torch.bfloat16):
        assert by_megatron("actor", {"logit_dtype": written}, "k") is None


# -- the head --------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """As much of a Hugging Face model as the shim reads."""

    def __init__(self, dtype: torch.dtype, head: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.lm_head = head or torch.nn.Linear(16, 32, bias=False, dtype=dtype)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lm_head(hidden)
        return result


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_product_is_fp32_of_rounded_values(dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Model(torch.float32 if autocast else dtype)
    twin = copy.deepcopy(model)
    compute_in_fp32(model, WHERE)
    hidden = torch.randn(4, 16, dtype=model.lm_head.weight.dtype, requires_grad=True)
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits, before = model(hidden), twin(hidden)
    rounded = [tensor.to(dtype).float() for tensor in (hidden, model.lm_head.weight)]
    assert (logits.dtype, before.dtype) == (torch.float32, dtype)
    assert torch.equal(logits, functional.linear(*rounded))
    assert not torch.equal(logits, before.float())
    logits.sum().backward()
    weight = model.lm_head.weight
    assert weight.grad is not None
    assert (weight.grad.dtype, hidden.grad is not None) == (weight.dtype, True)


def test_a_copy_has_a_head_of_its_own() -> None:
    model = Model(torch.bfloat16)
    compute_in_fp32(model, WHERE)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    hidden = torch.ones(1, 16, dtype=torch.bfloat16)
    assert twin(hidden).abs().sum() == 0
    assert model(hidden).abs().sum() > 0


class Fake(torch.nn.Linear):
    """A linear layer with a product of its own, as quantisation-aware training has."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


@pytest.mark.parametrize("head", [torch.nn.Identity(), Fake(16, 32)])
def test_another_head_is_refused(head: torch.nn.Module) -> None:
    model = Model(torch.bfloat16, head)
    with pytest.raises(UnsupportedPrecisionError, match="the LM head of Model is a"):
        compute_in_fp32(model, WHERE)
