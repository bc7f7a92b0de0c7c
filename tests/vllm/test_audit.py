"""The audit of the weights that are loaded into a real engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import sending
from precision_shim.cli import main
from precision_shim.errors import PrecisionShimWarning

from .engines import share_on_bf16s_grid
from .test_weights import running, send, trained  # noqa: F401

HALF, BF16 = torch.float16, torch.bfloat16


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    precision_shim.install(settings={"audit_dir": str(tmp_path)}, export=False)
    yield tmp_path
    precision_shim.uninstall()


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
    """A wrapped stream sends the weights, and the engine holds what the audit saw."""

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
    shares = share_on_bf16s_grid(dict(runner.model.named_parameters()))
    assert (shares == 1.0) is (wire != "right")
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(folder)])
    said = capsys.readouterr().out
    code = {"right": None, "over bf16": "bf16-wire", "in bf16": "weights-dtype"}[wire]
    expected = {code if asked == "float16" else None} - {None}
    assert set(re.findall(r"contradiction, .*: ([a-z0-9-]+):", said)) == expected
    assert ended.value.code == int(bool(expected))
