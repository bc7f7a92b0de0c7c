"""The audit of the weights that NeMo-RL's DTensor workers send, with NeMo-RL's own sender.

NeMo-RL sends CUDA handles of the weights over ZeroMQ; the test replaces both handles and socket.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from precision_shim.auditing import sent_weights

from ..processes.commands import command
from .support import NEMO_RL, batch, loss_for

pytestmark = pytest.mark.slow

GENERATION = {"backend": "vllm", "temperature": 1.0, "vllm_cfg": {"precision": "float16"}}


class Wire:
    """Stands in for the receiver's socket: stores the received names, and always answers."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def send_pyobj(self, payload: Any) -> None:
        if isinstance(payload, tuple):
            self.names += payload[1]

    def recv(self) -> None:
        pass


def send(made: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Let a worker send its weights; returns their names."""
    from nemo_rl.models.policy import utils

    patch.setattr(utils, "get_handle_from_tensor", lambda tensor: tensor)
    stream = SimpleNamespace(synchronize=lambda: None)
    patch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    made.zmq_socket = wire = Wire()
    made.stream_weights_via_ipc_zmq(buffer_size_bytes=2**22)
    return wire.names


@pytest.mark.parametrize(("kind", "dtype"), [("v1", "float16"), ("v2", "bfloat16")])
def test_what_a_worker_sends(
    worker: Any, shim: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, dtype: str
) -> None:
    """The audit compares sent and own weights, of an fp16 and of a bf16 policy (rollout: fp16)."""
    shim(settings={"audit_dir": str(tmp_path)})
    with worker(kind, dtype) as made:
        made.cfg["generation"] = GENERATION  # Keys of a driver's config.
        made.train(batch(), loss_for(kind), gbs=4, mbs=2)  # Changes the weights.
        names = send(made, monkeypatch)
    (half,) = [one for _, one in sent_weights.read(str(tmp_path))]
    assert isinstance(half, sent_weights.Sent)
    assert len(names) > 10
    sent, own = half.sent["weights"], half.own["weights"]
    assert (half.asked, half.key) == ("float16", "policy.generation.vllm_cfg.precision")
    assert half.subject == "policy"
    # On one rank the second worker of NeMo-RL 0.5 and newer wraps no FSDP2: it computes under
    # autocast, which the record cannot know.
    known = kind != "v2" or Version("0.5") > NEMO_RL
    assert half.computes == {"float16": "fp16", "bfloat16": "bf16"}[dtype] * known
    assert sent.dtypes.keys() == {"fp16" if dtype == "float16" else "bf16"}
    assert own.dtypes.keys() == {"fp32"}
    assert sum(sent.dtypes.values()) >= sum(own.dtypes.values())
    assert sent.exact is (dtype == "bfloat16")
    code, said, _ = command("audit", tmp_path)
    assert ("contradiction, rank 0: weights-dtype: " in said) == (dtype == "bfloat16")
    assert (code == 1) == (dtype == "bfloat16")


def test_off_nothing_is_written_of_the_weights(
    worker: Any, shim: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shim(features="-audit", settings={"audit_dir": str(tmp_path)})
    with worker("v2", "float16") as made:
        assert send(made, monkeypatch)
    assert list(tmp_path.iterdir()) == []
