"""Real DTensor workers in float16, with the shim and without it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import PrecisionShimWarning, SeamError, SettingsError
from precision_shim.scaling import LossScaler

from .support import KINDS, batch, each_kind, loss_for, nll_loss, parameters, scaler_of

ROUNDED = 2.0**-11
"""The relative rounding error of fp16, by which NeMo-RL's loss and a loss by hand may differ."""


class Times:
    """A loss function times a factor, with all attributes of the loss function."""

    def __init__(self, loss_fn: Any, factor: float) -> None:
        self.loss_fn, self.factor = loss_fn, factor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = self.loss_fn(*args, **kwargs)
        return loss * self.factor, metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss_fn, name)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def figures(result: dict[str, Any]) -> tuple[Any, Any]:
    metrics = result["all_mb_metrics"]
    return metrics.get("loss_scale"), metrics.get("skipped_steps")


@each_kind
def test_an_overflow_is_skipped_and_the_scale_falls(kind, worker, shim) -> None:
    shim()
    with worker(kind, "float16") as one:
        one.train(batch(), loss_for(kind))
        before = parameters(one)
        lr = one.scheduler.get_last_lr()
        result = one.train(batch(), Times(loss_for(kind), 1e30))
        assert same(before, parameters(one))
        assert math.isnan(float(result["grad_norm"]))
        assert figures(result) == ([65536.0], [1.0])
        assert one.scheduler.get_last_lr() != lr  # a skipped step still advances NeMo-RL's schedule
        result = one.train(batch(), loss_for(kind))
        assert figures(result) == ([32768.0], [1.0])
        assert not same(before, parameters(one))


def test_auxiliary_losses_of_experts_are_scaled_too(worker, shim) -> None:
    """nemo_automodel adds gradients of auxiliary losses in the backward pass, not to the loss."""
    moe = pytest.importorskip(
        "nemo_automodel.components.moe.megatron.moe_utils",
        reason="this nemo_automodel has no models of its own with experts",
    )
    holder = getattr(moe, "MoEAuxLossAutoScaler", None)
    if holder is None:
        pytest.skip("the nemo_automodel of NeMo-RL 0.4 drops its experts' auxiliary losses")

    def attach(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return holder.apply(output, 0.1 * module.weight.float().sum())

    norms = {}
    for precision in ("float32", "float16"):
        if precision == "float16":
            shim(settings={"loss_scale_init": 256})
        with worker("v2", precision) as one:
            last = [module for module in one.model.modules() if isinstance(module, torch.nn.Linear)]
            last[-1].register_forward_hook(attach)
            plain = one.train(batch(), Times(nll_loss(), 0.0))
            norms[precision] = float(plain["grad_norm"])
    assert figures(plain) == ([256.0], [0.0])
    assert norms["float16"] == norms["float32"] > 0  # all gradients are 0.1
    assert holder.main_loss_backward_scale in (None, 1.0)


@pytest.mark.parametrize(("kind", "clip"), [("v1", 0.05), ("v2", 0.05), ("v2", None)])
def test_steps_are_those_of_a_loop_written_by_hand(kind, worker, shim, clip) -> None:
    with worker(kind, "float16", max_grad_norm=clip) as one:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=2)
        norms = []
        for seed in range(4):
            one.optimizer.zero_grad()
            data = batch(seed=seed)
            for part in data["input_ids"].split(2):
                with torch.autocast("cpu", dtype=torch.float16):
                    logits = one.model(
                        input_ids=part,
                        attention_mask=torch.ones_like(part, dtype=torch.bool),
                        use_cache=False,
                    ).logits
                chosen = logits.float().log_softmax(-1)[:, :-1].gather(-1, part[:, 1:, None])
                scaler.scale(-chosen.sum() / data["token_mask"][:, 1:].sum()).backward()
            scaler.unscale_(one.optimizer)
            limit = math.inf if clip is None else clip
            norm = torch.nn.utils.clip_grad_norm_(one.model.parameters(), limit)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            scaler.step(one.optimizer)
            scaler.update()
            one.scheduler.step()
        expected, scale = parameters(one), scaler.get_scale()
    shim(settings={"loss_scale_init": 2.0**15, "growth_interval": 2})
    with worker(kind, "float16", max_grad_norm=clip) as one:
        start = parameters(one)
        results = [one.train(batch(seed=seed), nll_loss()) for seed in range(4)]
        if clip is not None or kind == "v1":  # without clipping nemo_automodel computes no norm
            reported = [float(one["grad_norm"]) for one in results]
            assert reported == pytest.approx(norms, rel=2 * ROUNDED)
        assert [figures(one)[0] for one in results] == [[2.0**15]] * 2 + [[2.0**16]] * 2
        assert scaler_of(one).get_scale() == scale
        found = parameters(one)
    moved = max(float((expected[name] - start[name]).abs().max()) for name in start)
    apart = max(float((expected[name] - found[name]).abs().max()) for name in start)
    assert apart <= len(results) * 2 * ROUNDED * moved


def test_dynamic_batching(worker, shim) -> None:
    shim()
    dynamic = {
        "enabled": True,
        "train_mb_tokens": 24,
        "logprob_mb_tokens": 24,
        "sequence_length_round": 4,
    }
    with worker("v2", "float16", dynamic_batching=dynamic) as one:
        arguments = {
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_round": 4,
            "max_tokens_per_microbatch": 24,
        }
        shards, _ = batch().shard_by_batch_size(1, batch_size=4, dynamic_batching_args=arguments)
        before = parameters(one)
        result = one.train(shards[0], nll_loss())
        assert figures(result) == ([65536.0], [0.0])
        assert not same(before, parameters(one))


def test_eval_mode_takes_no_step_and_reports_no_scale(worker, shim) -> None:
    shim()
    with worker("v2", "float16") as one:
        before = parameters(one)
        result = one.train(batch(), nll_loss(), True)
        again = one.train(batch(), nll_loss(), eval_mode=True)
        assert figures(result) == figures(again) == (None, None)
        assert scaler_of(one).counter.steps == 0
        assert same(before, parameters(one))


@each_kind
def test_bf16_is_left_alone(kind, worker, shim, monkeypatch) -> None:
    def run() -> tuple[Any, ...]:
        with worker(kind, "bfloat16") as one:
            results = [one.train(batch(seed=seed), loss_for(kind)) for seed in range(2)]
            return parameters(one), results

    expected, without = run()

    def unwanted(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("no scaler in this precision")

    monkeypatch.setattr(LossScaler, "__init__", unwanted)
    shim()
    found, with_shim = run()
    assert same(expected, found)
    assert [str(one) for one in with_shim] == [str(one) for one in without]
    assert not precision_shim.status().decisions


def test_the_loss_that_is_reported_is_not_scaled(worker, shim) -> None:
    with worker("v1", "float16") as one:
        expected = one.train(batch(), nll_loss())["global_loss"]
    shim()
    with worker("v1", "float16") as one:
        assert torch.equal(one.train(batch(), nll_loss())["global_loss"], expected)


def test_the_configs_block_wins_over_variables(worker, shim, monkeypatch) -> None:
    monkeypatch.setenv("PRECISION_SHIM_LOSS_SCALE_INIT", "128")
    monkeypatch.setenv("PRECISION_SHIM_BACKOFF_FACTOR", "0.25")
    shim()
    block = {"loss_scale_init": 4096, "growth_interval": 7, "growth_factor": None}
    with worker("v1", "float16", precision_shim=block) as one:
        settings = scaler_of(one).settings
        assert (settings.init_scale, settings.growth_interval) == (4096.0, 7)
        assert (settings.growth_factor, settings.backoff_factor) == (2.0, 0.25)
        assert settings.chosen == {"init_scale", "growth_interval", "backoff_factor"}


@pytest.mark.parametrize(
    ("kind", "block", "says"),
    [
        ("v1", {"growth_interval": 0}, r"precision_shim\.growth_interval: .*whole number >= 1"),
        (
            KINDS[-1],
            {"init_scale": 1.0},
            "precision_shim: unknown key 'init_scale'; allowed: loss_",
        ),
    ],
)
def test_a_block_that_makes_no_sense_is_an_error(kind, worker, shim, block, says) -> None:
    shim()
    said = rf"{'value' if kind == 'value' else 'policy'}\.{says}"
    with pytest.raises(SettingsError, match=said), worker(kind, "float16", precision_shim=block):
        pass


def test_a_step_without_an_unscaling_before_it_is_refused(worker, shim, monkeypatch) -> None:
    from precision_shim_adapters.torch_fp16 import ScaledTraining

    shim()
    with worker("v2", "float16") as one:
        monkeypatch.setattr(ScaledTraining, "before_clipping", lambda self: nullcontext())
        with pytest.raises(SeamError, match="stepped where the shim does not look"):
            one.train(batch(), nll_loss())


def test_a_worker_in_a_process_without_the_shim_says_so(worker, shim) -> None:
    from precision_shim_adapters.nemo_rl.training.dtensor import redecorate

    from .support import actor_class, plain

    with worker("v2", "float16"):
        pass
    exported = redecorate(actor_class("v2"))
    made = exported.__ray_metadata__.modified_class.__ray_actor_class__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.nemo_rl.support.plain", lambda kind: made, raising=True)
        with (
            pytest.warns(PrecisionShimWarning, match="trains without loss scaling"),
            worker("v2", "float16") as one,
        ):
            assert figures(one.train(batch(), nll_loss())) == (None, None)
    assert plain("v2") is not made
