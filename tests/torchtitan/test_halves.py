"""The audit of the weights that torchtitan's trainer sends and of its generators' weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precision_shim.auditing import halves
from precision_shim.cli import main

from . import cpu
from .test_both_sides import GENERATOR, TRAINER, control, parse, spawned, stand_in_for_vllm
from .test_pages import importable  # noqa: F401

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch, torchtitan: None) -> dict[str, Any]:
    """The weights that reach the store; the store's client, which needs Monarch, is replaced."""
    import torchstore.api

    found: dict[str, Any] = {}

    async def client(store_name: str) -> None:
        pass

    async def put_state_dict(store: Any, state_dict: Any, key: str, **options: Any) -> None:
        found.update(state_dict)

    monkeypatch.setattr(torchstore.api, "client", client)
    monkeypatch.setattr(torchstore.state_dict_utils, "put_state_dict", put_state_dict)
    return found


@pytest.mark.parametrize("generator", DTYPES)
def test_what_the_trainer_sends(
    policy: Any,
    shim: Any,
    pushed: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    generator: str,
) -> None:
    folder = tmp_path / "audit"
    shim(settings={"audit_dir": str(folder)})
    made = policy("float16", generator_dtype=DTYPES[generator])
    push(made)
    (half,) = [one for _, one in halves.read(str(folder))]
    assert isinstance(half, halves.Sent)
    assert (half.asked, half.key, half.subject) == (
        DTYPES[generator],
        "generator.model_dtype",
        "policy",
    )
    sent, own = half.sent["weights"], half.own["weights"]
    assert generator in sent.dtypes
    assert sum(sent.dtypes.values()) == sum(one.numel() for one in pushed.values())
    assert own.dtypes.keys() == {"fp32"}
    assert sent.exact is not None
    assert own.exact is not None
    assert (sent.exact > 0.99) == (generator == "bf16")
    assert own.exact < 0.5
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(folder)])
    said = capsys.readouterr().out
    assert "held: not known: " in said
    assert ("contradiction, rank 0: rollout-dtype: " in said) == (generator == "bf16")
    assert said.count("contradiction") == (generator == "bf16")
    assert ended.value.code == int(generator == "bf16")


def test_off_nothing_is_written(
    policy: Any, shim: Any, pushed: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "audit"
    shim(features="-audit", settings={"audit_dir": str(folder)})
    push(policy("float16", generator_dtype="float16"))
    assert pushed
    assert not folder.exists()


def push(trainer: Any) -> None:
    """Let a trainer send its weights."""
    import torchstore
    from torchtitan.experiments.rl.actors import trainer as module

    async def put(state_dict: Any, key: str, direct_rdma: bool) -> None:
        # The release of torchstore on PyPI does not have direct_rdma yet.
        await torchstore.put_state_dict(state_dict, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ts", SimpleNamespace(put_state_dict=put))
        cpu.endpoint(trainer, "push_model_state_dict")


class Engine:
    """Has the attributes of vLLM's ``LLMEngine`` that a generator and the shim use."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 8).half()
        worker = SimpleNamespace(get_model=lambda: SimpleNamespace(model=self.model))
        self.model_executor = SimpleNamespace(driver_worker=worker)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="a model", dtype=torch.float16, quantization=None),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0),
        )
        self.asked = 0

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = ()) -> Any:
        assert method == "apply_model"
        self.asked += 1
        return [function(self.model) for function in args]

    def reset_prefix_cache(self, **given: Any) -> None: ...


@pytest.mark.parametrize("features", [None, "-audit"])
def test_a_generator_is_asked_when_it_is_made_and_after_weight_syncs(
    shim: Any,
    torchtitan: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    features: str | None,
) -> None:
    """Runs torchtitan's own ``VLLMGenerator`` with a stand-in for its engine."""
    from torchtitan.experiments.rl.actors import generator as generators

    async def arrived(*given: Any, **named: Any) -> None:
        pass

    monkeypatch.chdir(tmp_path)
    folder, engine = tmp_path / "audit", Engine()
    shim(features=features, settings={"audit_dir": str(folder)})
    controller = control(parse(f"{TRAINER}=fp16", f"{GENERATOR}=fp16"))
    kind, given, more = spawned(controller, monkeypatch)["generator"]
    stand_in_for_vllm(monkeypatch, lambda **named: named)
    monkeypatch.setattr(
        generators, "LLMEngine", SimpleNamespace(from_engine_args=lambda arguments: engine)
    )
    monkeypatch.setattr(generators.ts, "get_state_dict", arrived)
    monkeypatch.setattr(kind, "_get_spmd_state_dict", arrived)
    made = kind(*given, **more)
    assert made.policy_version == 0
    syncs = []
    for version in range(4):
        if version:
            asyncio.run(made._pull_model_state_dict(version))
        if features is None:
            ((_, held),) = halves.read(str(folder))
            assert isinstance(held, halves.Held)
            syncs.append(held.sync)
    assert made.policy_version == 3
    if features is not None:
        assert engine.asked == 0
        assert not folder.exists()
        return
    assert syncs == [0, 1, 2, 2]
    assert (held.framework, held.subject, held.computes) == ("torchtitan", "rollout", "fp16")
    assert held.name.endswith(", rank 0")
    assert held.kinds == {"other": {"fp16": 8 * 8 + 8}}
