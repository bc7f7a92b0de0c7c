"""fp16 on Megatron: jobs that are resumed, mixtures of experts, and overflows of a single rank.

Megatron itself saves its scaler. The tests check that resumes stay exact with the shim, in every
sharding type, with trackers that differ from their start values.
"""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim

from ..every_framework.checkpoint_doctor import verdict
from ..processes.kill_points import kill_points
from ..processes.rank_server import Ranks
from ..stand_ins.optimizer_states import loss_of_step
from .conftest import VERL
from .support import optim_config
from .test_checkpoints import SHARDINGS, Job, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.oldest,
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
]

SCALER = {"initial_loss_scale": 2.0**14, "loss_scale_window": 4, "hysteresis": 3}
"""The scale grows after four good steps, and falls after three overflows, in a row or not."""


class Fp16Job(Job):
    """A model and optimizer that verl builds for fp16; steps are like those of verl's engine."""

    OVERFLOWS = (2, 8)
    """The steps whose scaled loss overflows."""

    def train(self, steps: int, first: int = 0) -> list[float]:
        """Train with a scaled loss, as Megatron's schedule does; returns losses and grad norms."""
        from megatron.core.distributed import finalize_model_grads

        from precision_shim_adapters.megatron import skipping

        found = []
        for step in range(first, first + steps):
            loss = loss_of_step(self.chunks, self.optimizer, step)
            weight = 2.0**60 if step in self.OVERFLOWS else 1.0
            self.optimizer.scale_loss(loss * weight).backward()
            finalize_model_grads(self.chunks)
            self.before_step(step)
            with skipping(succeeds=True):
                _, norm, _ = self.optimizer.step()
            found += [float(loss), norm if math.isfinite(norm) else "skipped"]
        return found

    def before_step(self, step: int) -> None:
        """A hook for tests with another kind of overflow."""

    def scalers(self) -> list[tuple[float, int, int]]:
        """Scale, growth tracker and hysteresis tracker of each chained optimizer."""
        return [
            (float(state["scale"]), state["growth_tracker"], state["hysteresis_tracker"])
            for state in (one.grad_scaler.state_dict() for one in self.optimizer.chained_optimizers)
        ]


def fp16_job(kind: type[Fp16Job] = Fp16Job, seed: int = 0, **model: Any) -> Any:
    """Build a job by verl's functions, with the scaler's fields as a user writes them."""
    from omegaconf import OmegaConf
    from verl.utils.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config
    from verl.utils.megatron_utils import get_model

    from precision_shim_tools.testing.megatron_cpu import tiny_gpt

    torch.manual_seed(seed)
    provider = tiny_gpt(torch.float16, num_layers=1, **model)
    chunks = get_model(provider, transformer_config=provider.config)
    fields = {"optimizer": "adam", "lr": 1e-2, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.0}
    config = OmegaConf.create({**fields, "override_optimizer_config": SCALER})
    made = init_megatron_optim_config(config, fp16=True)
    return kind(chunks, get_megatron_optimizer(chunks, made))


@pytest.mark.parametrize(
    ("sharding", "stop"), [*((one, 4) for one in SHARDINGS), ("dp_reshardable", 9)]
)
def test_resume_is_exact(
    fused_adam: str, shim: Any, tmp_path: Path, sharding: str, stop: int
) -> None:
    """Losses, norms, states, scale and trackers equal an uninterrupted job's, bit for bit."""
    shim()
    straight = fp16_job()
    expected = straight.train(14)
    assert expected.count("skipped") == 2

    first = fp16_job()
    begun = first.train(stop)
    saved = first.scalers()
    ((scale, growth, hysteresis),) = saved
    # Both trackers differ from a fresh scaler's.
    assert (scale, growth, hysteresis) == {4: (2.0**14, 1, 2), 9: (2.0**15, 0, 2)}[stop]
    first.save(tmp_path / "saved", sharding)
    assert verdict(tmp_path / "saved", "verl") == "exact"

    second = fp16_job(seed=1)
    second.load(tmp_path / "saved", sharding)
    assert second.scalers() == saved
    assert begun + second.train(14 - stop, first=stop) == expected
    assert second.scalers() == straight.scalers()
    assert same(second.states(), straight.states())


@pytest.mark.parametrize(
    ("sharding", "on_first"), [*((one, True) for one in SHARDINGS), ("fully_reshardable", False)]
)
def test_switched_in_between(
    fused_adam: str, shim: Any, tmp_path: Path, sharding: str, on_first: bool
) -> None:
    """The checkpoint's scaler is Megatron's own, so the shim may be on or off at the resume."""

    def switch(on: bool) -> None:
        precision_shim.uninstall()
        if on:
            shim()

    first, steps = (0, 4) if on_first else (3, 7)  # the second step overflows
    switch(on_first)
    one = fp16_job()
    one.train(steps - first, first=first)
    one.save(tmp_path / "saved", sharding)
    switch(not on_first)
    other = fp16_job(seed=1)
    told = verdict(tmp_path / "saved", "verl")
    if on_first and sharding == "dp_reshardable" and Version(version("megatron-core")).minor < 18:
        # Megatron's own fault: 0.16 cannot load a precision-aware optimizer in this sharding type.
        with pytest.raises(AttributeError, match="'bool'"):
            other.load(tmp_path / "saved", sharding)
        assert told == "fails"
        return
    assert told == "exact"
    other.load(tmp_path / "saved", sharding)
    assert other.scalers() == one.scalers() == [(2.0**14, 1, 2) if on_first else (2.0**15, 0, 3)]
    assert other.train(1, first=steps) == one.train(1, first=steps)
    assert same(other.states(), one.states())


@pytest.mark.parametrize("sharding", SHARDINGS[:2])
def test_saved_before_any_step_was_taken(
    fused_adam: str, shim: Any, tmp_path: Path, sharding: str
) -> None:
    """If all steps were skipped, Megatron has no states to save, but the job can resume."""
    shim()
    first = fp16_job(Overflowing)
    assert first.train(2)[1::2] == ["skipped"] * 2
    first.save(tmp_path / "saved", sharding)
    second = fp16_job(Overflowing, seed=1)
    second.load(tmp_path / "saved", sharding)
    assert second.scalers() == first.scalers() == [(2.0**14, 0, 1)]
    expected = first.train(4, first=2)
    assert "skipped" not in expected
    assert second.train(4, first=2) == expected
    assert same(second.states(), first.states())


@pytest.mark.parametrize(
    ("sharding", "over"), [("fully_reshardable", True), ("dp_reshardable", False)]
)
def test_killed_at_any_file_operation_of_a_save(
    fused_adam: str, shim: Any, tmp_path: Path, sharding: str, over: bool
) -> None:
    """The scaler is in Megatron's own files: after a kill the load is old, new, or an error.

    Over an old directory, Megatron allows one mixed state: ``common.pt``, which has the scaler and
    the step counts, is new, while the file of the tensors is old.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

    shim()
    place = tmp_path / "saved"
    place.mkdir()
    first = fp16_job()
    first.train(4)
    states = {}

    def state(one: Any) -> tuple[Any, ...]:
        return one.scalers(), {
            name: [tensor.tolist() for tensor in tensors] for name, tensors in one.states().items()
        }

    if over:
        first.save(place, sharding)
        states["old"] = state(first)
    first.train(2, first=4)
    states["new"] = state(first)
    with kill_points(place, tmp_path / "copies") as points:
        first.save(place, sharding)
    second = fp16_job(seed=1)
    outcomes, mixed = [], []
    for point in points:
        second.train(1)
        try:
            second.load(point, sharding)
        except (Exception, CheckpointException):
            outcomes.append("refused")
            continue
        found = state(second)
        names = [name for name, one in states.items() if one == found]
        outcomes.append(names[0] if names else "mixed")
        if not names:
            mixed.append(point)
    assert outcomes[-1] == "new"
    assert "refused" in outcomes
    assert over or set(outcomes) == {"refused", "new"}
    for point in mixed:
        assert (point / "common.pt").read_bytes() == (place / "common.pt").read_bytes()
        for file in points[0].glob("*.distcp"):
            assert (point / file.name).read_bytes() == file.read_bytes()


class Overflowing(Fp16Job):
    OVERFLOWS = (0, 1)


@pytest.mark.skipif(Version("0.8") > VERL, reason="0.7's engine saves through the same functions")
def test_through_the_engine(
    fused_adam: str, checkpoint: Path, tmp_path: Path, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's worker saves and loads in the middle of a run of overflows."""
    from .megatron_fp16_support import Training

    def build() -> Training:
        torch.manual_seed(0)
        return Training(
            checkpoint,
            monkeypatch,
            optim=optim_config(
                use_checkpoint_opt_param_scheduler=True,
                override_optimizer_config={
                    "initial_loss_scale": 2.0**22,
                    "hysteresis": 2,
                    "loss_scale_window": 4,
                },
            ),
            dist_ckpt_optim_fully_reshardable=True,
        )

    def run(one: Training, steps: range) -> list[Any]:
        metrics = [one.train(seed=step) for step in steps]
        return [(m["loss"], str(m["grad_norm"]), m["lr"], m["loss_scale"]) for m in metrics]

    shim()
    straight = build()
    expected = run(straight, range(9))
    norms = [norm for _, norm, _, _ in expected]
    assert norms[3] == "nan"
    assert norms[-1] != "nan"
    first = build()
    begun = run(first, range(3))
    first.engine.save_checkpoint(str(tmp_path / "saved"), global_step=3)
    second = build()
    with torch.no_grad():  # these checkpoints do not contain the model's weights
        for mine, theirs in zip(
            second.engine.module[0].parameters(), first.engine.module[0].parameters(), strict=True
        ):
            mine.copy_(theirs)
    second.engine.load_checkpoint(str(tmp_path / "saved"), del_local_after_load=False)
    assert second.scaler.state_dict() == first.scaler.state_dict()
    assert begun + run(second, range(3, 9)) == expected
    assert torch.equal(second.parameters(), straight.parameters())
    assert second.scaler.state_dict() == straight.scaler.state_dict()


def test_two_ranks(megatron_ranks: Ranks) -> None:
    """Experts use the dense optimizer's scale, and both ranks skip an overflow of one rank."""
    assert megatron_ranks("overflows") == [None, None]
