"""The lost-update meter on torch's optimizers and FusedAdam, in one process."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import meters
from precision_shim.errors import AuditError, PrecisionShimWarning, SettingsError
from precision_shim.scaling import LossScaler
from precision_shim_tools.testing import FusedAdam

from ..every_framework.shim_warnings import ours

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Make = Callable[..., torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def no_warning_is_an_error_here() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionShimWarning)
        yield
    precision_shim.uninstall()


def of(kind: type[Any], **options: Any) -> Make:
    return lambda params: kind(params, **{"lr": 6e-6, "weight_decay": 0.01, **options})


ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
REMAINDERS = of(
    FusedAdam,
    master_weights=True,
    store_param_remainders=True,
    exp_avg_dtype=BF16,
    exp_avg_sq_dtype=BF16,
)
FP8 = of(FusedAdam, master_weights=True, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8)
# dtype of the parameters, optimizer, where the weights and the second moments are stored
TRAININGS: dict[str, tuple[torch.dtype, Make, str, str]] = {
    "pure bf16": (BF16, of(ADAMW), "bf16", "bf16"),
    "fused": (BF16, of(ADAMW, fused=True), "bf16", "bf16"),
    "fp32": (FP32, of(ADAMW), "fp32", "fp32"),
    "momentum": (BF16, of(SGD, lr=1e-4, momentum=0.9), "bf16", ""),
    "plain SGD": (BF16, of(SGD, lr=1e-4), "bf16", ""),
    "remainders": (BF16, REMAINDERS, "bf16+int16", "bf16"),
    "fp32 masters": (BF16, of(FusedAdam, master_weights=True), "fp32", "fp32"),
    "fp8 moments": (BF16, FP8, "fp32", ""),
}


def model_of(dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    return torch.nn.Sequential(*layers).to(dtype)


def train(model: Any, optimizer: Any, steps: int, scaler: Any = None, size: float = 1.0) -> None:
    for step in range(steps):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) * size
        loss = model(data.to(next(model.parameters()).dtype)).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def watched(dtype: torch.dtype, make: Make, every: int = 1) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and the meter that watches them."""
    model = model_of(dtype)
    optimizer = make(model.parameters())
    return model, optimizer, precision_shim.watch_updates(model, optimizer, every=every)


def stored(optimizer: Any, p: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the numbers of a parameter: its weight, its master if any, its second moment."""
    state = optimizer.state.get(p, {})
    names = ("master_param", "exp_avg_sq")
    return [p.detach().clone(), *(state[name].clone() for name in names if name in state)]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_shares_are_those_of_all_elements(name: str) -> None:
    """Counted anew over every element, from the numbers before and after the step."""
    dtype, make, weights, second = TRAININGS[name]
    model, optimizer, watch = watched(dtype, make)
    train(model, optimizer, 2)
    model(torch.randn(8, 16).to(dtype)).float().square().mean().backward()
    before = [stored(optimizer, p) for p in model.parameters()]
    squares = [p.grad.double() ** 2 for p in model.parameters()]
    optimizer.step()
    updates = lost = decays = stuck = 0
    for p, old, square in zip(model.parameters(), before, squares, strict=True):
        new, state = stored(optimizer, p), optimizer.state.get(p, {})
        of_weight = slice(0, 2) if weights == "bf16+int16" else slice(1, 2)
        of_weight = of_weight if "master_param" in state else slice(0, 1)
        same = [a == b for a, b in zip(old[of_weight], new[of_weight], strict=True)]
        due = state.get("exp_avg", state.get("momentum_buffer", p.grad)) != 0
        due |= 0.01 * old[of_weight][0] != 0
        updates, lost = updates + int(due.sum()), lost + int((due & torch.stack(same).all(0)).sum())
        if second:
            falls = square < old[-1].double()
            decays, stuck = (
                decays + int(falls.sum()),
                stuck + int((falls & (old[-1] == new[-1])).sum()),
            )
    optimizer.zero_grad()
    train(model, optimizer, 1)
    (figures,) = watch.figures()
    assert figures["step"] == 3
    assert figures["weights"] == lost / updates
    assert figures["exp_avg_sq"] == (stuck / decays if second else None)
    assert figures["dtypes"] == {"weights": weights, **({"exp_avg_sq": second} if second else {})}
    assert json.loads(json.dumps(figures)) == figures
    shares = {"updates_lost": figures["weights"], "updates_lost_exp_avg_sq": figures["exp_avg_sq"]}
    told = {f"actor/{key}": share for key, share in shares.items() if share is not None}
    assert watch.metrics("actor/") == meters.metrics(optimizer, "actor/") == told
    assert (figures["weights"] > 0.5) == (weights == "bf16")


@pytest.mark.parametrize(("beta2", "most"), [(0.999, True), (0.95, False)])
def test_a_second_moment_that_cannot_decay(beta2: float, most: bool) -> None:
    model, optimizer, watch = watched(BF16, of(ADAMW, betas=(0.9, beta2)))
    train(model, optimizer, 4)
    assert (watch.figures()[0]["exp_avg_sq"] > 0.5) is most


@pytest.mark.parametrize("name", TRAININGS)
def test_no_step_is_changed(name: str) -> None:
    def run(watches: bool) -> list[torch.Tensor]:
        dtype, make, *_ = TRAININGS[name]
        model = model_of(dtype)
        optimizer = make(model.parameters())
        if watches:
            precision_shim.watch_updates(model, optimizer, every=1)
        torch.manual_seed(3)
        train(model, optimizer, 5)
        numbers = [one for p in model.parameters() for one in stored(optimizer, p)]
        return [*(one.flatten().view(torch.uint8) for one in numbers), torch.rand(3)]

    assert all(map(torch.equal, run(False), run(True)))


def test_a_watched_model_can_be_moved() -> None:
    """torch swaps FSDP2's parameters then, and cannot where there are weak references to them."""
    model, optimizer, watch = watched(BF16, of(ADAMW))
    train(model, optimizer, 2)
    assert watch.figures()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("by_shim", [False, True])
def test_a_skipped_step_is_not_counted(is_fused: bool, by_shim: bool) -> None:
    """torch calls a fused step on an overflow too, and the step then skips itself on the device."""
    model, optimizer, watch = watched(FP32, of(ADAMW, fused=is_fused))
    scaler = LossScaler(device="cpu") if by_shim else torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(model, optimizer, 3, scaler)
    before = watch.figures()
    assert before[0]["weights"] < 0.05
    train(model, optimizer, 1, scaler, size=float("inf"))
    after_overflow = watch.figures()
    train(model, optimizer, 1, scaler, size=float("inf"))
    # The first of these calls brought the figures of the step before the overflow.
    assert watch.figures() == after_overflow


def test_a_learning_rate_of_zero_loses_nothing() -> None:
    model, optimizer, watch = watched(BF16, of(ADAMW, lr=0.0))
    train(model, optimizer, 3)
    (figures,) = watch.figures()
    assert figures["weights"] is None
    assert figures["exp_avg_sq"] is not None


def test_only_what_a_step_updates_takes_part() -> None:
    """Not frozen parameters (verl passes LoRA's base, too), nor those without a gradient."""
    frozen = torch.nn.Parameter(torch.ones(512, 512, dtype=BF16), requires_grad=False)
    idle, trained = (torch.nn.Parameter(torch.ones(8, 8, dtype=BF16)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [frozen, trained]}, {"params": [idle]}], lr=1e-6)
    watch = precision_shim.watch_updates(None, optimizer, every=1)
    for _ in range(2):
        trained.grad = torch.ones_like(trained)
        optimizer.step()
    assert watch._meters[0].counts["weights"] == (64, 64)


def test_infinite_weights_and_closures_do_not_count() -> None:
    broken = torch.nn.Parameter(torch.full((8,), float("inf"), dtype=BF16))
    optimizer = torch.optim.SGD([broken], lr=0.1)
    watch = precision_shim.watch_updates(None, optimizer, every=1)
    for closure in (None, None, lambda: 0.0, lambda: 0.0):
        broken.grad = torch.ones_like(broken)
        optimizer.step(closure)
    assert watch.figures() == []


def test_a_sample_of_a_large_model_counts_for_the_whole() -> None:
    large = torch.nn.Parameter(torch.ones(700, 700, dtype=BF16))
    optimizer = torch.optim.SGD([large], lr=1e-6)
    watch = precision_shim.watch_updates(None, optimizer, every=1)
    large.data[:, ::2] = 1e-4  # in every second column, the update is large enough
    for _ in range(2):
        large.grad = torch.ones_like(large)
        optimizer.step()
    ((updates, lost),) = watch._meters[0].counts.values()
    apart = 3
    assert updates == apart * len(range(0, 700 * 700, apart))
    assert abs(lost / updates - 0.5) < 1 / 700  # an even distance would see one kind of column


def test_a_loss_of_most_is_told_once_and_is_part_of_the_audit() -> None:
    with ours() as told:
        model, optimizer, watch = watched(BF16, of(ADAMW), every=2)
        train(model, optimizer, 9)
    assert len(told) == 1
    (note,) = (one for one in precision_shim.audit(model, optimizer).notes if "lost" in one.code)
    assert (note.code, note.component, note.part) == ("updates-lost", "params", "model")
    assert note.expected == "at most 50% lost"
    assert "of the updates of the stored weights (bf16) were rounded away at step 8" in note.message
    assert "Keep the weights in fp32" in note.message
    audit = precision_shim.audit(model, optimizer)
    (figures,) = watch.figures()
    assert audit.parts[0].updates == figures
    assert f"step 8: stored weights {figures['weights']:.1%} (bf16), second moment" in str(audit)


def test_fp32_weights_get_another_remedy() -> None:
    model, optimizer, _ = watched(FP32, of(ADAMW, lr=1e-12))
    train(model, optimizer, 2)
    (note,) = (one for one in precision_shim.audit(model, optimizer).notes if "lost" in one.code)
    assert "so that no dtype helps" in note.message


def test_what_goes_wrong_costs_the_meter_alone() -> None:
    model, optimizer, watch = watched(BF16, of(ADAMW))
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = "no number"
    with ours() as told, pytest.raises(TypeError):
        train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 1e-3
    watch._meters[0].every = None
    with ours() as told:
        train(model, optimizer, 2)
    assert len(told) == 1
    assert "model: lost updates are not measured: TypeError" in told[0]


def test_uninstall_and_remove_take_the_hooks_out() -> None:
    for remove in (lambda watch: watch.remove(), lambda _: precision_shim.uninstall()):
        model, optimizer, watch = watched(BF16, of(ADAMW))
        assert optimizer._optimizer_step_pre_hooks
        remove(watch)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        train(model, optimizer, 2)
        assert watch.figures() == []
        assert meters.metrics(optimizer) == {}


def test_a_second_call_changes_how_often() -> None:
    model, optimizer, watch = watched(BF16, of(ADAMW), every=1)
    assert precision_shim.watch_updates(model, optimizer, every=3)._meters == watch._meters
    train(model, optimizer, 5)
    assert watch.figures()[0]["step"] == 3


def test_nothing_keeps_an_optimizer_alive() -> None:
    model, optimizer, watch = watched(BF16, of(ADAMW))
    train(model, optimizer, 2)
    kept = weakref.ref(optimizer)
    del model, optimizer, watch
    gc.collect()
    assert kept() is None


def test_what_it_cannot_be_given() -> None:
    model, optimizer, _ = watched(BF16, of(ADAMW))
    for every in (0, -1, 1.5, True, "2"):
        with pytest.raises(SettingsError, match="allowed: a whole number >= 1"):
            precision_shim.watch_updates(model, optimizer, every=every)  # type: ignore[arg-type]
    with pytest.raises(AuditError, match="there are no steps to watch"):
        precision_shim.watch_updates(model, None)
