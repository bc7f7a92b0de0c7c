"""PRECISION_SHIM_HEAD=fp32 in SkyRL: keys in the driver, LM heads in real workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.nn import functional

from precision_shim.errors import UnsupportedPrecisionError

from ..every_framework.both_sides import of_plan, watched
from ..stand_ins.planted_engines import plant
from .conftest import SKYRL
from .support import batch, build, fsdp_worker
from .test_both_sides import NO_REF, OVER, line, on_fsdp, on_megatron, told, validated
from .test_both_sides import vllm as vllm  # noqa: PLC0414  a fixture that all tests here use

pytestmark = pytest.mark.slow

ROLLOUT = f"{OVER}.hf_overrides"
GRANTED = "fp32 in trainer and rollout"
HEAD = {"head": "fp32"}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "engines", monkeypatch)


def planned(*words: str) -> tuple[list[str], list[str]]:
    """The plan's problems with LM heads, and its notes about them."""
    return of_plan(line(*words), "lm-head", "LM head: ")


# -- the driver ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(("strategy", "reference"), [("fsdp", False), ("megatron", True)])
def test_the_driver_writes_all_keys(
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: dict[str, Path],
    strategy: str,
    reference: bool,
) -> None:
    words = () if reference else (NO_REF,)
    if strategy == "fsdp":
        words = on_fsdp("bf16", *words)
    else:
        words = on_megatron(checkpoints["bfloat16"], "bf16", *words)
    shim(settings=HEAD, export=False)
    config = validated(*words)
    assert told()["LM head"] == GRANTED
    for role, written in (("policy", True), ("ref", reference)):
        model = getattr(config.trainer, role)
        if strategy == "megatron":
            found = (model.megatron_config.model_config_kwargs or {}).get("model_config")
        else:
            found = model.model_config_kwargs
        assert ((found or {}).get("head_dtype") == "float32") is written, role
    engine = config.generator.inference_engine.engine_init_kwargs
    assert engine["hf_overrides"] == {"head_dtype": "float32"}
    monkeypatch.setenv("PRECISION_SHIM_HEAD", "fp32")
    problems, notes = planned(*words)
    assert (problems, [GRANTED in one for one in notes]) == ([], [True])


@pytest.mark.usefixtures("engines")
def test_the_users_overrides_stay(shim: Any) -> None:
    shim(settings=HEAD, export=False)
    words = on_fsdp("bf16", f"{ROLLOUT}={{rope_parameters: {{rope_theta: 5}}}}", NO_REF)
    words = (*words, "trainer.policy.model_config_kwargs={rope_parameters: {rope_theta: 5}}")
    config = validated(*words)
    found = config.generator.inference_engine.engine_init_kwargs["hf_overrides"]
    assert found == {"rope_parameters": {"rope_theta": 5}, "head_dtype": "float32"}
    found = config.trainer.policy.model_config_kwargs
    assert found == {"rope_parameters": {"rope_theta": 5}, "head_dtype": "float32"}


REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "the user's dtype of the rollout": ("head_dtype=model", (f"{ROLLOUT}={{head_dtype: model}}",)),
    "the user's dtype of the policy": (
        "head_dtype=bfloat16",
        ("trainer.policy.model_config_kwargs={head_dtype: bfloat16}",),
    ),
    "LoRA on the head": (
        "target_modules has the LM head",
        ("trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.target_modules=[lm_head]"),
    ),
    "servers of somebody else": (
        "servers that SkyRL does not start",
        (
            "generator.inference_engine.external_proxy_url=http://a:2",
            "generator.inference_engine.external_server_urls=['http://a:1']",
            "trainer.placement.colocate_all=false",
        ),
    ),
}
"""What the refusal says, and the words of the job."""


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_changes_no_key(shim: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    said, changed = REFUSED[case]
    words = on_fsdp("bf16", NO_REF, *changed)
    shim(settings=HEAD, export=False)
    config, warnings = watched(lambda: validated(*words))
    (refusal,) = [one for one in warnings if "PRECISION_SHIM_HEAD" in one]
    assert said in refusal
    assert config.trainer.policy.model_config_kwargs.get("head_dtype") != "float32"
    engine = config.generator.inference_engine.engine_init_kwargs or {}
    assert (engine.get("hf_overrides") or {}).get("head_dtype") != "float32"
    monkeypatch.setenv("PRECISION_SHIM_HEAD", "fp32")
    if "LoRA" not in case:  # LoRA is not planned
        assert planned(*words)[0] == [refusal]
    shim(settings=HEAD, strict=True, export=False)
    with pytest.raises(UnsupportedPrecisionError, match="PRECISION_SHIM_HEAD=fp32 is refused"):
        validated(*words)


@pytest.mark.usefixtures("engines")
@pytest.mark.skipif(Version("0.3") > SKYRL, reason="SkyRL has fused_lm_head_logprob from 0.3 on")
def test_a_fused_product_is_refused(shim: Any, checkpoints: dict[str, Path]) -> None:
    """SkyRL then takes the weight of Megatron's output layer, and never calls the layer."""
    shim(settings=HEAD, export=False)
    fused = "trainer.fused_lm_head_logprob=true"
    words = on_megatron(checkpoints["bfloat16"], "bf16", NO_REF, fused)
    _, warnings = watched(lambda: validated(*words))
    (refusal,) = [one for one in warnings if "PRECISION_SHIM_HEAD" in one]
    assert "policy: trainer.fused_lm_head_logprob multiplies in the model's dtype" in refusal


# -- workers ---------------------------------------------------------------------------------------


def watch(layer: Any, dtype: torch.dtype) -> list[tuple[str, bool]]:
    """Compare each output of an LM head with a product in fp32 of rounded values."""
    seen: list[tuple[str, bool]] = []
    own = layer.forward

    def forward(hidden: torch.Tensor, weight: Any = None, **named: Any) -> Any:
        found = own(hidden, **({} if weight is None else {"weight": weight}), **named)
        logits = found[0] if isinstance(found, tuple) else found
        used = layer.weight if weight is None else weight
        with torch.autocast("cpu", enabled=False):
            product = functional.linear(hidden.to(dtype).float(), used.to(dtype).float())
        seen.append((str(logits.dtype), torch.equal(logits, product)))
        return found

    layer.forward = forward
    return seen


@pytest.mark.parametrize(
    ("head", "dtype"), [("fp32", "float16"), ("fp32", "bfloat16"), ("as-configured", "bfloat16")]
)
@pytest.mark.usefixtures("cpu")
def test_an_fsdp_workers_head(
    shim: Any, checkpoints: dict[str, Path], head: str, dtype: str
) -> None:
    shim(settings={"head": head}, export=False)
    mark = ["trainer.policy.model_config_kwargs={head_dtype: float32}"] * (head == "fp32")
    worker = fsdp_worker("policy", checkpoints["float32"], dtype, *mark)
    seen = watch(worker.model.model.lm_head, getattr(torch, dtype))
    for step in range(2):
        worker.forward_backward(batch(step))
        worker.optim_step()
    expected = ("torch.float32", True) if head == "fp32" else (f"torch.{dtype}", False)
    assert set(seen) == {expected}


def test_a_megatron_workers_head(shim: Any, fused_adam: str, checkpoints: dict[str, Path]) -> None:
    shim(settings=HEAD, export=False)
    words = on_megatron(checkpoints["bfloat16"], "bf16")
    key = "trainer.policy.megatron_config.model_config_kwargs"
    mark = f"{key}={{model_config: {{head_dtype: float32}}}}"
    worker = build(checkpoints["bfloat16"], *words, mark)
    (layer,) = [
        part
        for name, part in worker.actor_module[0].named_modules()
        if name.endswith("output_layer")
    ]
    seen = watch(layer, torch.bfloat16)
    for step in range(2):
        worker.forward_backward(batch(step))
        worker.optim_step()
    assert set(seen) == {("torch.float32", True)}
