"""Dtype names in the configs of Megatron's models and DDPs: what is in force, and what is told."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import DtypeError
from precision_shim_adapters.megatron.training import config_dtypes
from precision_shim_tools.testing import tiny_gpt

from ..audit import builds

On = Callable[..., Any]
FP32 = ("fp32", "FP32", " Float32 ", "torch.float32", torch.float32)


def makers() -> list[Callable[..., Any]]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    @dataclasses.dataclass
    class Provider(TransformerConfig):
        """As Megatron-Bridge's providers: an annotation of its own, and a later check."""

        moe_router_dtype: str | None = None

        def __post_init__(self) -> None:
            pass

    def model(kind: Any, **fields: Any) -> Any:
        return kind(num_layers=2, hidden_size=16, num_attention_heads=2, **fields)

    def provide(**fields: Any) -> Any:
        made = model(Provider)
        for name, value in fields.items():
            setattr(made, name, value)
        TransformerConfig.__post_init__(made)
        return made

    def transformer(**fields: Any) -> Any:
        return model(TransformerConfig, **fields)

    def latent(**fields: Any) -> Any:
        return model(MLATransformerConfig, **fields)

    return [transformer, latent, provide, DistributedDataParallelConfig, OptimizerConfig]


def test_a_boolean_that_yaml_made_a_string_is_true_or_refused(on: On, one_process: Any) -> None:
    on()
    there = set()
    for make in makers():
        for field in dataclasses.fields(type(make())):
            if not config_dtypes.is_switch(field.type):
                continue
            there.add(field.name)
            with pytest.raises(DtypeError, match=rf"\.{field.name}='false' is a string, of which"):
                make(**{field.name: "false"})
            if field.name in ("bf16", "grad_reduce_in_fp32"):
                assert getattr(make(**{field.name: "yes"}), field.name) is True
    assert {"use_precision_aware_optimizer", "grad_reduce_in_fp32", "fp8_param"} <= there


def test_every_dtype_field_takes_every_name(on: On, one_process: Any) -> None:
    on()
    seen = set()
    for make in makers():
        kind = type(make())
        fields = config_dtypes.dtype_fields(kind)
        assert {f.name for f in dataclasses.fields(kind) if f.name.endswith("_dtype")} == set(
            fields
        )
        for name, names in fields.items():
            seen.add(name)
            for value in FP32:
                given = getattr(make(**{name: value}), name)
                assert given == ("fp32" if names else torch.float32), (name, value)
            for value in ("bf17", "torch.", ""):
                with pytest.raises(precision_shim.DtypeError, match=rf"{name}='{value}'.*fp32"):
                    make(**{name: value})
    assert {"params_dtype", "autocast_dtype", "moe_router_dtype", "exp_avg_dtype"} <= seen


def test_the_source_has_the_fields_of_the_class() -> None:
    transformer, *_ = makers()
    fields = config_dtypes.dtype_fields(type(transformer()))
    assert fields == config_dtypes.installed_fields()


def test_the_router_takes_the_names_that_megatron_reads(on: On, one_process: Any) -> None:
    on()
    transformer, *_ = makers()
    names = config_dtypes.dtype_fields(type(transformer()))["moe_router_dtype"]
    assert set(names) == set(config_dtypes._compared("moe_router_dtype")) == {"fp32", "fp64"}
    assert transformer(moe_router_dtype="Double").moe_router_dtype == "fp64"
    assert transformer(moe_router_dtype=None).moe_router_dtype is None
    with pytest.raises(precision_shim.DtypeError, match=r"'bf16'.*fp64.*leave it out"):
        transformer(moe_router_dtype="bf16")
    with pytest.raises(precision_shim.DtypeError, match="'fp8' is not a dtype name for this key"):
        transformer(params_dtype="fp8")


def test_megatrons_own_checks_of_a_config_still_run(on: On, one_process: Any) -> None:
    on()
    transformer, *_ = makers()
    with pytest.raises(ValueError, match="sequence parallelism"):
        transformer(sequence_parallel=True)


def logits(chunks: list[Any]) -> set[torch.dtype]:
    """The dtypes in which the routers of a model compute."""
    from megatron.core.transformer.moe.router import Router

    routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, Router)]
    hidden = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    return {router.gating(hidden).dtype for router in routers}


def test_a_router_computes_as_asked_or_the_audit_says_so(on: On, one_process: Any) -> None:
    def made(value: Any, later: bool = False) -> tuple[list[Any], precision_shim.Audit]:
        where = "model_later" if later else "model"
        build = builds.Build(experts=True, **{where: {"moe_router_dtype": value}})
        chunks, optimizer = builds.make(build)
        return chunks, precision_shim.audit(chunks, optimizer)

    for value, found in ((None, torch.bfloat16), ("fp32", torch.float32)):
        chunks, audit = made(value)
        assert logits(chunks) == {found}
        assert audit.ok
        assert audit.parts[0].routers == precision_shim.precision.dtypes.name_of(found)
    for value, due in (("Float32", "fp32"), ("bf17", "bf17")):  # without the shim
        chunks, audit = made(value)
        assert logits(chunks) == {torch.bfloat16}
        assert [problem.code for problem in audit.problems] == ["router-dtype"]
        problem = audit.problems[0].message
        assert f"expected {due}, found bf16" in problem
        assert "fp32 and fp64" in problem
    on()
    for later in (False, True):
        chunks, audit = made("Float32", later)
        assert logits(chunks) == {torch.float32}
        assert audit.ok
        with pytest.raises(precision_shim.DtypeError, match="moe_router_dtype='bf17'"):
            made("bf17", later)


def test_what_a_framework_sets_on_a_finished_ddp_config_is_coerced(
    on: On, one_process: Any
) -> None:
    """SkyRL sets the user's ``ddp_config`` on a config that is already made."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    on()
    provider = tiny_gpt(torch.float32)
    given = DistributedDataParallelConfig()
    fields = config_dtypes.dtype_fields(DistributedDataParallelConfig)  # none before 0.17
    for name in fields:
        setattr(given, name, "bf16")
    DistributedDataParallel(provider.config, given, provider())  # type: ignore[attr-defined]
    assert {getattr(given, name) for name in fields} <= {torch.bfloat16}


class Sixteen(torch.nn.Module):
    """A layer's part that computes in bf16."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros_like(hidden, dtype=torch.bfloat16), None


def test_a_residual_that_megatron_rounds_is_told(on: On, one_process: Any) -> None:
    on()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chunks, _ = builds.make(builds.Build(model={"fp32_residual_connection": True}))
    layer = chunks[0].module.module.decoder.layers[0]
    layer.pre_mlp_layernorm, layer.mlp = torch.nn.Identity(), Sixteen()
    keeps = layer._forward_mlp(torch.zeros(1, 1, 16)).dtype is torch.float32
    told = any("fp32_residual_connection=True is not heeded" in str(one.message) for one in said)
    assert told is not keeps
