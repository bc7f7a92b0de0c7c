"""On the same generated configs, the plan and SkyRL's own workers come to the same verdict."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import precision_shim
from precision_shim.precision.dtypes import name_of
from precision_shim_adapters.skyrl.training import megatron

from ..every_framework.newest import on_the_newest
from ..plan import verdicts
from ..plan.remedies import hold as hold_remedies
from ..plan.verdicts import Drawn, Key, Verdict, agree, by_worker, draw, of_audit, of_plan, singles
from .support import build, fsdp_worker, scaler_of

pytestmark = [on_the_newest("skyrl"), pytest.mark.slow]

_FLAG = ("true", "false")
_POLICY = "trainer.policy"
_MIXED = f"{_POLICY}.fsdp_config.mixed_precision"
FSDP = (
    Key("trainer.bf16", _FLAG, ()),
    Key(f"{_MIXED}.param_dtype"),
    Key(f"{_MIXED}.param_dtype", ("fp16", "float16")),
    Key(f"{_MIXED}.reduce_dtype"),
    Key(f"{_POLICY}.optimizer_config.adam_betas", ("[0.9,0.95]",), ()),
)
_TRANSFORMER = f"{_POLICY}.megatron_config.transformer_config_kwargs"
_KWARGS = f"{_POLICY}.megatron_config.optimizer_config_kwargs"
_BUCKET = f"{_POLICY}.megatron_config.ddp_config"
MEGATRON = (
    Key("trainer.bf16", _FLAG, ()),
    Key(f"{_KWARGS}.use_precision_aware_optimizer", ("true", "true", "false"), ()),
    *(
        Key(f"{_KWARGS}.{name}")
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Key(f"{_KWARGS}.initial_loss_scale", ("4096",), ()),
    Key(f"{_KWARGS}.store_param_remainders", _FLAG, ()),
    Key(f"{_POLICY}.optimizer_config.adam_betas", ("[0.9,0.95]",), ()),
    Key(f"{_BUCKET}.grad_reduce_in_fp32", _FLAG, ()),
)


def words_of(drawn: Drawn) -> list[str]:
    return [f"{key}={value}" for key, value in drawn.written.items()]


def line(strategy: str, drawn: Drawn) -> list[str]:
    entry = ("python3", "-m", "skyrl.train.entrypoints.main_base", f"trainer.strategy={strategy}")
    gpus = ("trainer.placement.policy_num_gpus_per_node=1", "trainer.algorithm.use_kl_loss=false")
    return [*entry, *gpus, *words_of(drawn)]


def plan_of(strategy: str, *options: str) -> Callable[[Drawn], Verdict]:
    return lambda one: of_plan(line(strategy, one), one, *options)


@pytest.mark.parametrize(("strategy", "keys"), [("fsdp2", FSDP), ("megatron", MEGATRON)])
def test_each_remedy(strategy: str, keys: Sequence[Key]) -> None:
    keys = [one for one in keys if one.name != "trainer.bf16"]  # which may have no effect
    drawn = [Drawn({"trainer.fp16": "true"}), *singles(keys)]
    hold_remedies(drawn, lambda one: line(strategy, one), "--transformer-engine", "2.14")


def on_fsdp(drawn: Drawn, checkpoint: Path) -> Verdict:
    """The verdict of a policy worker on FSDP after one step on made-up gradients."""
    worker = fsdp_worker("policy", checkpoint, None, *words_of(drawn))
    module = getattr(worker.model, "model", worker.model)
    for one in module.parameters():
        one.grad = torch.ones_like(one)
    worker.strategy.optimizer_step(worker.optimizer, worker.model, worker.scheduler)
    scaler = scaler_of(worker.strategy)
    return Verdict(
        computes=name_of(module._get_fsdp_state()._mp_policy.param_dtype),
        scale=None if scaler is None else float(scaler.get_scale()),
        held=of_audit(precision_shim.audit(module, worker.optimizer).to_dict()),
    )


def on_megatron(drawn: Drawn, checkpoint: Path) -> Verdict:
    """The verdict of a policy worker on Megatron after one step on made-up gradients."""
    worker = build(checkpoint, *words_of(drawn))
    return verdicts.on_megatron(worker.actor_module, worker.optimizer)


def test_on_fsdp(cpu: None, checkpoints: dict[str, Path]) -> None:
    model = checkpoints["float32"]
    agree(draw(FSDP, 2, 20), plan_of("fsdp"), lambda one: on_fsdp(one, model))


Hold = Callable[..., None]


@pytest.fixture
def hold_on_megatron(fused_adam: str, checkpoints: dict[str, Path]) -> Hold:
    """Compares plan and worker on configs; further arguments are those of ``agree``."""
    plan, model = plan_of("megatron", "--transformer-engine", fused_adam), checkpoints["bfloat16"]
    return lambda drawn, **how: agree(drawn, plan, lambda one: on_megatron(one, model), **how)


def test_on_megatron(hold_on_megatron: Hold) -> None:
    hold_on_megatron(draw(MEGATRON, 2, 20))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"main_params_dtype": "float16"},
        {"main_params_dtype": "float16", "fp8_recipe": "tensorwise"},
        {"fp8_recipe": "tensorwise"},
    ],
    ids=str,
)
def test_an_fp32_model_with_the_precision_aware_optimizer(
    hold_on_megatron: Hold, more: dict[str, str]
) -> None:
    """A precision-aware FusedAdam stores masters of fp32 parameters, and never updates them."""
    kwargs = {"use_precision_aware_optimizer": "true", **more}
    written = {f"{_KWARGS}.{name}": value for name, value in kwargs.items()}
    hold_on_megatron([Drawn({"trainer.bf16": "false", **written}, {})])


@pytest.mark.parametrize(
    "written",
    [
        {f"{_KWARGS}.adam_beta2": "abc"},
        {f"{_KWARGS}.params_dtype": "null"},
        {f"{_KWARGS}.loss_scale": "abc"},
        {f"{_KWARGS}.exp_avg_dtype": "null"},
        {f"{_KWARGS}.main_grads_dtype": "null"},
        {f"{_KWARGS}.main_grads_dtype": "null", f"{_KWARGS}.use_precision_aware_optimizer": "true"},
        {f"{_KWARGS}.fp16": "true"},
        {f"{_KWARGS}.fp16": "true", "trainer.bf16": "false"},
        {f"{_KWARGS}.fp16": "true", f"{_KWARGS}.initial_loss_scale": "512"},
        {f"{_KWARGS}.fp16": "true", f"{_KWARGS}.loss_scale": "512"},
        {f"{_TRANSFORMER}.fp16": "true"},
        {f"{_TRANSFORMER}.fp16": "true", "trainer.bf16": "false"},
        {f"{_TRANSFORMER}.fp16": "true", f"{_TRANSFORMER}.bf16": "false"},
        {f"{_TRANSFORMER}.bf16": "true", "trainer.bf16": "false"},
        {f"{_TRANSFORMER}.params_dtype": "half"},
        {f"{_TRANSFORMER}.params_dtype": "fp32", "trainer.bf16": "false"},
        {f"{_TRANSFORMER}.params_dtype": "bf16", "trainer.bf16": "false"},
    ],
    ids=str,
)
def test_numbers_and_flags_on_megatron(
    hold_on_megatron: Hold, checkpoints: dict[str, Path], written: dict[str, str]
) -> None:
    hold_on_megatron([Drawn({**written, f"{_POLICY}.model.path": str(checkpoints["bfloat16"])})])


@pytest.mark.parametrize(
    "written",
    [
        {f"{_KWARGS}.adam_beta2": "null"},
        {f"{_KWARGS}.fp16": "true", f"{_KWARGS}.initial_loss_scale": "abc"},
    ],
    ids=str,
)
def test_the_worker_names_the_key_of_a_value_that_it_computes_with(
    fused_adam: str, checkpoints: dict[str, Path], written: dict[str, str]
) -> None:
    one = Drawn(written)
    worker = by_worker(lambda: on_megatron(one, checkpoints["bfloat16"]), one)
    name = list(written)[-1].rpartition(".")[2]
    assert re.fullmatch(
        rf"SettingsError: skyrl [\d.]+, optimizer_config_kwargs: {name}=('abc'|None) is not "
        "allowed; allowed: a number .+[.] Write one, without quotes, or leave it out.",
        worker.refused,
    ), worker


_AWARE = {f"{_KWARGS}.use_precision_aware_optimizer": "true"}


_OFF = {"features": "-dtype-coercion"}


@pytest.mark.parametrize(
    ("written", "out"),
    [
        ({**_AWARE, f"{_KWARGS}.exp_avg_dtype": "bf16"}, _OFF),
        ({**_AWARE, f"{_KWARGS}.exp_avg_sq_dtype": " FP32"}, _OFF),
        ({**_AWARE, f"{_KWARGS}.main_grads_dtype": "torch.bfloat16"}, {"frameworks": "verl"}),
        ({f"{_KWARGS}.exp_avg_dtype": "torch.float32"}, _OFF),
    ],
    ids=str,
)
def test_names_where_they_are_not_coerced(
    hold_on_megatron: Hold,
    monkeypatch: pytest.MonkeyPatch,
    written: dict[str, str],
    out: dict[str, str],
) -> None:
    for name, value in out.items():
        monkeypatch.setenv(f"PRECISION_SHIM_{name.upper()}", value)
    hold_on_megatron([Drawn(written)], **out)


def test_the_names_that_skyrl_itself_takes() -> None:
    theirs = importlib.import_module(f"{megatron.TRAIN}.distributed.megatron.optimizer_dtype")
    assert megatron.coerces_itself()
    assert set(theirs._DTYPE_NAME_TO_TORCH) == set(megatron._OWN_NAMES)
    assert megatron.takes_name(" BF16")
    assert not megatron.takes_name("torch.bfloat16")
