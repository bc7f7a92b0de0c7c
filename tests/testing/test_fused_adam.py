"""The stand-in compared with torch's Adam: its states, its checkpoints, its legality."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

from precision_shim_tools.testing import FusedAdam, fused_adam_for, join_master


def _train(cls: Any, params: list[torch.nn.Parameter], steps: int, **kwargs: Any) -> Any:
    optimizer = cls(params, **kwargs)
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for param in params:
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to(param.dtype)
        optimizer.step()
    return optimizer


def _params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (11,), (1,)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


# -- against torch ---------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_with_fp32_states_it_is_torchs_adam(decay: float, decoupled: bool) -> None:
    ours, theirs = _params(), _params()
    steps, rate = 20, 1e-2
    arguments = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": decay}
    mine = _train(FusedAdam, ours, steps, adam_w_mode=decoupled, **arguments)
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    other = _train(reference, theirs, steps, **arguments)
    # In either loop a step rounds a parameter twice (decay, update), by half of 2**-23 at most. The
    # update is about as large as the learning rate, and is itself rounded a few times.
    rtol, atol = steps * 2.0**-22, steps * rate * 2.0**-20
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine.state[a][name], other.state[b][name])
    assert mine.param_groups[0]["step"] == 20


def test_bf16_params_with_a_master_follow_the_fp32_run_exactly() -> None:
    bf16 = _params(torch.bfloat16)
    fp32 = [torch.nn.Parameter(p.detach().float()) for p in bf16]
    generator = torch.Generator().manual_seed(1)
    kept = FusedAdam(bf16, lr=1e-2, master_weights=True)
    plain = FusedAdam(fp32, lr=1e-2)
    for _ in range(10):
        for a, b in zip(bf16, fp32, strict=True):
            a.grad = torch.randn(a.shape, generator=generator).bfloat16()
            b.grad = a.grad.float()
        kept.step()
        plain.step()
    for a, b in zip(bf16, fp32, strict=True):
        assert torch.equal(kept.state[a]["master_param"], b)
        assert torch.equal(a, b.bfloat16())


def test_remainders_follow_the_fp32_master_bit_for_bit() -> None:
    one, two = _params(torch.bfloat16), _params(torch.bfloat16)
    short = _train(FusedAdam, one, 50, lr=1e-2, master_weights=True, store_param_remainders=True)
    whole = _train(FusedAdam, two, 50, lr=1e-2, master_weights=True)
    for a, b in zip(one, two, strict=True):
        remainder = short.state[a]["master_param"]
        assert remainder.dtype == torch.int16
        assert torch.equal(join_master(a.detach(), remainder), whole.state[b]["master_param"])


# -- state dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-9), (torch.uint8, 2**-3)]
)
def test_moments_are_rounded_to_their_dtype(dtype: torch.dtype, tolerance: float) -> None:
    rounded, exact = _params()[:1], _params()[:1]
    low = _train(FusedAdam, rounded, 1, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    high = _train(FusedAdam, exact, 1)
    (a,), (b,) = rounded, exact
    # The stand-in updates the parameter before it rounds the moments.
    assert torch.equal(a, b)
    for name in ("exp_avg", "exp_avg_sq"):
        assert low.state[a][name].dtype == dtype
        unscaled = low.get_unscaled_state(a, name)
        assert unscaled.dtype == torch.float32
        largest = high.state[b][name].abs().max()
        assert (unscaled - high.state[b][name]).abs().max() <= tolerance * largest
        assert not torch.equal(unscaled, high.state[b][name])
    if dtype == torch.bfloat16:
        assert torch.equal(low.state[a]["exp_avg"], high.state[b]["exp_avg"].bfloat16())


# -- checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize("remainders", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_a_loaded_optimizer_goes_on_bit_for_bit(dtype: torch.dtype, remainders: bool) -> None:
    arguments = {
        "lr": 1e-2,
        "master_weights": True,
        "store_param_remainders": remainders,
        "exp_avg_dtype": dtype,
        "exp_avg_sq_dtype": dtype,
    }
    straight = _params(torch.bfloat16)
    first = _train(FusedAdam, straight, 4, **arguments)
    saved = copy.deepcopy(first.state_dict())
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in straight]
    second = FusedAdam(resumed, **arguments)
    second.load_state_dict(saved)
    for params, optimizer in ((straight, first), (resumed, second)):
        generator = torch.Generator().manual_seed(11)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            optimizer.step()
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            assert torch.equal(first.state[a][name], second.state[b][name])


# -- legality --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"amsgrad": True},
        {"master_weights": True, "master_weight_dtype": torch.bfloat16},
        {"exp_avg_dtype": torch.float64},
        {"exp_avg_sq_dtype": "bf16"},
        {"exp_avg_dtype": "fp32"},
        {"capturable": True, "exp_avg_dtype": torch.bfloat16},
        {"capturable": True, "exp_avg_sq_dtype": torch.float16},
        {"capturable": True, "store_param_remainders": True},
        {"capturable": True, "master_weights": True, "master_weight_dtype": torch.float16},
    ],
)
def test_illegal_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError) as caught:
        FusedAdam(_params(), **arguments)
    assert not isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    ("version", "remainders", "bf16_moments", "capturable_bf16"),
    [
        ("1.13.0", False, False, False),
        ("2.0.0", False, False, False),
        ("2.1.0", True, False, False),
        ("2.2.1", True, False, False),
        ("2.3.0", True, True, False),
        ("2.11.0", True, True, False),
        ("2.14.0", True, True, True),
        ("2.18.0", True, True, True),
        ("2.20.2", True, True, True),
    ],
)
def test_each_version_has_its_own_rules(
    version: str, remainders: bool, bf16_moments: bool, capturable_bf16: bool
) -> None:
    cls = fused_adam_for(version)
    assert cls.te_version == version
    assert ("store_param_remainders" in inspect.signature(cls).parameters) is remainders
    assert len(inspect.signature(cls.initialize_state).parameters) == (3 if remainders else 2)
    both = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    if bf16_moments:
        cls(_params(), **both)
    else:
        with pytest.raises(RuntimeError, match="exp_avg"):
            cls(_params(), **both)
    if bf16_moments:
        expected = NotImplementedError if capturable_bf16 else RuntimeError
        with pytest.raises(expected):
            cls(_params(), capturable=True, **both)
    _train(cls, _params(torch.bfloat16), 2, master_weights=True)
