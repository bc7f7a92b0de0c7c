"""PRECISION_SHIM_HEAD=fp32 in verl: keys in the driver, LM heads in real engines and workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.nn import functional

import precision_shim
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim_adapters.megatron.training.lm_head import compute_in_fp32
from precision_shim_adapters.verl.config import of_section
from precision_shim_adapters.verl.rollout import lm_head

from ..every_framework.both_sides import of_plan
from ..processes.rank_server import Ranks
from ..stand_ins.planted_engines import plant
from .conftest import VERL
from .megatron_fp16_support import Training
from .test_both_sides import LEGACY, LINE, start

pytestmark = [
    pytest.mark.skipif(Version("0.7") > VERL, reason="the shim refuses verl 0.6"),
    pytest.mark.slow,
]

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
KEYS = {
    "vllm": f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.head_dtype",
    "sglang": f"{ROLLOUT}.engine_kwargs.sglang.enable_fp32_lm_head",
}
GRANTED = "fp32 in trainer and rollout"
FP32, FP16 = "torch.float32", "torch.float16"


@pytest.fixture(autouse=True)
def off() -> Any:
    yield
    precision_shim.uninstall()


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, monkeypatch)


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = None if config is None else config.get(name)
    return config


def planned(words: list[str]) -> tuple[list[str], list[str]]:
    """The plan's messages about LM heads, and its notes about them."""
    return of_plan(["PRECISION_SHIM_HEAD=fp32", *LINE, *words], "lm-head", "LM head: ")


# -- the driver ----------------------------------------------------------------------------------


@pytest.mark.oldest
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(("strategy", "backend"), [("fsdp", "vllm"), ("megatron", "sglang")])
def test_the_driver_writes_all_keys(strategy: str, backend: str) -> None:
    words = [f"{ROLLOUT}.name={backend}", f"+{MODEL}.override_config.attn_implementation=eager"]
    name = "ppo_trainer" if strategy == "fsdp" else "ppo_megatron_trainer"
    made = start(words, name=name, settings={"head": "fp32"})
    assert made.chosen["LM head"] == GRANTED
    place = f"{MODEL}.override_config"
    nested = LEGACY and strategy == "megatron"  # 0.7.1's Megatron workers read only this part
    assert at(made.made, f"{place}{'.model_config' if nested else ''}.head_dtype") == "float32"
    assert at(made.made, f"{place}.attn_implementation") == "eager"
    assert at(made.made, KEYS[backend]) == {"vllm": "float32", "sglang": True}[backend]
    if strategy == "fsdp":
        problems, notes = planned(words)
        assert not problems
        assert [one.startswith(f"LM head: rollout-agreement: {GRANTED}") for one in notes] == [True]


@pytest.mark.parametrize(
    ("changes", "in_fp32", "refusal"),
    [
        ({"ep_size": 2, "moe_config": {"wrap_outer_model": False}}, True, ""),
        ({"ep_size": 2, "mp_output_dtype": "fp32"}, True, ""),
        ({"ep_size": 2, "mp_output_dtype": "bf16"}, False, "Automodel then rounds the logits"),
        ({"ep_size": 1}, False, "with expert parallelism only"),
    ],
)
def test_automodels_own_head(changes: dict[str, Any], in_fp32: bool, refusal: str) -> None:
    moe = {"lm_head_precision": "float32", **changes.get("moe_config", {})}
    section = {"strategy": "automodel", **changes, "moe_config": moe}
    found = lm_head._by_engine(of_section(section, "actor.automodel"))
    assert found is not None
    assert found.key == "actor.automodel.moe_config.lm_head_precision"
    assert (found.in_fp32, found.idle) == (True, not in_fp32)
    assert refusal in found.refusal
    assert lm_head._by_engine(of_section({**section, "moe_config": {}}, "actor.automodel")) is None
    fields = {"strategy": "megatron", "override_transformer_config": {"logit_dtype": "fp32"}}
    assert lm_head._by_engine(of_section(fields)) is None  # no megatron-core of this list has it


@pytest.mark.usefixtures("engines")
def test_the_users_overrides_of_the_rollout_stay() -> None:
    words = [f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides={{rope_theta: 5}}"]
    made = start(words, settings={"head": "fp32"})
    found = at(made.made, KEYS["vllm"].rpartition(".")[0])
    assert dict(found) == {"rope_theta": 5, "head_dtype": "float32"}


REFUSED = {
    "a fused product": ([f"{MODEL}.use_fused_kernels=true"], "use_fused_kernels"),
    "the user's dtype of the rollout": (
        [f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.head_dtype=model"],
        "hf_overrides.head_dtype=model",
    ),
    "the user's dtype of the trainer": (
        [f"+{MODEL}.override_config.head_dtype=bfloat16"],
        "override_config.head_dtype=bfloat16",
    ),
    "an adapter of the head": ([f"{MODEL}.target_modules=[lm_head]"], "has the LM head"),
    "an adapter of the head on Megatron": (
        [f"++{MODEL}.lora.target_modules=[output_layer]"],
        "has the LM head",
    ),
    "quantised": (["++actor_rollout_ref.rollout.quantization=fp8"], "quantization"),
    "quantised in training": (["++actor_rollout_ref.rollout.qat={enable: true}"], "rollout.qat"),
    "a fused product of the actor": (
        ["++actor_rollout_ref.actor.use_fused_kernels=true"],
        "actor.use_fused_kernels",
    ),
    "SGLang's LoRA adapter": (
        [f"{ROLLOUT}.name=sglang", f"++{MODEL}.lora_rank=8"],
        "SGLang puts a LoRA adapter on its LM head",
    ),
}


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_changes_no_key(case: str) -> None:
    words, said = REFUSED[case]
    made = start(words, settings={"head": "fp32"})
    (told,) = [one for one in made.told if "PRECISION_SHIM_HEAD" in one]
    assert said in told
    assert at(made.made, f"{MODEL}.override_config.head_dtype") != "float32"
    assert at(made.made, KEYS["vllm"]) != "float32"


@pytest.mark.usefixtures("engines")
def test_plan_and_strict_mode_refuse_alike() -> None:
    words = [f"{ROLLOUT}.name=vllm", *REFUSED["the user's dtype of the rollout"][0]]
    (told,) = start(words, settings={"head": "fp32"}).told
    assert planned(words)[0] == [told]
    precision_shim.uninstall()
    with pytest.raises(UnsupportedPrecisionError, match="PRECISION_SHIM_HEAD=fp32 is refused"):
        start(words, strict=True, settings={"head": "fp32"})


def test_an_engine_that_is_not_installed_here() -> None:
    """The driver refuses; the plan, which may run on another machine, has a note."""
    made = start([], settings={"head": "fp32"})
    assert made.chosen["LM head"] == "each engine's own dtype"
    assert at(made.made, KEYS["vllm"]) is None
    problems, notes = planned([f"{ROLLOUT}.name=vllm"])
    assert (problems, ["not known" in one for one in notes]) == ([], [True])


# -- the FSDP engine, two ranks --------------------------------------------------------------------


@pytest.mark.parametrize("role", ["actor", "lora"])
def test_fsdp_trains_and_resumes(fsdp_ranks: Ranks, tmp_path: Path, role: str) -> None:
    for rank in fsdp_ranks("fp32_head", folder=tmp_path, head="fp32", role=role):
        assert {(one["dtype"], one["exact"]) for one in rank["seen"]} == {(FP32, True)}
        assert json.dumps(rank["said"]) == json.dumps(rank["again"])  # NaN as text
        assert rank["straight"] == rank["resumed"]
        # vLLM would read head_dtype in a saved config.
        assert rank["saved"]["config.json"] is False
        assert rank["straight"]["counter"][1] == 2


def test_the_reference_models_head_and_no_critics(fsdp_ranks: Ranks, tmp_path: Path) -> None:
    for role, own in (("ref", True), ("critic", False)):
        for rank in fsdp_ranks("fp32_head", world=1, folder=tmp_path, head="fp32", role=role):
            assert rank["own"] is own, role


@pytest.mark.oldest
@pytest.mark.skipif(not LEGACY, reason="verl 0.8 and later have no legacy workers")
def test_a_legacy_worker(fsdp_ranks: Ranks, tmp_path: Path) -> None:
    for head, expected in (("fp32", (FP32, True)), ("as-configured", (FP16, False))):
        for rank in fsdp_ranks("legacy_fp32_head", world=1, folder=tmp_path, head=head):
            assert {(one["dtype"], one["exact"]) for one in rank["seen"]} == {expected}


# -- the Megatron engine ---------------------------------------------------------------------------


@pytest.fixture
def train(
    fused_adam: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Training, list[tuple[str, bool]]]]:
    """Train verl's real worker on Megatron; returns it with what its LM head computed."""

    def make(head: str, **options: Any) -> tuple[Training, list[tuple[str, bool]]]:
        precision_shim.install(settings={"head": head})
        mark = {"head_dtype": "float32"} if head == "fp32" else {}
        one = Training(checkpoint, monkeypatch, overrides_of_model=mark, **options)
        seen: list[tuple[str, bool]] = []

        def look(layer: Any, given: Any, named: Any, result: Any) -> None:
            weight = named.get("weight")
            weight = layer.weight if weight is None else weight
            product = functional.linear(given[0].float(), weight.float())
            seen.append((str(result[0].dtype), torch.equal(result[0], product)))

        model = one.engine.module[0]
        (layer,) = [part for name, part in model.named_modules() if name.endswith("output_layer")]
        layer.register_forward_hook(look, with_kwargs=True)
        one.train()
        return one, seen

    return make


@pytest.mark.oldest
@pytest.mark.parametrize(("dtype", "bridge"), [("float16", False), ("bfloat16", True)])
def test_megatrons_output_layer(
    train: Callable[..., tuple[Training, list[tuple[str, bool]]]], dtype: str, bridge: bool
) -> None:
    pytest.importorskip("megatron.bridge") if bridge else None
    one, seen = train("fp32", dtype=dtype, bridge=bridge)
    assert set(seen) == {(FP32, True)}
    assert not hasattr(one.engine.model_config.hf_config, "head_dtype")
    main_grads = [p.main_grad for p in one.engine.module[0].parameters() if p.requires_grad]
    assert all(torch.isfinite(grad).all() for grad in main_grads)


def test_megatrons_output_layer_that_cannot_compute_in_fp32_is_refused(
    train: Callable[..., tuple[Training, list[tuple[str, bool]]]],
) -> None:
    one, _ = train("as-configured")
    model = one.engine.module[0]
    (owner,) = [part for part in model.modules() if hasattr(part, "output_layer")]
    owner.output_layer.config.defer_embedding_wgrad_compute = True
    with pytest.raises(UnsupportedPrecisionError, match="Linear with defer_embedding_wgrad"):
        compute_in_fp32([model], "verl", "PRECISION_SHIM_HEAD=fp32")
    owner.output_layer = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedPrecisionError, match="output_layer is a Linear;"):
        compute_in_fp32([model], "verl", "PRECISION_SHIM_HEAD=fp32")
