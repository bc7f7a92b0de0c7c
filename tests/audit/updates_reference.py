"""Counts lost updates anew: over every element, compared with torch's own AdamW in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from precision_shim_tools.testing.fused_adam import join_master

Shares = dict[str, "float | None"]
_KINDS = ("weights", "exp_avg_sq", "rollout")


def local(tensor: Any) -> Any:
    """This rank's share of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def stored(optimizer: Any, parameter: Any) -> torch.Tensor:
    """The weights from which training continues (a master, if there is one), in fp64."""
    master = optimizer.state.get(parameter, {}).get("master_param")
    if master is None or parameter.dtype is torch.float32:
        return local(parameter).detach().double().clone()
    if master.dtype is torch.int16:
        return join_master(parameter.detach(), master).double()
    return optimizer.get_unscaled_state(parameter, "master_param").double()


def _moment(optimizer: Any, parameter: Any, name: str) -> torch.Tensor:
    state = optimizer.state.get(parameter, {})
    if name not in state:
        return torch.zeros_like(local(parameter), dtype=torch.float64)
    if hasattr(optimizer, "get_unscaled_state"):
        return optimizer.get_unscaled_state(parameter, name).double().clone()
    return local(state[name]).double().clone()


def _ideal(optimizer: Any, group: Any, parameter: Any, gradient: Any) -> tuple[Any, Any, Any]:
    """The update, and the second moment before and after it, by torch's AdamW in fp64."""
    weights = torch.nn.Parameter(stored(optimizer, parameter))
    before = weights.detach().clone()
    weights.grad = gradient
    plain = torch.optim.AdamW(
        [weights],
        lr=float(group["lr"]),
        betas=tuple(group["betas"]),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )
    made = optimizer.state.get(parameter, {}).get("step", group.get("step", 0))
    second = _moment(optimizer, parameter, "exp_avg_sq")
    plain.state[weights] = {
        "step": torch.tensor(float(made)),
        "exp_avg": _moment(optimizer, parameter, "exp_avg"),
        "exp_avg_sq": second.clone(),
    }
    plain.step()
    return weights.detach() - before, second, plain.state[weights]["exp_avg_sq"]


class Reference:
    """Counts lost updates at every step; a test may make it before or after the meter.

    Args:
        optimizer: the torch optimizer.
        copy_of: returns the dtype of a parameter's rollout copy; ``None`` if the copy is not
            counted.

    Attributes:
        shares: maps each step, counted from 1, to the shares over all elements.
    """

    def __init__(
        self,
        optimizer: Any,
        copy_of: Callable[[Any], torch.dtype | None] = lambda _: torch.bfloat16,
    ) -> None:
        self.shares: dict[int, Shares] = {}
        self._copy_of = copy_of
        self._held: list[Any] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _copy(self, parameter: Any, weights: torch.Tensor) -> torch.Tensor | None:
        dtype = self._copy_of(parameter)
        if dtype is None:
            return None
        if parameter.dtype is dtype:
            return local(parameter).detach().clone()
        return weights.to(dtype)

    def _before(self, optimizer: Any, *_: Any) -> None:
        self._held = []
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    # The stand-in for FusedAdam reads one of two gradients, depending on
                    # ``use_decoupled_grad``.
                    fused = getattr(optimizer, "use_decoupled_grad", False)
                    gradient = p.decoupled_grad if fused else p.grad
                    if gradient is None:
                        continue
                    with torch.enable_grad():
                        ideal = _ideal(optimizer, group, p, local(gradient).double())
                    weights = stored(optimizer, p)
                    self._held.append((p, weights, self._copy(p, weights), *ideal))

    def _after(self, optimizer: Any, *_: Any) -> None:
        counts = {name: [0, 0] for name in _KINDS}
        for p, weights, copy, update, before, after in self._held:
            now, moved, decays = stored(optimizer, p), update != 0, after < before
            stays = {
                "weights": (moved, now == weights),
                "exp_avg_sq": (decays, _moment(optimizer, p, "exp_avg_sq") == before),
            }
            if copy is not None:
                stays["rollout"] = (moved, self._copy(p, now) == copy)
            for name, (which, same) in stays.items():
                counts[name][0] += int(which.sum())
                counts[name][1] += int((which & same).sum())
        self.shares[len(self.shares) + 1] = {
            name: lost / updates if updates else None for name, (updates, lost) in counts.items()
        }


def hold(figures: Any, reference: Reference, within: float = 0.001) -> None:
    """Assert that the meter and the reference agree at a step, within 0.1 percentage points.

    Args:
        figures: ``UpdateWatch.figures()[...]`` or ``AuditPart.updates``.
        reference: of the same optimizer.
        within: the largest allowed difference.
    """
    expected = reference.shares[figures["step"]]
    for name in _KINDS:
        found, wanted = figures[name], expected[name]
        assert (found is None) == (wanted is None), (name, figures, expected)
        if found is not None and wanted is not None:
            assert abs(found - wanted) <= within, (name, found, wanted)
