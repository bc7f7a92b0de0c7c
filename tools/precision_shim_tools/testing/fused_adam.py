"""A pure-torch stand-in for TransformerEngine's ``FusedAdam``; the class lists the differences.

Arguments, checks, state layout, ``state_dict`` and rounding follow each release, as read in 2026-11
in ``pytorch/optimizers/fused_adam.py`` of 1.13, 2.1, 2.3, 2.11, 2.14, 2.18, 2.19 and 2.20.2, and in
``common/multi_tensor/adam.cu`` up to 2.18.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from precision_shim.precision.releases import release
from precision_shim.precision.remainders import join_master, split_master

from . import releases
from .states import StoredStates

__all__ = ["FusedAdam", "FusedSGD", "fused_adam_for", "join_master", "split_master"]


class FusedAdam(StoredStates):
    """Adam with configurable state dtypes, as in TransformerEngine 2.11, on any device.

    A step computes in fp32, and rounds the stored values to nearest. The arguments are
    TransformerEngine's. ``use_decoupled_grad`` reads ``param.decoupled_grad``, not ``param.grad``;
    ``store_param_remainders`` has an effect only with fp32 masters. :func:`fused_adam_for` returns
    the class for another release.

    State per parameter (``optimizer.state[param]``), each of the parameter's shape:

    * ``exp_avg``, ``exp_avg_sq``: fp32 or bf16; or, each with one fp32 scale, fp16 or uint8 (the
      bits of fp8 e4m3).
    * ``master_param``, only with ``master_weights``: fp32; fp16 with one fp32 scale; or int16 for a
      bf16 parameter with ``store_param_remainders`` (see :func:`split_master`). An fp32 parameter
      also has a master, which is filled once and never updated.

    Steps are counted per parameter group (``group["step"]``). Differences from TransformerEngine:

    * Speed and memory are not those of the CUDA kernels: temporary fp32 tensors are made for one
      parameter at a time, not for a group.
    * The last bit of an update may differ, because a GPU compiler may contract ``a * b + c``.
    * ``capturable=True`` raises an error after TransformerEngine's checks.
    * Sparse gradients and parameters of other dtypes than fp32, fp16 and bf16 raise no error.
    * fp8 *parameters* (``Float8Tensor`` and its relatives) and DTensor states are not supported.
    * fp8 *moments* never contain a transposed copy.

    Raises:
        RuntimeError: an argument or a dtype is illegal in the release; ``amsgrad`` always is.
        NotImplementedError: ``capturable=True`` with otherwise legal arguments.
    """

    __precision_shim_stand_in__ = True
    te_version: str = releases.DEFAULT_VERSION

    def __init__(  # noqa: PLR0917 - TransformerEngine's signature
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam (stand-in): AMSGrad is not supported.")
        master = master_weight_dtype if master_weights else None
        releases.check_arguments(
            self.te_version,
            master,
            exp_avg_dtype,
            exp_avg_sq_dtype,
            capturable=capturable,
            remainders=store_param_remainders,
        )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master == torch.float32
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop (default) or zero the gradients that this optimizer reads, and no others.

        ``None`` means the constructor's deprecated ``set_grad_none``, or else True.
        """
        if set_to_none is None:
            set_to_none = self.set_grad_none is not False
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none)
            return
        for param in self._all_params():
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            else:
                param.decoupled_grad.zero_()  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Take an Adam step for all parameters that have a gradient, of any floating dtype.

        As in TransformerEngine, infinite and NaN gradients are not checked, and make parameters and
        states non-finite. ``grad_scaler`` is ignored: it is only for ``capturable``.

        Raises:
            RuntimeError: a group contains both fp16 and bf16 parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"] or release(self.te_version) >= releases.EMPTY_GROUPS_COUNT_SINCE:
                group["step"] = group.get("step", 0) + 1
            if group["params"]:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        ready: list[tuple[torch.Tensor, torch.Tensor]] = []
        gradient = "decoupled_grad" if self.use_decoupled_grad else "grad"
        for param in group["params"]:
            if not self.state[param]:
                # The arguments of initialize_state() differ between the releases.
                super().initialize_state(param, self._keeps_remainder(param, "master_param"))
            grad = getattr(param, gradient, None)
            if grad is not None:
                ready.append((param, grad))
        # TransformerEngine's kernels accept one list of 16-bit parameters, all of the same dtype.
        if {torch.float16, torch.bfloat16} <= {param.dtype for param, _ in ready}:
            raise RuntimeError(
                "FusedAdam (stand-in): fp16 and bf16 parameters cannot share a parameter group."
            )
        for param, grad in ready:
            self._step_param(group, param, grad)

    def _step_param(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[param]
        exp_avg = self.get_unscaled_state(param, "exp_avg")
        exp_avg_sq = self.get_unscaled_state(param, "exp_avg_sq")
        master: torch.Tensor | None = None
        remainder = self._keeps_remainder(param, "master_param")
        if param.dtype == torch.float32 or not self.master_weights:
            value = param.detach().float()
        elif remainder:
            value = join_master(param.detach(), state["master_param"])
        else:
            master = value = self.get_unscaled_state(param, "master_param")

        grad = grad.detach().float()
        # The kernel receives hyperparameters in fp32, and also computes 1 - beta in fp32.
        beta1, beta2, lr, eps, decay = (
            _as_fp32(x) for x in (*group["betas"], group["lr"], group["eps"], group["weight_decay"])
        )
        if group["bias_correction"]:
            correction1 = _as_fp32(1.0 - beta1 ** group["step"])
            correction2 = _as_fp32(1.0 - beta2 ** group["step"])
        else:
            correction1 = correction2 = 1.0
        if not self.adam_w_mode:
            grad = grad + decay * value
        exp_avg.mul_(beta1).add_(grad * _as_fp32(1.0 - beta1))
        exp_avg_sq.mul_(beta2).add_((grad * _as_fp32(1.0 - beta2)).mul_(grad))
        denominator = (exp_avg_sq / correction2).sqrt_().add_(eps)
        update = (exp_avg / correction1).div_(denominator)
        if self.adam_w_mode:
            update.add_(decay * value)
        value.sub_(update.mul_(lr))

        if remainder:
            rounded, low = split_master(value)
            param.copy_(rounded)
            state["master_param"].copy_(low)
        elif value.data_ptr() != param.data_ptr():
            param.copy_(value)
        self.set_scaled_state(param, "exp_avg", exp_avg)
        self.set_scaled_state(param, "exp_avg_sq", exp_avg_sq)
        if master is not None:
            self.set_scaled_state(param, "master_param", master)


def _as_fp32(number: Any) -> float:
    return float(torch.tensor(float(number), dtype=torch.float32))


_WITH_REMAINDERS = inspect.signature(FusedAdam.__init__)
_WITHOUT_REMAINDERS = _WITH_REMAINDERS.replace(
    parameters=[
        parameter
        for name, parameter in _WITH_REMAINDERS.parameters.items()
        if name != "store_param_remainders"
    ]
)


class _FusedAdamWithoutRemainders(FusedAdam):
    """``FusedAdam`` before TransformerEngine 2.1; pass the arguments after ``amsgrad`` by name."""

    te_version = "2.0.0"

    def __init__(self, *args: Any, **options: Any) -> None:
        _WITHOUT_REMAINDERS.bind(self, *args, **options)
        super().__init__(*args, **options)

    __init__.__signature__ = _WITHOUT_REMAINDERS  # type: ignore[attr-defined]

    def initialize_state(self, param: torch.Tensor) -> None:  # type: ignore[override]
        super().initialize_state(param, False)


def fused_adam_for(version: str) -> type[FusedAdam]:
    """Return the stand-in for ``FusedAdam`` of TransformerEngine ``version``, 1.13 or newer.

    Since 2.1 there are remainders (``store_param_remainders``, also of ``initialize_state``), since
    2.3 bf16 moments, and since 2.14 two bf16 moments with ``capturable``. Since 2.19 steps are
    counted for groups without parameters, too.

    Raises:
        ValueError: ``version`` is not a version, or is older than 1.13.
    """
    if release(version) < releases.OLDEST:
        raise ValueError(f"no stand-in for TransformerEngine {version}: known from 1.13 on")
    if version == releases.DEFAULT_VERSION:
        return FusedAdam
    has_remainders = release(version) >= releases.PARAM_REMAINDERS_SINCE
    base = FusedAdam if has_remainders else _FusedAdamWithoutRemainders
    return type("FusedAdam", (base,), {"te_version": version, "__doc__": base.__doc__})


class FusedSGD(torch.optim.SGD):
    """torch's SGD under the name that Megatron-core imports together with ``FusedAdam``.

    It lacks the features of TransformerEngine's SGD (master gradients, in-kernel loss scale).
    """

    __precision_shim_stand_in__ = True
