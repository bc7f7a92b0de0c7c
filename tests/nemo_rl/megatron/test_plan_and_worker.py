"""On the same generated configs, the plan and NeMo-RL's own workers come to the same verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import precision_shim
from precision_shim.precision.dtypes import name_of
from precision_shim.process import registry as _registry
from precision_shim.process.settings import resolve
from precision_shim_tools.plan.command import Options, read_launch_line
from precision_shim_tools.plan.nemo_rl import load

from ...every_framework.newest import on_the_newest
from ...plan import verdicts
from ...plan.remedies import hold as hold_remedies
from ...plan.verdicts import Drawn, Key, Verdict, agree, draw, of_audit, of_plan, singles
from ..cpu import nemo_rl_on_cpu
from ..support import actor_class, make_worker, scaler_of
from ..support import policy_config as dtensor_config
from . import support

pytestmark = [on_the_newest("nemo-rl"), pytest.mark.slow]

_FLAG = ("true", "false")
_OPTIMIZER = "policy.megatron_cfg.optimizer"
_BUCKET = "policy.megatron_cfg.distributed_data_parallel_config"
PRECISION = (
    Key("policy.precision"),
    Key("policy.precision", ("float16", "bfloat16", "float32"), ()),
)
DTENSOR = (
    *PRECISION,
    Key("policy.precision_shim.growth_interval", ("7",), ("0",)),
    Key("policy.precision_shim.init_scale", ("512",), ("-1",)),
)
MEGATRON = (
    *PRECISION,
    Key("policy.megatron_cfg.pipeline_dtype"),
    Key(f"{_OPTIMIZER}.bf16", _FLAG, ()),
    Key(f"{_OPTIMIZER}.fp16", _FLAG, ()),
    Key(f"{_OPTIMIZER}.use_precision_aware_optimizer", _FLAG, ()),
    *(
        Key(f"{_OPTIMIZER}.{name}")
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Key(f"{_OPTIMIZER}.initial_loss_scale", ("4096",), ()),
    Key(f"{_OPTIMIZER}.adam_beta2", ("0.95",), ()),
    Key(f"{_BUCKET}.grad_reduce_in_fp32", _FLAG, ()),
)
NAMED = r"^KeyError: ('[\w.]*'|\d+|True|None)$|FusedAdam .* must be one of"
"""NeMo-RL looks names of dtypes up in dicts, and FusedAdam refuses names that are no dtypes."""


def words_of(drawn: Drawn, file: Path) -> list[str]:
    written = [f"++{key}={value}" for key, value in drawn.written.items()]
    return ["python3", "nemo_rl/run_grpo.py", "--config", str(file), *written]


def policy_of(drawn: Drawn, file: Path) -> dict[str, Any]:
    """The policy section of a drawn config, read by NeMo-RL's own loader."""
    entries = _registry.entries().values()
    job = read_launch_line(words_of(drawn, file), entries, resolve(environ={}), Options())
    return dict(load(job)["policy"])


def written(section: dict[str, Any], folder: Path) -> Path:
    file = folder / "job.yaml"
    cluster = {"gpus_per_node": 1, "num_nodes": 1}
    file.write_text(yaml.safe_dump({"policy": json.loads(json.dumps(section)), "cluster": cluster}))
    return file


def on_dtensor(drawn: Drawn, file: Path) -> Verdict:
    """The verdict of a DTensor worker after one step on made-up gradients."""
    with nemo_rl_on_cpu():
        actor_class("v2")
        worker = make_worker("v2", policy_of(drawn, file))
        for one in worker.model.parameters():
            one.grad = torch.ones_like(one)
        worker.optimizer.step()
        scaler = scaler_of(worker)
        return Verdict(
            computes=name_of(worker.dtype),
            scale=None if scaler is None else float(scaler.get_scale()),
            held=of_audit(precision_shim.audit(worker.model, worker.optimizer).to_dict()),
        )


def on_megatron(drawn: Drawn, file: Path, folder: Path) -> Verdict:
    """The verdict of a Megatron worker after one step on made-up gradients."""
    with support.harness(folder):
        section = policy_of(drawn, file)
        if not folder.exists():
            support.convert(section, folder)
        worker = support.worker(section, init_reference_model=False)
        chunks = worker.model if isinstance(worker.model, list) else [worker.model]
        return verdicts.on_megatron(chunks, worker.optimizer)


def plan_of(file: Path, *options: str) -> Callable[[Drawn], Verdict]:
    return lambda one: of_plan(words_of(one, file), one, *options)


def test_on_dtensor(model: Path, tmp_path: Path) -> None:
    file = written(dtensor_config(model, "bfloat16", "v2"), tmp_path)
    plan = plan_of(file)
    agree(draw(DTENSOR, 2, 20), plan, lambda one: on_dtensor(one, file), named=NAMED)


def test_on_megatron(hold_on_megatron: Hold) -> None:
    hold_on_megatron(draw(MEGATRON, 2, 20), named=NAMED)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_each_remedy(model: Path, tmp_path: Path, backend: str) -> None:
    on_dtensor = backend == "dtensor"
    section = (
        dtensor_config(model, "bfloat16", "v2") if on_dtensor else support.policy_config(model)
    )
    keys = [f"{_OPTIMIZER}.exp_avg_dtype", "policy.optimizer.kwargs.exp_avg_dtype", "policy.dtype"]
    keys += ["policy.dtensor_cfg.fsdp_param_dtype", "policy.megatron_cfg.exp_avg_dtype"]
    drawn = [Drawn({key: "float16"}) for key in keys]
    drawn += singles(DTENSOR if on_dtensor else MEGATRON)
    file = written(section, tmp_path)
    hold_remedies(drawn, lambda one: words_of(one, file), "--transformer-engine", "2.14")


Hold = Callable[..., None]


@pytest.fixture
def hold_on_megatron(
    cpu: None, fused_adam: str, model: Path, tmp_path: Path, converted: Path
) -> Hold:
    """Compares plan and worker on configs; further arguments are those of ``agree``."""
    file = written(support.policy_config(model), tmp_path)
    plan = plan_of(file, "--transformer-engine", fused_adam)
    return lambda drawn, **how: agree(
        drawn, plan, lambda one: on_megatron(one, file, converted), **how
    )


_AWARE = {f"{_OPTIMIZER}.use_precision_aware_optimizer": "true"}


_OFF = {"features": "-dtype-coercion"}


@pytest.mark.parametrize(
    ("names", "out"),
    [
        ({**_AWARE, f"{_OPTIMIZER}.exp_avg_dtype": "bf16"}, _OFF),
        ({**_AWARE, f"{_OPTIMIZER}.exp_avg_sq_dtype": "torch.float32"}, {"frameworks": "verl"}),
        ({f"{_OPTIMIZER}.exp_avg_dtype": "fp32"}, _OFF),
    ],
    ids=str,
)
def test_names_where_they_are_not_coerced(
    hold_on_megatron: Hold,
    monkeypatch: pytest.MonkeyPatch,
    names: dict[str, str],
    out: dict[str, str],
) -> None:
    for name, value in out.items():
        monkeypatch.setenv(f"PRECISION_SHIM_{name.upper()}", value)
    hold_on_megatron([Drawn(names)], named=NAMED, **out)


@pytest.mark.parametrize(
    "names",
    [
        {f"{_OPTIMIZER}.adam_beta2": "abc"},
        {f"{_OPTIMIZER}.adam_beta2": "null"},
        {f"{_OPTIMIZER}.exp_avg_dtype": "null"},
        {f"{_OPTIMIZER}.fp16": "true", f"{_OPTIMIZER}.bf16": "false"},
    ],
    ids=str,
)
def test_numbers_and_flags_on_megatron(hold_on_megatron: Hold, names: dict[str, str]) -> None:
    hold_on_megatron([Drawn(names)])
