"""On the same generated configs, plan and torchtitan's own trainer come to the same verdict."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

import precision_shim
from precision_shim.precision.dtypes import name_of

from ..plan.remedies import hold as hold_remedies
from ..plan.verdicts import Drawn, Key, Verdict, agree, draw, of_audit, of_plan

pytestmark = pytest.mark.slow

KEYS = (
    Key("training.dtype"),
    Key("training.dtype", ("float32", "bfloat16"), ()),
    Key("training.mixed_precision_param"),
    Key("training.mixed_precision_param", ("float16", "fp16", "half"), ()),
    Key("training.mixed_precision_reduce"),
)
MODULE = """
from tests.torchtitan import cpu


def tiny():
    return cpu.trainer_config({folder!r}, "bfloat16")
"""


def arguments(drawn: Drawn) -> list[str]:
    written = [f"--{key}={value}" for key, value in drawn.written.items()]
    return ["--module", "a_tiny_job", "--config", "tiny", *written]


def on_fsdp(drawn: Drawn) -> Verdict:
    """Build a trainer with torchtitan's own config manager, and take one step on gradients of 1."""
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.trainer import Trainer

    from precision_shim_adapters.torch_fp16 import ScaledTraining

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = ConfigManager().parse_args(arguments(drawn))
    except SystemExit as ended:  # tyro exits if it refuses a word
        raise ValueError(said.getvalue().replace("-", "_")) from ended
    trainer = Trainer(config)
    (model,) = trainer.model_parts
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    trainer.optimizers.step()
    (optimizer,) = trainer.optimizers
    training = ScaledTraining.of(trainer)
    return Verdict(
        computes=name_of(_computes(model)),
        scale=None if training is None else float(training.scaler.get_scale()),
        held=of_audit(precision_shim.audit(model, optimizer).to_dict()),
    )


def _computes(model: object) -> object:
    policy = model._get_fsdp_state()._mp_policy  # type: ignore[attr-defined]
    return policy.param_dtype or next(model.parameters()).dtype  # type: ignore[attr-defined]


def test_each_remedy(torchtitan: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_tiny_job.py").write_text(MODULE.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    words = ("torchrun", "--nproc-per-node=1", "-m", "torchtitan.train")
    drawn = [
        Drawn({"training.dtype": "float16"}),
        Drawn({"training.mixed_precision_param": "fp32"}),
    ]
    hold_remedies(drawn, lambda one: [*words, *arguments(one)])


def test_on_fsdp(torchtitan: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_tiny_job.py").write_text(MODULE.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    words = ("torchrun", "--nproc-per-node=1", "-m", "torchtitan.train")
    agree(draw(KEYS, 2, 20), lambda one: of_plan([*words, *arguments(one)], one), on_fsdp)
