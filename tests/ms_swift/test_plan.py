"""``precision-shim plan`` for ms-swift's jobs, with ms-swift's own parser."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from precision_shim.cli import main

from ..plan.models import QWEN25_7B
from . import cpu
from .cpu import ARGUMENTS, import_trainer

ADAPTERS = ("adapters", "ref_adapters", "mcore_adapter", "mcore_ref_adapter")
LINE = ("PRECISION_SHIM=1", "NPROC_PER_NODE=8", "megatron", "sft", "--model", "none")


@pytest.fixture(scope="module", autouse=True)
def arguments() -> None:
    import_trainer(ARGUMENTS)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    options = ["--parameters", "1B", "--transformer-engine", "2.11.0", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["plan", *options, "--", *words])
    said = capsys.readouterr()
    return int(str(end.value)), json.loads(said.out) if said.out else said.err


def test_a_job_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, *LINE, "--torch_dtype", "float16", "--loss_scale", "last_round")
    assert (code, found["framework"], found["world_size"]) == (0, "ms-swift", 8)
    assert "loss scaler from 32768" in json.dumps(found)
    states = ("--use_precision_aware_optimizer", "true", "--exp_avg_dtype", "bf16")
    code, found = plan(capsys, *LINE, "--torch_dtype", "bfloat16", *states)
    assert code == 0
    assert "exp_avg bf16" in json.dumps(found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--no_such_key", "1"), "no_such_key"),
        (("--exp_avg_dtype", "bf17"), "invalid choice: 'bf17'"),
        (("--lr", "abc"), "argument --lr: invalid float value: 'abc'"),
        (("--tuner_type", "lora"), "LoRA"),
        *(((f"--{name}", "none"), f"--{name}: LoRA") for name in ADAPTERS),
        (("--use_megatron_fsdp", "true"), "use_megatron_fsdp"),
    ],
)
def test_what_is_not_planned_is_said(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, text = plan(capsys, *LINE, *words)
    assert (code, said in text) == (2, True), text


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "abc", "float64", "bfloat16", "torch.float16", "half", "float32"]
)
def test_the_names_of_a_models_dtype(capsys: pytest.CaptureFixture[str], name: str) -> None:
    import torch
    from swift.utils import HfConfigFactory

    try:
        takes = HfConfigFactory.to_torch_dtype(name) is not torch.float64
    except AttributeError:
        takes = False
    code, text = plan(capsys, *LINE, "--torch_dtype", name)
    assert code == (0 if takes else 2), text
    assert takes or f"--torch_dtype {name}: it takes" in text


def test_both_16_bit_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    flags = {"fp16": True, "bf16": True}
    with pytest.raises(ValueError, match=r"Only one of self\.fp16"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **flags)
    code, text = plan(capsys, *LINE, "--fp16", "true", "--bf16", "true")
    assert (code, "Leave one out" in text) == (2, True)


@pytest.mark.parametrize("words", [("sft",), ("rlhf", "--use_ray", "true", "--config")], ids=str)
def test_arguments_in_a_file_are_said(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, text = plan(capsys, "megatron", *words, "job.yaml")
    assert (code, "job.yaml: arguments in a file" in text) == (2, True), text


@pytest.mark.parametrize(
    ("share", "host"), [((), 16), (("--optimizer_offload_fraction", "0.5"), 8)], ids=str
)
def test_the_offloaded_share(
    capsys: pytest.CaptureFixture[str], share: tuple[str, ...], host: int
) -> None:
    from swift.megatron.arguments import MegatronSftArguments

    assert MegatronSftArguments.optimizer_offload_fraction == 1.0  # in Megatron alone it is 0
    code, found = plan(
        capsys, "NPROC_PER_NODE=1", *LINE[2:], "--optimizer_cpu_offload", "true", *share
    )
    assert code == 0
    (part,) = found["models"][0]["after"][0]["parts"]
    assert sum(one["host"] for one in part["components"].values()) == host * 10**9


def test_fp16_gradients_that_are_not_clipped(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = ("--torch_dtype", "float16", "--use_precision_aware_optimizer", "true")
    line = ("PRECISION_SHIM_FEATURES=-grad-bucket-alignment", *LINE, *narrow)
    assert [plan(capsys, *line, "--clip_grad", clip)[0] for clip in ("1", "0")] == [1, 0]


def test_the_layers_of_the_first_and_the_last_stage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))

    def planned(*words: str) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as end:
            main(["plan", "--model", str(tmp_path), "--json", "--", *LINE, *words])
        return int(str(end.value)), json.loads(capsys.readouterr().out)

    def stages(found: Any) -> list[int]:
        (model,) = found["models"]
        return [stage["parts"][0]["parameters"] for stage in model["before"]]

    halves = ("--pipeline_model_parallel_size", "2")
    first = ("--decoder_first_pipeline_num_layers", "4")
    (_, even), (code, uneven) = planned(*halves), planned(*halves, *first)
    assert code == 0
    layer = (stages(even)[0] - stages(uneven)[0]) // 10  # 14 layers on each of two stages, then 4
    assert stages(uneven)[1] - stages(even)[1] == 10 * layer > 0
    code, found = planned("--pipeline_model_parallel_size", "0")
    assert [one["key"] for one in found["problems"]] == ["--pipeline_model_parallel_size"]


@pytest.mark.parametrize("memory", ["3.4", "2.6"])
def test_ms_swift_takes_the_lines_that_a_search_finds(
    capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    options = ["--parameters", "500M", "--transformer-engine", "2.11.0"]
    with pytest.raises(SystemExit):
        main(["plan", *options, "--search", "--gpu-memory", memory, "--", *LINE])
    lines = capsys.readouterr().out.splitlines()
    found = [one.strip() for one in lines if one.startswith("    --")]
    assert found, lines
    code, _ = plan(capsys, *LINE, *found)
    assert code == 0


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("grpo",), True),
        (("grpo", "--vllm_mode", "colocate"), False),
        (("grpo", "--vllm_mode", "server"), False),
        (("gkd",), True),
        (("gkd", "--lmbda", "0"), False),
        (("gkd", "--use_vllm", "false"), False),
        (("dpo",), False),
    ],
)
def test_a_job_without_the_mode_of_its_rollout(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], refused: bool
) -> None:
    """``test_pages.py`` shows what ms-swift's trainer does without the mode."""
    line = ("PRECISION_SHIM=1", "NPROC_PER_NODE=8", "megatron", "rlhf", "--model", "none")
    code, found = plan(capsys, *line, "--rlhf_type", *words)
    assert code == int(refused), found
    assert [one["key"] for one in found["problems"]] == ["--vllm_mode"] * refused


def test_a_parameter_gather_that_needs_virtual_stages(
    capsys: pytest.CaptureFixture[str], on_cpu: Any
) -> None:
    name = "overlap_param_gather_with_optimizer_step"
    code, found = plan(capsys, *LINE, f"--{name}", "true")
    assert (code, [one["key"] for one in found["problems"]]) == (1, [f"--{name}"])
    with pytest.raises(IndexError):
        cpu.trainer(on_cpu, cpu.arguments(**{name: True}))
    stages = ("--pipeline_model_parallel_size", "2", "--virtual_pipeline_model_parallel_size", "2")
    assert plan(capsys, *LINE, f"--{name}", "true", *stages)[0] == 0


def test_options_that_are_not_read_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--freeze_parameters_ratio", "0.5", "--megatron_extra_kwargs", '{"num_layers": 2}')
    code, found = plan(
        capsys, *LINE, *words, "--fp8_format", "hybrid", "--fp8_param_gather", "true"
    )
    said = " ".join(found["models"][0]["notes"])
    names = ("freeze_parameters_ratio: frozen", "megatron_extra_kwargs", "fp8_param_gather")
    assert (code, [name for name in names if f"--{name}" not in said]) == (0, [])
    code, found = plan(capsys, *LINE, *words, "--pipeline_model_parallel_size", "2")
    assert (code, found["problems"][0]["key"]) == (1, "--freeze_parameters_ratio")
    from swift.megatron.arguments import megatron_args

    given = SimpleNamespace(freeze_parameters_ratio=0.5, pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="freeze_parameters_ratio"):
        megatron_args.MegatronTunerMixin.__post_init__(given)
