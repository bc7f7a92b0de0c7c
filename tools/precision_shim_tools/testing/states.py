"""How the stand-in for ``FusedAdam`` stores its states: dtypes, scales, remainders, state dicts.

The docstring of ``FusedAdam`` lists the differences from TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

_FP8 = torch.float8_e4m3fn
_LARGEST_SCALED = {
    # A scaled state's largest number is half of fp16's maximum, or the maximum of fp8 (e4m3).
    torch.float16: torch.finfo(torch.float16).max / 2.0,
    torch.uint8: torch.finfo(_FP8).max,
}


class StoredStates(torch.optim.Optimizer):
    """Base class of the stand-in ``FusedAdam``: stores the states, but has no ``step``.

    Attributes:
        master_weights: whether 16-bit parameters have masters.
        name_to_dtype_map: dtype of each state, by the state's name.
        store_param_remainders: whether a bf16 parameter's master is stored as its low 16 bits only.
    """

    master_weights: bool
    name_to_dtype_map: dict[str, torch.dtype]
    store_param_remainders: bool
    _scales: dict[torch.Tensor, dict[str, torch.Tensor]]

    def _all_params(self) -> Iterable[torch.Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _keeps_remainder(self, param: torch.Tensor, state_name: str) -> bool:
        return (
            self.store_param_remainders
            and state_name == "master_param"
            and param.dtype == torch.bfloat16
        )

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """Return one state of ``param`` as fp32, with its scale applied.

        For an fp32 state the stored tensor is returned, not a copy. For a remainder the int16
        tensor is returned, **not** the master; :func:`join_master` rebuilds the master.

        Raises:
            KeyError: the state does not exist.
            AssertionError: the stored tensor does not have the dtype in ``name_to_dtype_map``.
        """
        stored = self.state[param][state_name]
        dtype = self.name_to_dtype_map[state_name]
        if self._keeps_remainder(param, state_name):
            assert stored.dtype == torch.int16, stored.dtype
            return stored  # type: ignore[no-any-return]
        assert stored.dtype == dtype, (state_name, stored.dtype, dtype)
        if dtype == torch.float32:
            return stored  # type: ignore[no-any-return]
        if dtype == torch.bfloat16:
            return stored.float()  # type: ignore[no-any-return]
        if dtype == torch.uint8:
            stored = stored.view(_FP8)
        return stored.float().mul_(self._scales[param][state_name])  # type: ignore[no-any-return]

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Store a state of ``param``, scaled and rounded to the state's dtype.

        As in TransformerEngine, storing an fp16 state scales ``unscaled_state`` **in place**.

        Raises:
            AssertionError: ``unscaled_state`` is not fp32 (int16 for a remainder).
        """
        remainder = self._keeps_remainder(param, state_name)
        expected = torch.int16 if remainder else torch.float32
        assert unscaled_state.dtype == expected, (state_name, unscaled_state.dtype, expected)
        state = self.state[param]
        if state_name not in state:
            self._initialize_state(param, state_name, remainder)
        stored = state[state_name]
        if stored.dtype not in _LARGEST_SCALED:
            stored.copy_(unscaled_state)
            return
        scale = self._scales[param][state_name]
        unscaled_state = unscaled_state.to(stored.device)
        lowest, highest = torch.aminmax(unscaled_state)
        scale.copy_(torch.maximum(-lowest, highest) / _LARGEST_SCALED[stored.dtype])
        # A tensor of zeros has the scale 0. TransformerEngine prevents the division by a scale of 0
        # only for fp16.
        inverse = torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))
        if stored.dtype == torch.float16:
            stored.copy_(unscaled_state.mul_(inverse))
        else:
            stored.view(_FP8).copy_((unscaled_state * inverse).to(_FP8))

    def _initialize_state(self, param: torch.Tensor, state_name: str, remainder: bool) -> None:
        dtype = self.name_to_dtype_map[state_name]
        self.state[param][state_name] = torch.zeros(
            param.shape, dtype=torch.int16 if remainder else dtype, device=param.device
        )
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[state_name] = torch.ones(
                [1], dtype=torch.float32, device=param.device
            )

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Create the states of ``param``: moments of zero, the master equal to the parameter.

        In TransformerEngine 2.0 and earlier ``initialize_state`` has no second argument.
        """
        self._initialize_state(param, "exp_avg", False)
        self._initialize_state(param, "exp_avg_sq", False)
        if not self.master_weights:
            return
        self._initialize_state(param, "master_param", store_param_remainders)
        if not store_param_remainders:
            self.set_scaled_state(param, "master_param", param.detach().clone().float())

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with every state as fp32, except int16 remainders.

        fp32 states are the live tensors, not copies.
        """
        state_dict = super().state_dict()
        by_index = self._params_by_index(state_dict)
        for index, state in state_dict["state"].items():
            if index in by_index:
                param = by_index[index]
                state_dict["state"][index] = {
                    name: self.get_unscaled_state(param, name) for name in state
                }
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and states as TransformerEngine does, and round the states to their dtypes.

        A state that this optimizer does not store as a remainder is first cast to fp32, **whatever
        its dtype**: another optimizer's int16 remainder loads as a wrong master without an error.

        Raises:
            ValueError: the groups do not match.
            AssertionError: this optimizer stores a remainder, but the loaded state is not int16.
        """
        super().load_state_dict(state_dict)
        by_index = self._params_by_index(state_dict)
        for index, state in state_dict["state"].items():
            if index not in by_index:
                continue
            param = by_index[index]
            # torch has just cast the states to the parameter's dtype: discard these casts.
            self.state[param] = {}
            for name, value in state.items():
                if value is None:
                    continue
                remainder = self._keeps_remainder(param, name)
                self.set_scaled_state(param, name, value if remainder else value.float())

    def _params_by_index(self, state_dict: dict[str, Any]) -> dict[Any, torch.Tensor]:
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        return dict(zip(indices, self._all_params(), strict=False))
