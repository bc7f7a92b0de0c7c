"""fp16 in verl's real Megatron engine and worker: overflows, verl's metrics, settings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import LossScaleError, PrecisionShimWarning, SettingsError

from .conftest import VERL
from .megatron_fp16_support import CRITIC_RUNS, Training
from .support import optim_config

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6's engine: covered whole by test_untested_version"
)

HUGE = 2.0**40
"""A loss scale at which every gradient of these models overflows fp16."""

SUBJECTS = [
    "actor",
    pytest.param(
        "critic",
        marks=pytest.mark.skipif(
            not CRITIC_RUNS, reason="verl 0.7's engine: its critic's forward is a TypeError"
        ),
    ),
]


@pytest.fixture
def build(
    fused_adam: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Training]:
    """Builds verl's training worker with a real engine."""

    def make(subject: str = "actor", **options: Any) -> Training:
        return Training(checkpoint, monkeypatch, critic=subject == "critic", **options)

    return make


def reasons() -> str:
    """The shim's decisions on fp16-scaling, as one text."""
    return "\n".join(
        str(one) for one in precision_shim.status().decisions if one.feature == "fp16-scaling"
    )


# -- an overflow -------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", SUBJECTS)
def test_an_overflow_is_a_skipped_step(build: Any, shim: Any, subject: str) -> None:
    """An overflowing step is skipped and reported; training continues at a lower scale."""
    shim()
    one = build(subject, overrides={"initial_loss_scale": 2.0**22, "hysteresis": 1})
    start, rates, scale = one.parameters(), [], 2.0**22
    for step in range(1, 20):
        metrics = one.train()
        rates.append(metrics["lr"])
        assert metrics["loss_scale"] == scale
        assert 0.0 < metrics["loss"] < 100.0
        assert isinstance(metrics["grad_norm"], float)
        if math.isfinite(metrics["grad_norm"]):
            break
        assert metrics["skipped_steps"] == step
        assert torch.equal(one.parameters(), start)
        scale /= 2
        assert one.scale == scale
    assert 2 < step < 20
    assert metrics["skipped_steps"] == step - 1
    assert not torch.equal(one.parameters(), start)
    # verl's scheduler advances at each step, even at a skipped one.
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates[:10])) == len(rates[:10])
    assert f"verl {subject}: fp16-scaling: Megatron's dynamic loss scaler" in reasons()


def test_by_itself(build: Any, shim: Any) -> None:
    """The feature fp16-scaling works without the other features."""
    shim(features=["fp16-scaling"])
    one = build()
    one.scaler.load_state_dict(
        {"scale": torch.tensor([HUGE]), "growth_tracker": 0, "hysteresis_tracker": 1}
    )
    metrics = one.train()
    assert math.isnan(metrics["grad_norm"])
    assert (metrics["loss_scale"], metrics["skipped_steps"]) == (HUGE, 1.0)


def test_every_step_of_an_epoch(build: Any, shim: Any) -> None:
    shim()
    one = build(overrides={"initial_loss_scale": 2.0**100})
    for _ in range(24):
        assert math.isnan(one.train()["grad_norm"])
    # With hysteresis 2 the first overflow keeps the scale; the 23 later ones halve it.
    with pytest.raises(LossScaleError, match=r"25 optimizer steps.*step 25 at loss scale 1.5"):
        one.train()


def test_eval_mode(build: Any, shim: Any) -> None:
    shim()
    one = build(overrides={"initial_loss_scale": HUGE})
    one.train()
    before = one.scaler.state_dict(), one.parameters()
    metrics = one.evaluate()
    assert "loss" in metrics
    assert not {"grad_norm", "loss_scale", "skipped_steps"} & set(metrics)
    assert one.scaler.state_dict() == before[0]
    assert torch.equal(one.parameters(), before[1])
    assert one.train()["skipped_steps"] == 2.0


# -- what stays the framework's own error ------------------------------------------------------


def test_constant_scale(build: Any, shim: Any) -> None:
    """A static loss_scale is the user's: the shim keeps it, and an overflow is verl's error."""
    shim()
    one = build(overrides={"loss_scale": HUGE})
    with pytest.raises(NotImplementedError):
        one.train()
    one = build(overrides={"loss_scale": 1024.0})
    metrics = one.train()
    assert math.isfinite(metrics["grad_norm"])
    assert "loss_scale" not in metrics


def test_failed_step_without_a_scaler(build: Any, shim: Any) -> None:
    shim(settings={"optimizer_states": "as-configured"})
    one = build(dtype="bfloat16")
    for inner in one.engine.optimizer.chained_optimizers:
        inner.prepare_grads = lambda: True
    with pytest.raises(NotImplementedError):
        one.train()


def test_skip_of_another_kind(build: Any, shim: Any) -> None:
    """Megatron 0.18 can fail a step because of a large norm; then it returns the norm."""
    shim()
    one = build()
    one.engine.optimizer.step = lambda: (False, 3.0, None)
    with pytest.raises(NotImplementedError):
        one.train()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_dtypes_are_untouched(build: Any, shim: Any, dtype: str) -> None:
    """Parameters, metrics and decisions stay the same."""

    def run() -> tuple[list[dict[str, Any]], torch.Tensor]:
        torch.manual_seed(0)
        one = build(dtype=dtype)
        return [one.train(seed=step) for step in range(3)], one.parameters()

    expected = run()
    shim(features=["fp16-scaling"])
    found = run()
    for mine, plain in zip(found[0], expected[0], strict=True):
        assert set(mine) == set(plain)
        assert all(mine[key] == plain[key] for key in ("loss", "grad_norm", "lr"))
    assert torch.equal(found[1], expected[1])
    assert not reasons()


# -- metrics -----------------------------------------------------------------------------------


def test_mini_batches(build: Any, shim: Any) -> None:
    """PPO's trainers gather metrics over ranks and mini-batches, average and rename them."""
    import verl.utils.tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    shim()
    one = build(overrides={"initial_loss_scale": HUGE})
    data = one.data(sequences=4)
    del data["global_token_num"]
    tu.assign_non_tensor(data, mini_batch_size=2, epochs=1, seed=1)
    metrics = dict(tu.get(one.worker.train_mini_batch(data), "metrics"))
    assert metrics["loss_scale"] == [HUGE, HUGE]
    assert metrics["skipped_steps"] == [1.0, 2.0]
    metrics.pop("mfu", None)
    reduced = reduce_metrics(rename_dict(metrics, "actor/"))
    assert math.isnan(reduced["actor/grad_norm"])
    assert reduced["actor/loss_scale"] == HUGE
    assert reduced["actor/skipped_steps"] == 1.5


def test_scaling_does_not_show(build: Any, shim: Any) -> None:
    """A quarter of the loss at four times the scale gives exactly a quarter of all figures."""
    shim()
    found = []
    for scale, weight in ((2.0**6, 1.0), (2.0**8, 0.25)):
        torch.manual_seed(0)
        one = build(overrides={"initial_loss_scale": scale})
        own = one.worker.loss_fn

        def weighted(*args: Any, own: Any = own, weight: float = weight, **kwargs: Any) -> Any:
            loss, metrics = own(*args, **kwargs)
            return loss * weight, metrics

        one.worker.set_loss_fn(weighted)
        found.append(one.train())
    mine, other = found
    assert mine["loss"] == 4.0 * other["loss"] > 0.0
    assert mine["grad_norm"] == 4.0 * other["grad_norm"] > 0.0
    assert (mine["loss_scale"], other["loss_scale"]) == (2.0**6, 2.0**8)


@pytest.mark.skipif(Version("0.9") > VERL, reason="verl has the Tinker worker from 0.9")
def test_tinker(build: Any, shim: Any) -> None:
    """The Tinker worker has a separate call for the step."""
    import verl.utils.tensordict_utils as tu

    shim()
    one = build(
        overrides={"initial_loss_scale": HUGE},
        kind="verl.workers.engine_workers_tinker:TinkerTrainingWorker",
    )
    passed = tu.get(one.worker.forward_backward(one.data()), "metrics")
    assert not {"loss_scale", "grad_norm"} & set(passed)
    metrics = one.worker.optimizer_step()
    assert math.isnan(metrics["grad_norm"])
    assert (metrics["loss_scale"], metrics["skipped_steps"]) == (HUGE, 1.0)


# -- settings ----------------------------------------------------------------------------------


class TestSettings:
    CHOSEN: ClassVar[dict[str, float]] = {
        "loss_scale_init": 512.0,
        "growth_interval": 2,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
    }

    def test_are_taken(self, build: Any, shim: Any) -> None:
        shim(settings=self.CHOSEN)
        one = build()
        assert [one.train(seed=step)["loss_scale"] for step in range(4)] == [512, 512, 2048, 2048]
        assert float(one.scaler.backoff_factor) == 0.25
        assert "from 512, growth x4 after 2 steps, backoff x0.25" in reasons()

    def test_the_users_config_wins(self, build: Any, shim: Any) -> None:
        shim(settings=self.CHOSEN)
        scaler = build(overrides={"initial_loss_scale": 64.0, "loss_scale_window": 7}).scaler
        assert (float(scaler.scale), scaler.growth_interval) == (64.0, 7)
        assert float(scaler.growth_factor) == 4.0  # no config has a field for the growth factor

    @pytest.mark.parametrize("positional", [False, True])
    def test_direct_caller(self, cpu: None, shim: Any, positional: bool) -> None:
        """verl's function, called directly; with the shim every version accepts ``bf16=``."""
        from verl.utils.megatron import optimizer

        shim(settings=self.CHOSEN)
        make = optimizer.init_megatron_optim_config
        plain = {"override_optimizer_config": {"use_precision_aware_optimizer": False}}
        config = optim_config(**plain)
        if positional:
            made = make(config, True, True, bf16=False)
        else:
            made = make(optim_config=config, fp16=True, bf16=False)
        assert (made.initial_loss_scale, made.loss_scale_window) == (512.0, 2)
        assert make(config, fp16=False, bf16=True).initial_loss_scale == 2**32

    def test_below_the_minimum(self, build: Any, shim: Any) -> None:
        shim(settings={"loss_scale_init": 0.5})
        with pytest.raises(SettingsError, match=r"LOSS_SCALE_INIT=0.5.*min_loss_scale"):
            build()


# -- the DDP's check, and the bucket -----------------------------------------------------------


class TestCheckForNan:
    """With ``check_for_nan_in_grad`` an overflow ends the job before the optimizer's step."""

    @staticmethod
    def on_by_default(patch: pytest.MonkeyPatch) -> None:
        """Set the check by default, as Megatron-Bridge's recipes do."""
        from megatron.core.distributed import DistributedDataParallelConfig as Config

        own = Config.__init__

        def with_check(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **{"check_for_nan_in_grad": True, **kwargs})

        patch.setattr(Config, "__init__", with_check)

    def test_gives_way(self, build: Any, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_by_default(monkeypatch)
        shim()
        one = build(overrides={"initial_loss_scale": HUGE})
        assert not one.engine.module[0].ddp_config.check_for_nan_in_grad
        assert "check_for_nan_in_grad=False" in reasons()
        assert math.isnan(one.train()["grad_norm"])

    def test_stays_under_a_constant_scale(
        self, build: Any, shim: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.on_by_default(monkeypatch)
        shim()
        one = build(overrides={"loss_scale": 1024.0})
        assert one.engine.module[0].ddp_config.check_for_nan_in_grad

    def test_gives_way_in_megatron_fsdp(self, cpu: None, shim: Any) -> None:
        """Megatron-FSDP has its own DDP class; a CPU runs its ``__init__`` in part only."""
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        from precision_shim_adapters.megatron import RequestedConfig, building

        def given(dtype: torch.dtype, *, built: bool = True) -> Any:
            config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
            made = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
            around = building("verl", RequestedConfig) if built else contextlib.nullcontext()
            with around, contextlib.suppress(Exception):
                made.__init__(object(), config, torch.nn.Linear(2, 2, dtype=dtype))  # type: ignore[misc]
            assert config.check_for_nan_in_grad  # The caller's config is unchanged.
            return vars(made)["ddp_config"].check_for_nan_in_grad

        assert given(torch.float16)
        shim()
        assert not given(torch.float16)
        assert given(torch.float16, built=False)
        assert given(torch.bfloat16)

    def test_the_users_stays(self, build: Any, shim: Any) -> None:
        shim()
        with pytest.warns(PrecisionShimWarning, match="check_for_nan_in_grad=True is the user's"):
            one = build(overrides={"initial_loss_scale": HUGE}, ddp={"check_for_nan_in_grad": True})
        assert one.engine.module[0].ddp_config.check_for_nan_in_grad
        with pytest.raises(RuntimeError, match=r"(?i)nan|inf"):
            one.train()
