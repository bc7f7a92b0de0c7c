"""The audit of the weights that torchtitan's trainer sends to its generators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from precision_shim.auditing import sent_weights

from ..processes.commands import command
from . import cpu
from .test_pages import importable  # noqa: F401

DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


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
    policy: Any, shim: Any, pushed: dict[str, Any], tmp_path: Path, generator: str
) -> None:
    folder = tmp_path / "audit"
    shim(settings={"audit_dir": str(folder)})
    made = policy("float16", generator_dtype=DTYPES[generator])
    push(made)
    (half,) = [one for _, one in sent_weights.read(str(folder))]
    assert isinstance(half, sent_weights.Sent)
    assert (half.asked, half.key, half.subject) == (
        DTYPES[generator],
        "generator.model_dtype",
        "policy",
    )
    sent, own = half.sent["weights"], half.own["weights"]
    assert generator in sent.dtypes
    assert sum(sent.dtypes.values()) == sum(one.numel() for one in pushed.values())
    assert own.dtypes.keys() == {"fp32"}
    assert sent.exact is (generator == "bf16")
    assert own.exact is False
    code, said, _ = command("audit", folder)
    assert ("contradiction, rank 0: rollout-dtype: " in said) == (generator == "bf16")
    assert said.count("contradiction") == (generator == "bf16")
    assert code == int(generator == "bf16")


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
