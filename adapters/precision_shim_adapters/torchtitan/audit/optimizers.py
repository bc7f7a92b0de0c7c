"""Audit torchtitan's two trainers; report as metrics which share of updates rounding loses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.adapting.audit import meters, tell_asked, watch
from precision_shim.adapting.dtypes import name_of, parse_dtype
from precision_shim.adapting.rollouts import ENGINE_NAMES

from ...torch_fp16 import ScaledTraining
from ..config import KEY, written
from ..training.endpoints import remake
from ..training.trainers import FRAMEWORK, METRICS, POLICY, PRETRAINING, RL, TRAINER

FEATURE = "audit"
_BUILT: dict[str, Any] = {
    "feature": FEATURE,
    "why": "model parts and optimizers stand together, and the scaler was made",
    "delete_when": "torchtitan says which precision its optimizers have",
    "relies_on": ("optimizers", "model_parts"),
}
"""Arguments of the seams on the trainers' ``__init__``."""
_LOST = "torchtitan says which of its updates are lost to rounding"


def _see(trainer: Any, subject: str) -> None:
    optimizers = list(trainer.optimizers)
    if not optimizers:
        return
    prefix = "trainer." if subject == "policy" else ""
    watch(
        FRAMEWORK,
        subject,
        trainer.optimizers,
        # In a skipped step no inner optimizer steps. All have states once the last has stepped.
        inner=optimizers[-1],
        model=trainer.model_parts,
        scaler=(trainer, ScaledTraining.scaler_of),
        fp32_key=f"{prefix}training.dtype=float32",
        wrote=written(trainer.config.training, prefix),
    )


@seam(f"{POLICY}.__init__", group=RL, optional=True, **_BUILT)
def policy(call: Call, generator_dtype: Any = None) -> None:
    """Audit the optimizers of an RL trainer, which sends its weights in the generator's dtype."""
    call.proceed()
    _see(call.instance, "policy")
    dtype = parse_dtype(str(generator_dtype or ""))
    if dtype is not None:
        short = name_of(dtype)
        tell_asked(FRAMEWORK, ENGINE_NAMES.get(short, short), KEY)


@seam(f"{TRAINER}.__init__", group=PRETRAINING, **_BUILT)
def trainer(call: Call) -> None:
    """Audit the optimizers of a pre-training or SFT trainer."""
    call.proceed()
    _see(call.instance, "model")


@seam(
    f"{POLICY}.optim_step",
    FEATURE,
    group="rl metrics",
    why="its output has the figures of a step",
    delete_when=_LOST,
    relies_on=("OptimStepOutput", "optimizers", "concurrent_endpoint"),
    optional=True,
    replaces=True,
)
def report_from_endpoint(endpoint: Any) -> Any:
    """Make an endpoint that reports the shares of updates lost to rounding."""

    async def step(trainer: Any, own: Callable[[], Awaitable[Any]]) -> Any:
        output = await own()
        figures = meters.metrics(getattr(trainer, "optimizers", None), "trainer/")
        if figures:
            output.metrics.update(figures)
        return output

    return remake(endpoint, step)


@seam(
    "torchtitan.components.metrics:MetricsProcessor.log",
    FEATURE,
    group=METRICS,
    why="the figures of a step, where they are logged",
    delete_when=_LOST,
    relies_on=("optimizers",),
)
def report_in_log(call: Call, extra_metrics: Any = None) -> Any:
    """Log, next to the grad norm, the shares of updates lost to rounding."""
    figures = meters.metrics(call.instance.optimizers)
    if figures:
        call.arguments["extra_metrics"] = {**(extra_metrics or {}), **figures}
    return call.proceed()
