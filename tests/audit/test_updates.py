"""The meter of lost updates on torch's optimizers and FusedAdam, in one process."""

from __future__ import annotations

import gc
import itertools
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import precision_shim
from precision_shim.auditing import meters
from precision_shim.errors import AuditError, DtypeError, PrecisionShimWarning, SettingsError
from precision_shim.scaling import LossScaler
from precision_shim_tools.testing import FusedAdam
from precision_shim_tools.updates import lost, sampling
from precision_shim_tools.updates.measuring import Meter

from ..every_framework.shim_warnings import ours
from .updates_reference import Reference, hold

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SLOW = {"lr": 6e-6, "weight_decay": 0.01}

Make = Callable[..., torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def no_warning_is_an_error_here() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionShimWarning)
        yield
    precision_shim.uninstall()


def adamw(**options: Any) -> Make:
    return lambda params, **more: torch.optim.AdamW(params, **{**SLOW, **options, **more})


def fused(**options: Any) -> Make:
    return lambda params, **more: FusedAdam(params, **{**SLOW, **options, **more})


REMAINDERS = fused(
    master_weights=True, store_param_remainders=True, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16
)
TRAININGS: dict[str, tuple[torch.dtype, Make]] = {
    "pure bf16 AdamW": (BF16, adamw()),
    "remainders": (BF16, REMAINDERS),
    "fp32 masters": (BF16, fused(master_weights=True)),
    "fp32 parameters": (FP32, adamw()),
    "fp16 masters with a scale": (
        BF16,
        fused(master_weights=True, master_weight_dtype=FP16, exp_avg_sq_dtype=FP16),
    ),
    "fp8 moments": (
        BF16,
        fused(master_weights=True, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8),
    ),
}


def model_of(dtype: torch.dtype = BF16, width: int = 32) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.GELU(), torch.nn.Linear(width, 4)
    ).to(dtype)


def watched(
    dtype: torch.dtype = BF16, make: Make | None = None, every: int = 1
) -> tuple[Any, Any, precision_shim.UpdateWatch]:
    """A model, its optimizer, and the meter that watches them."""
    model = model_of(dtype)
    optimizer = (make or adamw())(model.parameters())
    return model, optimizer, precision_shim.watch_updates(model, optimizer, every=every)


def test_a_watched_model_can_be_moved() -> None:
    """torch swaps FSDP2's parameters then, and cannot where there are weak references to them."""
    model, optimizer, watch = watched()
    train(model, optimizer, 2)
    assert watch.figures()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def groups_of(model: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.ndim == 1]}]


def train(
    model: Any, optimizer: Any, steps: int, *, scaler: Any = None, first: int = 0, size: float = 1.0
) -> list[float]:
    losses = []
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(8, 16, generator=generator).to(dtype) * size
        loss = model(data).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- against fp64 --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAININGS)
def test_against_an_fp64_reference(name: str) -> None:
    dtype, make = TRAININGS[name]
    model = model_of(dtype)
    optimizer = make(groups_of(model))
    reference = Reference(optimizer)
    watch = precision_shim.watch_updates(model, optimizer, every=1)
    seen = []
    for step in range(12):
        train(model, optimizer, 1, first=step)
        seen += [(one["step"], one) for one in watch.figures()]
    assert [step for step, _ in seen] == list(range(1, 12))  # one step late
    for _, figures in seen:
        hold(figures, reference)
    (newest,) = watch.figures()
    assert [one["group"] for one in newest["groups"]] == [0, 1]
    assert [one["sampled"] for one in newest["groups"]] == [16 * 32 + 32 * 4, 32 + 4]
    assert all(one["lr"] == 6e-6 for one in newest["groups"])


def test_what_it_is_for() -> None:
    """At a learning rate of RL, pure bf16 loses most updates; remainders and fp32 lose few."""
    shares = {}
    for name in ("pure bf16 AdamW", "remainders", "fp32 masters", "fp32 parameters"):
        dtype, make = TRAININGS[name]
        model, optimizer, watch = watched(dtype=dtype, make=make, every=5)
        train(model, optimizer, 11)
        shares[name] = watch.metrics()
    pure = shares.pop("pure bf16 AdamW")
    assert pure["updates_lost"] == pure["updates_lost_rollout"] > 0.5
    for one in shares.values():
        assert one["updates_lost"] < 0.05
        assert one["updates_lost_rollout"] > 0.5  # only the rollout's copies lose updates


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_infinite_weight_loses_nothing_to_rounding(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, math.inf, -math.inf, 2.0]))
    optimizer = kind([weight], lr=0.5)
    watch = precision_shim.watch_updates(torch.nn.ParameterList([weight]), optimizer, every=1)
    for _ in range(3):
        weight.grad = torch.ones(4)
        if optimizer.state.get(weight):
            optimizer.state[weight]["exp_avg_sq"][3] = math.inf
        optimizer.step()
    (group,) = watch.figures()[0]["groups"]
    assert (group["weights"]["updates"], group["weights"]["lost"]) == (2, 0)
    if kind is torch.optim.AdamW:
        assert group["exp_avg_sq"]["lost"] == 0


def rollout_share(*names: str, model: Any = None) -> tuple[float, str]:
    """The share of updates lost in the rollout's copies, and the copies' dtype."""
    model = model_of(FP32) if model is None else model
    optimizer = adamw()(model.parameters())
    watch = precision_shim.watch_updates(model, optimizer, every=5)
    meters.tell_rollout(optimizer, *names)
    train(model, optimizer, 11)
    (group,) = watch.figures()[0]["groups"]
    return watch.metrics()["updates_lost_rollout"], group["rollout"]["dtype"]


def test_the_rollouts_copies_are_in_the_engines_dtype() -> None:
    """Copies in fp16, 8 times finer than bf16, lose fewer updates if not rounded to bf16 first."""
    fp16, bf16, fp32 = (rollout_share(one) for one in ("fp16", "bf16", "fp32"))
    assert fp32[0] < fp16[0] < bf16[0]
    assert [name for _, name in (fp16, bf16, fp32)] == ["fp16", "bf16", "fp32"]
    assert rollout_share("bf16", "fp16") == rollout_share("fp32", "bf16") == bf16
    assert rollout_share("fp16", "fp16") == fp16


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_a_16_bit_models_copies_are_of_its_own_weights(name: str) -> None:
    """An fp16 copy of a bf16 weight has the weight's value, so both move at the same steps."""
    assert rollout_share(name, model=model_of(BF16))[1] == "bf16"


def test_the_user_names_the_rollouts_dtype() -> None:
    shares = {}
    for name in ("half", FP16, "bf16", None):
        model = model_of(FP32)
        optimizer = adamw()(model.parameters())
        watch = precision_shim.watch_updates(model, optimizer, every=5, rollout=name)
        train(model, optimizer, 11)
        shares[name] = watch.metrics()["updates_lost_rollout"]
    assert shares["half"] == shares[FP16] < shares["bf16"] == shares[None]
    for wrong in ("fp8", "float17", torch.int8, 16):
        with pytest.raises(DtypeError, match="rollout"):
            precision_shim.watch_updates(model, optimizer, rollout=wrong)


def test_what_the_engine_keeps_in_fp32_and_what_nobody_knows_is_not_counted() -> None:
    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.up, self.gate = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8, bias=False)
            self.gate_proj = torch.nn.Linear(8, 4)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.gate_proj(self.up(data) * self.gate(data).softmax(-1))
            return out

    model = Routed()
    optimizer = adamw()(model.parameters())
    watch = precision_shim.watch_updates(model, optimizer, every=1, rollout="fp16")
    train(model, optimizer, 2)
    (group,) = watch.figures()[0]["groups"]
    assert group["weights"]["updates"] - group["rollout"]["updates"] == model.gate.weight.numel()
    for unknown in ((), ("auto",), ("bf16", "fp8")):
        meters.tell_rollout(optimizer, *unknown)
        train(model, optimizer, 2)
        assert "updates_lost_rollout" not in watch.metrics()
        assert "updates_lost" in watch.metrics()


class WithLora(torch.nn.Linear):
    """A linear layer whose LoRA factors are named like peft's."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        torch.manual_seed(1)
        self.lora_A, self.lora_B = (torch.nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(data) + self.lora_B(self.lora_A(data))
        return out


@pytest.mark.parametrize("told", [None, False, True])
def test_factors_of_lora_are_copies_only_if_they_are_sent(told: bool | None) -> None:
    """LoRA may be merged into the weights that the engine receives."""
    model = WithLora()
    optimizer = adamw()([{"params": [model.weight, model.bias]}, {"params": model.lora_A.weight}])
    watch = precision_shim.watch_updates(model, optimizer, every=1)
    if told is not None:
        meters.tell_rollout(optimizer, "bf16", factors=told)
    train(model, optimizer, 2)
    weights, factors = watch.figures()[0]["groups"]
    assert weights["rollout"]["dtype"] == "bf16"
    assert (factors["rollout"] is not None) is bool(told)


@pytest.mark.parametrize("known", [True, False])
def test_factors_of_lora_are_known_by_no_name(known: bool) -> None:
    """Most of the model is frozen beside factors; without the model nobody knows."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    model[0].requires_grad_(requires_grad=False)
    optimizer = adamw()(model[1].parameters())
    watch = precision_shim.watch_updates(model if known else None, optimizer, 1, rollout="bf16")
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    assert "updates_lost_rollout" not in watch.metrics()
    assert "rollout not measured" in str(precision_shim.audit(model, optimizer))


@pytest.mark.parametrize(("beta2", "stuck"), [(0.999, True), (0.95, False)])
def test_a_second_moment_that_cannot_decay(beta2: float, stuck: bool) -> None:
    model = model_of()
    optimizer = REMAINDERS(model.parameters(), betas=(0.9, beta2))
    watch = precision_shim.watch_updates(model, optimizer, every=1)
    train(model, optimizer, 5)
    for step in range(5, 20):  # the gradients have fallen
        train(model, optimizer, 1, first=step, size=0.1)
        share = watch.metrics()["updates_lost_exp_avg_sq"]
        assert share > 0.99 if stuck else share < 0.2


def test_the_other_rules_against_their_optimizers_in_fp64() -> None:
    """In fp64 rounding is negligible, so each rule gives exactly its optimizer's update."""
    from precision_shim_tools.updates.rules import Rule
    from precision_shim_tools.updates.sampling import Taken

    rate = torch.tensor(0.1, dtype=FP64)
    cases: list[Make] = [
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.3, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=rate, maximize=True, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    ]
    for make in cases:
        model, optimizer, watch = watched(dtype=FP64, make=make)
        rule = Rule(optimizer)
        (group,) = optimizer.param_groups
        for step in range(3):
            model(torch.randn(8, 16, dtype=FP64)).square().mean().backward()
            tensors = [(p, Taken(0, 1, p.numel())) for p in model.parameters()]
            before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
            stored = rule.read(optimizer, group, tensors)
            ideal = rule.ideal(optimizer, group, tensors, stored)
            optimizer.step()
            after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            torch.testing.assert_close(after - before, ideal.update, rtol=1e-9, atol=1e-12)
            assert step == 0 or watch.metrics()["updates_lost"] == 0.0


# -- it changes nothing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["AdamW", "one by one", "fused", "amsgrad", "SGD", "remainders", "fp8 moments"]
)
def test_no_step_is_changed(name: str) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        made: dict[str, Make] = {
            "AdamW": adamw(foreach=True),
            "one by one": adamw(foreach=False),
            "fused": adamw(fused=True),
            "amsgrad": adamw(amsgrad=True),
            "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
            "remainders": REMAINDERS,
            "fp8 moments": TRAININGS["fp8 moments"][1],
        }
        return made[name](params)

    def run(watched: bool) -> tuple[Any, ...]:
        model = model_of()
        optimizer = make(model.parameters())
        if watched:
            precision_shim.watch_updates(model, optimizer, every=1)
        torch.manual_seed(3)
        losses = train(model, optimizer, 6)
        states = [one for state in optimizer.state.values() for one in state.values()]
        tensors = [one for one in states if isinstance(one, torch.Tensor)]
        tensors += [p.detach() for p in model.parameters()]
        return losses, [t.clone().flatten().view(torch.uint8) for t in tensors], torch.rand(3)

    (losses, bits, drawn), (losses_with, bits_with, drawn_with) = run(False), run(True)
    assert losses == losses_with
    assert len(bits) == len(bits_with)
    assert all(torch.equal(a, b) for a, b in zip(bits, bits_with, strict=True))
    assert torch.equal(drawn, drawn_with)


class _Reads(TorchDispatchMode):
    """Counts how often a number is read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_of_a_tensor_in_a_step() -> None:
    def run(watched: bool) -> int:
        model = model_of()
        optimizer = adamw(fused=True)(model.parameters())
        if watched:
            precision_shim.watch_updates(model, optimizer, every=1)
        reads = _Reads()
        for _ in range(4):
            model(torch.randn(8, 16, dtype=BF16)).float().sum().backward()
            with reads:
                optimizer.step()
        return reads.count

    assert run(True) == run(False)


def test_what_has_not_arrived_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        there = False

        def query(self) -> bool:
            return self.there

    event, compare = Late(), Meter._compare

    def on_a_device(self: Any, *args: Any) -> Any:
        return replace(compare(self, *args), event=event)

    monkeypatch.setattr(Meter, "_compare", on_a_device)
    model, optimizer, watch = watched()
    train(model, optimizer, 4)
    assert watch.figures() == []
    event.there = True
    train(model, optimizer, 1)
    (figures,) = watch.figures()
    assert figures["step"] == 1  # the meter did not read the steps in between


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["pure bf16 AdamW", "fp32 parameters"])
def test_on_a_gpu_the_host_waits_for_nothing(name: str) -> None:
    dtype, make = TRAININGS[name]
    model = model_of(dtype).cuda()
    optimizer = make(groups_of(model), fused=True)
    reference = Reference(optimizer)
    watch = precision_shim.watch_updates(model, optimizer, every=1)

    def step() -> None:
        model(torch.randn(8, 16, dtype=dtype, device="cuda")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
        torch.cuda.synchronize()
    (figures,) = watch.figures()
    hold(figures, reference)
    plain = make(groups_of(model), fused=True)
    again = precision_shim.watch_updates(model, plain, every=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.cuda.set_sync_debug_mode("error")  # now waiting for the device is an error
    try:
        for _ in range(4):
            plain.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not again._meters[0].unmeasured


# -- skipped steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_a_skipped_step_is_not_counted(is_fused: bool, ours: bool) -> None:
    """torch calls a fused step on an overflow too, and the step then skips itself on the device."""
    model = model_of(FP32)
    optimizer = adamw(fused=is_fused)(model.parameters())
    scaler = LossScaler(device="cpu") if ours else torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch = precision_shim.watch_updates(model, optimizer, every=1)
    train(model, optimizer, 3, scaler=scaler)
    (before,) = watch.figures()
    weights = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 3, scaler=scaler, size=float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    called = is_fused and not ours  # our scaler does not call the step that it skips
    (during,) = watch.figures()
    assert (before["step"], during["step"]) == (2, 3 if called else 2)
    assert during["weights"] < 0.05
    train(model, optimizer, 2, scaler=scaler, first=3)
    (after,) = watch.figures()
    assert after["step"] == (7 if called else 4)
    assert after["weights"] < 0.05


def test_gradients_that_a_fused_step_unscales_itself() -> None:
    """At eps of 1 the update grows with the gradient, so a wrongly scaled gradient would show."""

    def shares(scaler: Any) -> Any:
        model = model_of(BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1.0, fused=True)
        watch = precision_shim.watch_updates(model, optimizer, every=1)
        train(model, optimizer, 3, scaler=scaler)
        return watch.metrics()

    assert shares(torch.amp.GradScaler("cpu", init_scale=2.0**10)) == shares(None)


def test_a_learning_rate_of_zero_loses_nothing() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = precision_shim.watch_updates(model, optimizer, every=1)
    train(model, optimizer, 3)
    assert watch.metrics() == {}


def test_a_step_that_becomes_a_graph_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, watch = watched()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    train(model, optimizer, 3)
    assert watch.figures() == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    train(model, optimizer, 3)
    assert watch.figures()


# -- the sample ----------------------------------------------------------------------------------


def test_a_sample_of_a_large_model() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(700, 700), torch.nn.Linear(700, 4), torch.nn.Linear(4, 4)
    ).bfloat16()
    others = torch.nn.Linear(600, 600).bfloat16()
    weights = [p for p in model.parameters() if p.numel() > 700]
    small = [p for p in model.parameters() if p.numel() <= 700]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": small}], lr=1e-3)
    second = torch.optim.AdamW(others.parameters(), lr=1e-3)
    reference = Reference(optimizer)
    pairs = ((model, optimizer), (others, second))
    watches = [precision_shim.watch_updates(*pair, every=1) for pair in pairs]
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(4, 700).bfloat16()).float().square().mean().backward()
        others(torch.randn(4, 600).bfloat16()).float().square().mean().backward()
        optimizer.step()
        second.step()
        optimizer.zero_grad()
        second.zero_grad()
    groups = [group for one in watches for figures in one.figures() for group in figures["groups"]]
    assert sum(group["sampled"] for group in groups) <= sampling.MOST_ELEMENTS
    (first,) = watches[0].figures()
    large, little = first["groups"]
    assert little["sampled"] == little["elements"] == sum(p.numel() for p in small)
    assert large["sampled"] > sampling.MOST_ELEMENTS / 6
    # Allow five standard deviations of a random sample, each the largest possible for a share.
    hold(first, reference, within=5 * 0.5 / large["sampled"] ** 0.5)


def test_the_sample_is_spread_evenly_over_each_group() -> None:
    """Each tensor here holds the positions of its elements in its group."""
    whole = torch.arange(400_008).split([7, 100_000, 1, 0, 300_000])
    first, second, third = sampling.sample([whole, [torch.arange(50)], []], 1000)
    drawn = [position for tensor, at in first for position in at.raw(tensor).tolist()]
    assert len(drawn) == sum(at.count for _, at in first) <= 500
    assert {b - a for a, b in itertools.pairwise(drawn)} == {801}  # odd, and above 400008 / 500
    assert [at.raw(tensor).tolist() for tensor, at in second] == [list(range(50))]
    assert third == []
    many = [torch.zeros(10) for _ in range(2 * sampling.MOST_TENSORS)]
    assert len(sampling.sample([many], 10**6)[0]) == sampling.MOST_TENSORS


def test_the_columns_of_a_matrix_are_all_sampled() -> None:
    rows = torch.arange(2**20).reshape(-1, 1024) % 1024
    (((_, at),),) = sampling.sample([[rows]], 2**14)
    assert len(at.raw(rows).unique()) == 1024


# -- what it says --------------------------------------------------------------------------------


def test_a_warning_names_group_rate_and_remedy_once() -> None:
    model = model_of()
    optimizer = adamw(lr=7e-6)(groups_of(model))  # no other test warns at this rate
    precision_shim.watch_updates(model, optimizer, every=1)
    with ours() as said:
        train(model, optimizer, 6)
    weights = next(one for one in said if "parameter group 0" in one)
    assert "(lr 7e-06)" in weights
    assert "stored weights (bf16)" in weights
    assert "Keep the weights in fp32" in weights
    assert len(said) == len(set(said)) <= 2


def test_it_is_part_of_the_audit() -> None:
    model = model_of()
    optimizer = adamw()(model.parameters())
    precision_shim.watch_updates(model, optimizer, every=2)
    assert precision_shim.audit(model, optimizer).parts[0].updates is None
    train(model, optimizer, 3)
    audit = precision_shim.audit(model, optimizer)
    (part,) = audit.to_dict()["parts"]
    assert part["updates"]["step"] == part["updates"]["every"] == 2
    assert json.loads(json.dumps(audit.to_dict())) == audit.to_dict()
    assert precision_shim.Audit.from_dict(audit.to_dict()) == audit
    assert lost.CODE in {one.code for one in audit.notes}
    assert "group 0, lr 6e-06: weights" in str(audit)


def test_an_optimizer_with_a_rule_of_its_own_gets_a_sentence() -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = model_of()
    for optimizer in (torch.optim.Adagrad(model.parameters()), Own(model.parameters())):
        with pytest.warns(PrecisionShimWarning, match="has a rule of its own"):
            watch = precision_shim.watch_updates(model, optimizer, every=1)
        train(model, optimizer, 3)
        assert (watch.figures(), watch.metrics()) == ([], {})
        audit = precision_shim.audit(model, optimizer)
        assert lost.UNMEASURED in {one.code for one in audit.notes}


def test_what_goes_wrong_costs_the_meter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, watch = watched()

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Meter, "_take", fail)
    with pytest.warns(PrecisionShimWarning, match="out of luck"):
        train(model, optimizer, 3)
    assert watch.metrics() == {}


# -- coming and going ----------------------------------------------------------------------------


def hooks(optimizer: Any) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_uninstall_and_remove_take_the_hooks_out() -> None:
    model, optimizer, watch = watched()
    assert hooks(optimizer) == 2
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, 2)
    assert len(calls) == 2
    precision_shim.uninstall()
    assert hooks(optimizer) == 1
    newest = watch.figures()
    train(model, optimizer, 2)
    assert watch.figures() == newest
    precision_shim.watch_updates(model, optimizer).remove()
    assert hooks(optimizer) == 1
    assert meters.of(optimizer) is None


def test_a_second_call_changes_how_often() -> None:
    model = model_of()
    optimizer = adamw()(model.parameters())
    precision_shim.watch_updates(model, optimizer)
    watch = precision_shim.watch_updates(model, optimizer, every=1)
    assert hooks(optimizer) == 2
    train(model, optimizer, 2)
    assert [one["every"] for one in watch.figures()] == [1]


def test_nothing_keeps_an_optimizer_alive() -> None:
    model = model_of()
    optimizer = adamw()(model.parameters())
    precision_shim.watch_updates(model, optimizer, every=1)
    train(model, optimizer, 2)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_what_it_cannot_be_given() -> None:
    model = model_of()
    optimizer = adamw()(model.parameters())
    for every in (0, -1, 1.5, True, "2"):
        with pytest.raises(SettingsError, match="whole number >= 1"):
            precision_shim.watch_updates(model, optimizer, every)  # type: ignore[arg-type]
    with pytest.raises(AuditError, match="no steps to watch"):
        precision_shim.watch_updates(model, None)
    with pytest.raises(AuditError):
        precision_shim.watch_updates(model, 5)
    assert meters.metrics(None) == {}
