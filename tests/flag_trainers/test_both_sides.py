"""Trainer and rollout of slime and miles: the trainers' own parser, driver and SGLang arguments.

SGLang is not installed: ``ServerArgs`` stands for its class, with the flags that the shim reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import DtypeError, UnsupportedPrecisionError
from precision_shim.precision.lm_head import HEAD_MARK

from ..stand_ins.empty_packages import empty_packages
from ..stand_ins.planted_engines import plant, plant_routers
from .driving import Trainer

On = Callable[..., Any]
PACKAGES = ("aiohttp", "fastapi", "mooncake", "pybase64", "pylatexenc", "setproctitle", "sglang")
PACKAGES += ("sglang_router", "starlette", "uvicorn")
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


@dataclasses.dataclass
class ServerArgs:
    """SGLang's arguments, as of 0.5.12, of which the trainers make the engines' processes."""

    model_path: str = ""
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    enable_fp32_lm_head: bool = False
    torchao_config: str = ""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dtype", type=str, default="auto", choices=DTYPES)
        parser.add_argument("--quantization", type=str)
        parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8_e4m3"])
        parser.add_argument("--enable-fp32-lm-head", action="store_true")
        parser.add_argument("--torchao-config", default="")


class Flags(argparse.Namespace):
    """A namespace in which all flags that the test does not name are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "sglang_", "eval_sglang_", "head_dtype", "target_modules")):
            raise AttributeError(name)
        return None if name.endswith(("config", "path")) else 0


class Job:
    """A job of the trainer, from its flags to the arguments of SGLang."""

    def __init__(self, name: str, model: Path) -> None:
        self.name, self.model = name, model

    def module(self, path: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{path}")

    def parse(self, *words: str, **flags: Any) -> Flags:
        parser = argparse.ArgumentParser()
        self.module("backends.sglang_utils.arguments").add_sglang_arguments(parser)
        own = {
            "num_gpus_per_node": 8,
            "rollout_num_gpus_per_engine": 1,
            "train_backend": "megatron",
        }
        own |= {"hf_checkpoint": str(self.model), "sglang_dp_size": 1, "sglang_ep_size": 1}
        own |= {"sglang_pp_size": 1, "actor_num_nodes": 1, "actor_num_gpus_per_node": 1, **flags}
        return parser.parse_args(words, Flags(**own))

    def drive(self, *words: str, **flags: Any) -> Flags:
        """Run the driver up to its request for GPUs."""
        args = self.parse(*words, **flags)
        self.module("ray.placement_group").create_placement_groups(args)
        return args

    def server(self, args: Flags, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        """The arguments with which the trainer's actor starts SGLang."""
        module = self.module("backends.sglang_utils.sglang_engine")
        given: dict[str, Any] = {"sglang_overrides": overrides, "base_gpu_id": 0}
        given |= {"dist_init_addr": "", "nccl_port": 1, "host": "", "port": 2}
        found: dict[str, Any] = module._compute_server_args(args, 0, **given)[0]
        return found


@pytest.fixture
def job(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    plant(tmp_path / "engines", monkeypatch)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"dtype": "bfloat16", "model_type": "qwen2"}))
    found = Job(name, model)
    with empty_packages(*PACKAGES):
        for path in ("arguments", "sglang_engine"):
            module = found.module(f"backends.sglang_utils.{path}")
            monkeypatch.setattr(module, "ServerArgs", ServerArgs)
        placed = found.module("ray.placement_group")
    if hasattr(found.module("backends.sglang_utils.arguments"), "RouterArgs"):
        monkeypatch.setattr(f"{name}.backends.sglang_utils.arguments.RouterArgs.add_cli_args", skip)
    monkeypatch.setattr(placed, "_create_placement_group", lambda number: (None, [], []))
    return found


def skip(*args: Any, **kwargs: Any) -> None:
    pass


def decided() -> dict[str, tuple[str, str]]:
    return {one.subject: (one.chosen, one.because) for one in precision_shim.status().decisions}


@pytest.mark.parametrize(
    ("words", "chosen", "because"),
    [
        ((), "bf16, as the actor", "--sglang-dtype=auto, and config.json says bfloat16"),
        (("--sglang-dtype", "BF16"), "bf16, as the actor", "--sglang-dtype"),
        (("--sglang-dtype", "fp16"), "fp16 beside the actor's bf16", "--sglang-dtype: "),
        (
            ("--sglang-kv-cache-dtype", "fp8_e4m3"),
            "bf16 with fp8_e4m3 KV cache beside the actor's bf16",
            "--sglang-kv-cache-dtype=fp8_e4m3: ",
        ),
        (
            ("--sglang-quantization", "fp8", "--sglang-kv-cache-dtype", "fp8_e4m3"),
            "fp8 with fp8_e4m3 KV cache beside the actor's bf16",
            "--sglang-quantization=fp8: its weights are rounded to fp8",
        ),
    ],
)
def test_what_the_rollout_computes_in_is_said(
    on: On, job: Job, words: tuple[str, ...], chosen: str, because: str
) -> None:
    on()
    job.drive(*words)
    found = decided()["rollout"]
    assert found[0] == chosen
    assert because.replace("bfloat16", "bf16") in found[1]


def test_an_unknown_name_ends_the_parser(
    on: On, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    on()
    with pytest.raises(SystemExit):
        job.parse("--sglang-dtype", "bf17")
    said = " ".join(capsys.readouterr().err.split())
    assert f"{job.name} " in said
    assert "--sglang-dtype='bf17' is not a dtype" in said
    assert "allowed: fp16/float16/half" in said


def test_a_quantised_checkpoint_is_said(on: On, job: Job) -> None:
    on()
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (job.model / "config.json").write_text(json.dumps(config))
    job.drive()
    chosen, because = decided()["rollout"]
    assert chosen == "fp8 beside the actor's bf16"
    assert because.startswith(f"{job.model}/config.json")


def test_fp8_of_the_trainer(on: On, job: Job) -> None:
    on()
    fp8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    job.drive(**fp8)
    chosen, because = decided()["rollout"]
    assert chosen.startswith("bf16 beside the actor's bf16 with weights in fp8 e4m3 (blocks of 128")
    assert "--fp8-format=e4m3, --fp8-recipe=blockwise" in because
    job.drive("--sglang-quantization", "fp8", **fp8)  # its kernels choose per tensor or channel
    chosen, because = decided()["rollout"]
    assert chosen == "fp8 beside the actor's, quantized perhaps differently"
    assert "may differ: weights: actor fp8 e4m3 (blocks of 128x128), rollout fp8 e4m3" in because
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (job.model / "config.json").write_text(json.dumps({"quantization_config": section}))
    job.drive(**fp8)
    assert decided()["rollout"][0].endswith("(blocks of 1x128), as the actor")
    if job.name == "miles":  # which does not hand this flag on to Bridge
        job.drive(fp4="e2m1", megatron_to_hf_mode="bridge")
        assert "the actor has none" in decided()["rollout"][1]


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ({"moe_router_dtype": "fp32"}, "fp32, as the actor"),
        ({"moe_router_dtype": None}, "fp32 beside the actor's bf16"),
        ({"custom_model_provider_path": "a.b"}, "fp32 beside the actor's not known here"),
        ({"train_backend": "fsdp"}, None),
    ],
)
def test_the_routers_of_both_sides(
    on: On,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, Any],
    chosen: str | None,
) -> None:
    on()
    model = plant_routers(tmp_path / "routers", monkeypatch)
    job.drive("--sglang-dtype", "bf16", hf_checkpoint=str(model), **flags)
    found = decided().get("router", (None, "--moe-router-dtype"))
    assert found[0] == chosen
    assert "--moe-router-dtype" in found[1]


def test_follow_writes_the_key_once(on: On, job: Job) -> None:
    on(rollout="follow")
    args = job.drive("--sglang-dtype", "half")
    assert decided()["dtype keys"][0] == "--sglang-dtype: float16 -> bfloat16"
    assert decided()["rollout"][0] == "bf16, as the actor"
    assert job.server(args)["dtype"] == "bfloat16"


def test_fp16_decides_for_sglang(on: On, job: Job) -> None:
    on()
    args = job.drive("--sglang-dtype", "bfloat16", fp16=True)
    assert job.server(args)["dtype"] == "float16"
    because = f"--fp16, with which {job.name} starts SGLang in float16"
    assert decided()["rollout"] == ("fp16, as the actor", because)


def written(job: Job, dtype: str) -> str:
    """A file of ``--sglang-config`` for the trained model and for a frozen one."""
    groups = f"[{{worker_type: regular, num_gpus: 1, overrides: {{dtype: {dtype}}}}}]"
    file = job.model / "sglang.yaml"
    file.write_text(
        f"sglang:\n- {{name: actor, server_groups: {groups}}}\n"
        "- {name: judge, update_weights: false, server_groups: "
        "[{worker_type: regular, num_gpus: 1, overrides: {dtype: float32}}]}\n"
    )
    return str(file)


def test_the_file_of_sglang_config_overrides_the_flags(on: On, job: Job) -> None:
    on(rollout="follow")
    file = written(job, "HALF")
    args = job.drive("--sglang-dtype", "bf16", sglang_config=file)
    found = decided()
    assert "dtype keys" not in found
    assert found["rollout"][0] == "fp16 beside the actor's bf16"
    assert found["rollout"][1].startswith(f"{file}: actor.overrides.dtype")
    models = job.module("backends.sglang_utils.sglang_config").SglangConfig.from_yaml(file).models
    assert job.server(args, models[0].server_groups[0].overrides)["dtype"] == "float16"
    with pytest.raises(DtypeError, match=r"overrides\.dtype='bf17'"):
        job.drive(sglang_config=written(job, "bf17"))
    with pytest.raises(UnsupportedPrecisionError, match=r"sglang.yaml: actor.overrides.dtype"):
        job.drive(sglang_config=written(job, "bf16"), fp16=True)


def test_the_lm_head_on_one_side_is_said(on: On, job: Job) -> None:
    on()
    args = job.drive("--sglang-enable-fp32-lm-head")
    assert decided()["LM head"][0] == "fp32 in rollout, the model's dtype in actor"
    assert not hasattr(args, "head_dtype")


@pytest.mark.usefixtures("one_process")
def test_the_lm_head_on_both_sides(on: On, job: Job) -> None:
    on(head="fp32")
    args = job.drive()
    assert decided()["LM head"][0] == "fp32 in trainer and rollout"
    assert job.server(args)["enable_fp32_lm_head"] is True
    for role, mark in (("actor", "fp32"), ("critic", None)):
        trainer = Trainer.of(job.name, role=role, head_dtype=args.head_dtype)
        (head,) = (
            module
            for name, module in trainer.chunks[0].named_modules()
            if name.endswith("output_layer")
        )
        assert getattr(head, HEAD_MARK, None) == mark
        assert trainer.norm(0) > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"rollout_external": True}, "SGLang servers that run already keep their LM head"),
        ({"target_modules": ["lm_head"]}, "--target-modules has the LM head"),
        ({"train_backend": "fsdp"}, "fsdp backend"),
    ],
)
def test_the_lm_head_is_refused_on_both_sides(
    on: On, job: Job, flags: dict[str, Any], said: str
) -> None:
    on(head="fp32")
    with pytest.raises(UnsupportedPrecisionError, match=said):
        job.drive(**flags)
