"""The engine's part of the audit: a real engine's answers, and its weights after a sync."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import precision_shim
from precision_shim.auditing import halves, sending
from precision_shim.auditing.contradictions import contradictions
from precision_shim.cli import main
from precision_shim.errors import PrecisionShimWarning
from precision_shim_adapters.rollout.held import Whose, ask

from .test_weights import running, send, trained  # noqa: F401

HALF, BF16 = torch.float16, torch.bfloat16
WHOSE = Whose("verl", "rollout", "replica 0")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    precision_shim.install(settings={"audit_dir": str(tmp_path)}, export=False)
    yield tmp_path
    precision_shim.uninstall()


def test_what_the_engine_answers(both_sides: ModuleType, running: Any, size: Any) -> None:  # noqa: F811
    held = ask(running, WHOSE)
    assert held.not_answered == ""
    assert held.engine.startswith("vllm 0.30.0")
    assert held.computes == "fp16"
    assert held.quantization == ""
    assert held.kv_cache == "auto"
    assert held.kv_held == ("fp16",)
    assert held.head == "fp16"
    model = running.llm_engine.model_executor.driver_worker.worker.get_model()
    counted = {kind: sum(one.values()) for kind, one in held.kinds.items()}
    assert counted.keys() == {"attention", "embedding", "head", "mlp", "norm"}
    assert all(one.keys() == {"fp16"} for one in held.kinds.values())
    assert sum(counted.values()) == sum(one.numel() for one in model.parameters())
    assert counted["embedding"] == counted["head"] == size.vocabulary * size.width
    kinds = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert sorted(held.plain) == sorted(
        f"model.layers.{layer}.{kind}" for layer in range(size.layers) for kind in kinds
    )
    assert held.quantised == ()
    assert halves.Held.of(vars(held) | {"weights": vars(held.weights)}) == held


LEFT_OUT = "model.layers.1.mlp.down_proj"


@pytest.fixture
def in_8_bits(model: Any, tmp_path: Path) -> Path:
    """A checkpoint in compressed-tensors' int8, because vLLM cannot run fp8 on a CPU."""
    weights = {}
    for name, one in model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.endswith("_proj") and layer != LEFT_OUT:
            scale = one.abs().amax(1, keepdim=True) / 127
            weights[name] = (one / scale).round().to(torch.int8)
            weights[f"{name}_scale"] = scale
        else:
            weights[name] = one.half()
    folder = tmp_path / "int8"
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    of_8_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**of_8_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**of_8_bits, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head", LEFT_OUT],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_quantised_engine_names_its_layers(
    both_sides: ModuleType, size: Any, in_8_bits: Path
) -> None:
    with both_sides.engine(in_8_bits, "float16", size.prompt + size.new) as llm:
        held = ask(llm, WHOSE)
    assert held.not_answered == ""
    assert (held.computes, held.quantization) == ("fp16", "compressed-tensors")
    kinds = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    layers = {f"model.layers.{layer}.{kind}" for layer in range(size.layers) for kind in kinds}
    assert set(held.quantised) == layers - {LEFT_OUT}
    assert held.plain == (LEFT_OUT,)
    assert held.ignored == ("lm_head", LEFT_OUT)
    assert held.weights is not None
    assert held.weights.dtypes.keys() == {"fp16"}
    assert not list(contradictions([], [held]))
    (found,) = contradictions([], [dataclasses.replace(held, ignored=("lm_head", "down"))])
    assert found.code == "layers-quantised"
    assert LEFT_OUT in found.message


@pytest.mark.parametrize("asked", ["float16", "bfloat16"])
@pytest.mark.parametrize("wire", ["right", "over bf16", "in bf16"])
def test_a_bf16_wire_is_found_and_a_right_one_is_not(
    running: Any,  # noqa: F811
    trained: Any,  # noqa: F811
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    wire: str,
    asked: str,
) -> None:
    """A wrapped stream sends the weights, and the audit reads the engine's weights."""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in trained.named_parameters():
            sent = one.detach() if wire == "right" else one.detach().to(BF16)
            yield name, sent if wire == "in bf16" else sent.to(HALF)

    sending.tell_asked("verl", asked, "rollout.dtype")
    told: AbstractContextManager[Any] = nullcontext()
    if wire != "right" and asked == "float16":
        told = pytest.warns(PrecisionShimWarning, match="verl actor: ")
    runner = running.llm_engine.model_executor.driver_worker.worker.model_runner
    with told:
        runner.model.load_weights(sending.observe(stream(), "verl", "actor", model=trained))
    sending.write(ask(running, WHOSE, sync=1))
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(folder)])
    said = capsys.readouterr().out
    code = {"right": None, "over bf16": "bf16-wire", "in bf16": "weights-dtype"}[wire]
    expected = {code, None if asked == "float16" else "engine-dtype"} - {None}
    assert set(re.findall(r"contradiction, .*: ([a-z0-9-]+):", said)) == expected
    assert ended.value.code == int(bool(expected))
    assert "held, replica 0: rollout, vllm 0.30.0" in said
    assert "KV cache fp16 (auto)" in said
