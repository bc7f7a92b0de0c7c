"""Part 6: compares the stand-in of precision_shim.testing with TransformerEngine's FusedAdam.

Both take one step from the same states with the same gradients, for every legal combination of
dtypes. The states' names and dtypes, the moments after the first step, and the states after a load
must be equal bit for bit. Other values may differ by one unit in the last place of their dtype: a
GPU's compiler may contract a product and a sum into one rounding.

A dry run has no real FusedAdam, and compares the stand-in with ``adam_by_hand.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..adam_by_hand import AdamByHand
from ..bench import Bench
from ..place import Place

BF16, FP16, FP32, FP8, INT16 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.int16,
)
STATES = ("exp_avg", "exp_avg_sq", "master_param")
MOMENTS = (FP32, BF16, FP16, FP8)
STEPS, DRY_STEPS = 8, 2
SHAPES = ((17, 33), (257,), (1,))
BETA1 = 0.9
SLACK = 2.0**-8
"""Extra tolerance, in units in the last place: an fp16 or fp8 tensor's scale is rounded too."""
LARGEST = {FP16: torch.finfo(FP16).max / 2, FP8: torch.finfo(torch.float8_e4m3fn).max}
# Number of stored mantissa bits, and the exponent of the smallest normal number.
FORMATS = {FP32: (23, -126), BF16: (7, -126), FP16: (10, -14), FP8: (3, -6)}


@dataclass(frozen=True)
class Combination:
    """Dtypes of one optimizer; an int16 ``master`` means remainders."""

    param: torch.dtype
    master: torch.dtype | None
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype

    @property
    def arguments(self) -> dict[str, Any]:
        """For FusedAdam."""
        values: dict[str, Any] = {
            "lr": 1e-3,
            "betas": (BETA1, 0.95),
            "weight_decay": 0.1,
            "master_weights": self.master is not None,
            "exp_avg_dtype": self.exp_avg,
            "exp_avg_sq_dtype": self.exp_avg_sq,
        }
        if self.master is not None:
            values["master_weight_dtype"] = FP32 if self.master is INT16 else self.master
            values["store_param_remainders"] = self.master is INT16
        return values

    def __str__(self) -> str:
        short = [str(one).removeprefix("torch.") for one in (self.param, self.master)]
        moments = [str(one).removeprefix("torch.") for one in (self.exp_avg, self.exp_avg_sq)]
        return f"{short[0]}, master {short[1]}, moments {'/'.join(moments)}"


@dataclass
class Found:
    """Differences that the comparison found for one combination."""

    worst: dict[str, float] = field(default_factory=dict)
    equal: int = 0
    compared: int = 0
    defined: list[str] = field(default_factory=list)
    """Values that should be equal bit for bit and are not."""

    def note(self, name: str, ulps: torch.Tensor, bits: torch.Tensor) -> None:
        """Add the differences of one tensor."""
        self.worst[name] = max(self.worst.get(name, 0.0), float(ulps.max()))
        self.equal += int(bits.sum())
        self.compared += bits.numel()


def combinations() -> Iterator[Combination]:
    """All combinations of dtypes that any release may accept."""
    masters: dict[torch.dtype, tuple[torch.dtype | None, ...]] = {
        BF16: (None, FP32, FP16, INT16),
        FP16: (None, FP32, FP16),
        FP32: (None, FP32, FP16),
    }
    for param, choices in masters.items():
        for master, first, second in itertools.product(choices, MOMENTS, MOMENTS):
            yield Combination(param, master, first, second)


def run(bench: Bench) -> None:
    from precision_shim_tools.testing import fused_adam_for

    place = bench.place
    real = place.fused_adam()
    version = getattr(real, "te_version", None) or _version()
    stand_in = fused_adam_for(version)
    legality(bench, place, real, stand_in)
    other: Any = AdamByHand if bench.dry else real
    name = "a loop by hand" if bench.dry else f"FusedAdam {version}"
    found: dict[str, Found] = {}
    errors: dict[str, str] = {}
    for one in combinations():
        if not _legal(place, stand_in, one):
            continue
        try:
            found[str(one)] = compare(place, stand_in, other, one)
            round_trip(place, real, one, found[str(one)])
        except Exception as error:  # recorded, so that the other combinations still run
            errors[str(one)] = f"{type(error).__name__}: {str(error)[:300]}"
    report(bench, name, found, errors)


def report(bench: Bench, name: str, found: dict[str, Found], errors: dict[str, str]) -> None:
    worst = max((max(one.worst.values()) for one in found.values()), default=0.0)
    equal, compared = (
        sum(getattr(one, key) for one in found.values()) for key in ("equal", "compared")
    )
    bench.record(
        f"the stand-in beside {name}",
        f"{len(found)} combinations of dtypes, {DRY_STEPS if bench.dry else STEPS} steps each: "
        f"{equal / max(compared, 1):.2%} of the numbers bit for bit, the worst {worst:.2f} units "
        f"in the last place apart; {len(errors)} combinations ended in an error",
        beside=name,
        combinations={key: {"worst_ulps": one.worst} for key, one in found.items()},
        equal=equal,
        compared=compared,
        worst_ulps=worst,
        bits={key: one.defined for key, one in found.items() if one.defined},
        errors=errors,
    )
    bench.check(f"every legal combination steps beside {name}", bool(found) and not errors)
    bench.check(
        f"beside {name}: states, their dtypes, the first step's moments and what a state dict "
        "brings back are the same bit for bit",
        not any(one.defined for one in found.values()),
        where={key: one.defined for key, one in found.items() if one.defined},
    )
    bench.check(
        f"beside {name}: all else is within one unit in the last place",
        worst <= 1.0 + SLACK,
        worst=worst,
        where=[key for key, one in found.items() if max(one.worst.values()) > 1.0 + SLACK],
    )


# -- legality --------------------------------------------------------------------------------


def legality(bench: Bench, place: Place, real: Any, stand_in: Any) -> None:
    """Compare which dtypes the constructors of ``real`` and ``stand_in`` accept."""
    unlike = []
    count = 0
    asked = itertools.chain(
        combinations(),
        (Combination(BF16, BF16, FP32, FP32), Combination(BF16, FP32, torch.float64, FP32)),
    )
    for one in asked:
        count += 1
        if _legal(place, real, one) != _legal(place, stand_in, one):
            unlike.append(str(one))
    bench.record(
        "what the constructors take",
        f"the same in {count - len(unlike)} of {count} combinations",
        unlike=unlike,
    )
    bench.check("the stand-in's constructor takes what FusedAdam's takes", not unlike)


def _legal(place: Place, adam: Any, one: Combination) -> bool:
    param = torch.nn.Parameter(torch.zeros(2, dtype=one.param, device=place.device))
    try:
        adam([param], **one.arguments)
    except (RuntimeError, TypeError):
        return False
    return True


def _version() -> str:
    import transformer_engine

    return str(transformer_engine.__version__)


# -- one step from the same states -----------------------------------------------------------


def compare(place: Place, stand_in: Any, other: Any, one: Combination) -> Found:
    """Run some steps; before each step copy the other optimizer's states into the stand-in."""
    found = Found()
    generator = torch.Generator().manual_seed(5)
    ours, theirs = (_params(place, one.param) for _ in range(2))
    mine, its = stand_in(ours, **one.arguments), other(theirs, **one.arguments)
    for step in range(DRY_STEPS if place.dry else STEPS):
        before = []
        for a, b in zip(ours, theirs, strict=True):
            with torch.no_grad():
                a.copy_(b)
            if step:
                _take_over(mine, a, its, b)
            grad = torch.randn(a.shape, generator=generator).to(place.device, one.param)
            a.grad, b.grad = grad, grad.clone()
            before.append((_unscaled(its, b, "exp_avg") if step else None, grad.float()))
        mine.step()
        its.step()
        for a, b, (old, grad) in zip(ours, theirs, before, strict=True):
            _hold(found, one, (mine, a), (its, b), (old, grad))
    return found


def _params(place: Place, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Make parameters with absolute values from 0.5 to 2, which are large compared with a step."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for shape in SHAPES:
        size = 0.5 + 1.5 * torch.rand(shape, generator=generator)
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        made.append(torch.nn.Parameter((size * sign).to(place.device, dtype)))
    return made


def _names(optimizer: Any, param: Any) -> list[str]:
    return [key for key in optimizer.state[param] if key in STATES]


def _take_over(mine: Any, a: Any, its: Any, b: Any) -> None:
    for name in _names(its, b):
        mine.set_scaled_state(a, name, _unscaled(its, b, name))


def _unscaled(optimizer: Any, param: Any, name: str) -> torch.Tensor:
    value: torch.Tensor = optimizer.get_unscaled_state(param, name)
    return value.detach().clone()


def _hold(
    found: Found,
    one: Combination,
    ours: tuple[Any, Any],
    other: tuple[Any, Any],
    terms: tuple[torch.Tensor | None, torch.Tensor],
) -> None:
    """Compare a parameter and its states after a step."""
    (mine, a), (its, b), (old, grad) = ours, other, terms
    names = _names(mine, a)
    if sorted(names) != sorted(_names(its, b)):
        found.defined.append(f"states {names} and {_names(its, b)}")
        return
    values = {"param": (a.detach(), b.detach(), one.param)}
    for name in names:
        left, right = _unscaled(mine, a, name), _unscaled(its, b, name)
        if left.dtype is not right.dtype:
            found.defined.append(f"{name} is {left.dtype} and {right.dtype}")
        values[name] = (left, right, _kept_as(one, name))
    if "master_param" in values and one.master is INT16 and one.param is BF16:
        from precision_shim.precision.remainders import join_master

        left, right, _ = values["master_param"]
        whole = join_master(a.detach(), left), join_master(b.detach(), right)
        values["master_param"] = (*whole, FP32)
    for name, (left, right, dtype) in values.items():
        magnitude = torch.maximum(left.float().abs(), right.float().abs())
        if name == "exp_avg" and old is not None:
            # If the two terms cancel, the rounding error of the larger term remains.
            parts = torch.maximum((BETA1 * old).abs(), ((1 - BETA1) * grad).abs())
            magnitude = torch.maximum(magnitude, parts)
        bits = left.float() == right.float()
        apart = (left.float() - right.float()).abs() / spacing(dtype, magnitude)
        found.note(name, apart, bits)
        defined = name.startswith("exp_avg") and dtype in (FP32, BF16)
        if old is None and defined and not bool(bits.all()):
            found.defined.append(f"{name} after the first step")


def _kept_as(one: Combination, name: str) -> torch.dtype:
    if name == "master_param":
        assert one.master is not None
        return one.master
    return one.exp_avg if name == "exp_avg" else one.exp_avg_sq


def spacing(dtype: torch.dtype, magnitude: torch.Tensor) -> torch.Tensor:
    """The distance between neighbouring numbers of a dtype, at these magnitudes.

    An fp16 or fp8 state has a scale, which maps the tensor's largest value to a fixed number.
    """
    bits, lowest = FORMATS[dtype]
    scale = torch.ones((), device=magnitude.device)
    if dtype in LARGEST:
        scale = (magnitude.max() / LARGEST[dtype]).clamp_min(torch.finfo(FP32).tiny)
    # A real fp16 parameter has no scale; its absolute values are from 0.5 to 2.
    exponent = torch.floor(torch.log2((magnitude / scale).clamp_min(2.0**lowest)))
    return torch.exp2(exponent - bits) * scale


def round_trip(place: Place, adam: Any, one: Combination, found: Found) -> None:
    """Load an optimizer's state dict into another optimizer, and compare their states."""
    params, again = (_params(place, one.param) for _ in range(2))
    first, second = adam(params, **one.arguments), adam(again, **one.arguments)
    for param in params:
        param.grad = torch.full_like(param, 0.25)
    first.step()
    second.load_state_dict(first.state_dict())
    for a, b in zip(params, again, strict=True):
        for name in _names(first, a):
            dtype = _kept_as(one, name)
            if dtype in (FP16, FP8):
                continue  # they get a new scale
            if not torch.equal(_unscaled(first, a, name), _unscaled(second, b, name)):
                found.defined.append(f"{name} from a state dict")
