"""A third party's adapter determines how its jobs are audited, planned and resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import precision_shim
from precision_shim.errors import AuditError, SeamError
from precision_shim.process import registry as _registry
from precision_shim_tools.cli import main

from ..unit.checkpoints.written import distributed

ADAPTER = """
import tinyfsdp_shim
from precision_shim.adapting import Checkpoints
from precision_shim.auditing.reading import Reading
from precision_shim_tools.checkpoint.layout import Outcome
from precision_shim_tools.plan.request import Request
from precision_shim_tools.plan.shapes import Model, Weight
from precision_shim_tools.plan.torch_optimizer import ShardedModel


def resume(part, here):
    return Outcome("exact", f"{part.subject}: thirdfsdp reads every dtype")


def plan_job(job):
    model = Model((Weight("weight", (4, 4)),))
    asked = ShardedModel("learner", model, 2, "fp32")
    return Request("thirdfsdp", "1.0", 2, (asked,), notes=("by thirdfsdp's own plan",))


def read_optimizers(chunks, optimizers):
    return [Reading("thirdfsdp", "model", type(one).__name__) for one in optimizers]


def take(unit, part):
    for one in unit.tensors.values():
        part.add("params", one)


ADAPTER = tinyfsdp_shim.ADAPTER.replace(
    framework="thirdfsdp",
    distribution="thirdfsdp",
    packages=("thirdfsdp",),
    plan="thirdfsdp_shim:plan_job",
    checkpoints=Checkpoints(
        steps=r"round-(\\d+)", models=("learner",), resuming={"dcp": "thirdfsdp_shim:resume"}
    ),
    audit_readers={"thirdfsdp": "thirdfsdp_shim:read_optimizers"},
    checkpoint_readers={"dcp": "thirdfsdp_shim:take"},
)
"""
TRAIN = '''
class Stepper:
    """An optimizer that is none of torch's."""
'''


@pytest.fixture(autouse=True)
def thirdfsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A framework whose adapter is found by its entry point."""
    site = tmp_path / "site"
    files = {
        "thirdfsdp/__init__.py": "",
        "thirdfsdp/train.py": TRAIN,
        "thirdfsdp_shim.py": ADAPTER,
        "thirdfsdp-1.0.dist-info/METADATA": "Metadata-Version: 2.1\n"
        "Name: thirdfsdp\nVersion: 1.0\n",
        "thirdfsdp-1.0.dist-info/entry_points.txt": "[precision_shim.adapters]\n"
        "thirdfsdp = thirdfsdp_shim:ADAPTER\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ("thirdfsdp", "thirdfsdp_shim"):
            del sys.modules[name]


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_its_checkpoint_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    distributed(run / "round-9/learner")
    distributed(run / "round-10/learner")
    assert command("checkpoint", str(run), "--json") == 0
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert (part["framework"], part["subject"]) == ("thirdfsdp", "learner")
    assert part["path"].endswith("round-10/learner")
    assert set(part["components"]) == {"params"}  # the adapter's own reader sorts the tensors
    assert "thirdfsdp reads every dtype" in json.dumps(part)


def test_its_job_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", "python", "-m", "thirdfsdp.train") == 0
    told = capsys.readouterr().out
    assert "by thirdfsdp's own plan" in told
    assert "learner" in told


def test_its_optimizer_is_audited() -> None:
    from thirdfsdp.train import Stepper  # type: ignore[import-not-found]

    (part,) = precision_shim.audit(torch.nn.Linear(2, 2), Stepper()).parts
    assert part.optimizer == "Stepper"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("seams=None", "cannot be read"),
        ("checkpoints={'steps': r'step-(\\d+)'}", "a dict, allowed: precision_shim.adapting"),
        ("checkpoints=Checkpoints(r'step_[0-9]+')", "has 0 groups, allowed: one"),
        ("checkpoints=Checkpoints(r'step_(')", "is no regular expression"),
        ("checkpoints=Checkpoints(r'step_(.)', models='learner')", "allowed: a tuple of names"),
    ],
)
def test_a_wrong_adapter_spoils_no_others_command(
    wrong: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "site/thirdfsdp_shim.py").open("a") as file:
        file.write(f"ADAPTER = ADAPTER.replace({wrong})\n")
    with pytest.raises(SeamError, match=r"thirdfsdp: .*Correct the adapter") as error:
        _registry.load(_registry.entries()["thirdfsdp"])
    assert told in str(error.value)
    distributed(tmp_path / "run/global_step_5/actor")
    command("checkpoint", str(tmp_path / "run"), "--json")
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert part["framework"] == "verl"
    with pytest.raises(AuditError):
        precision_shim.audit(torch.nn.Linear(2, 2), object())
