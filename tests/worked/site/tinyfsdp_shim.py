"""precision_shim for tinyfsdp: fp16 trains with a loss scale and resumes bit for bit.

Entered at the engine's own methods, which every caller uses. Not touched: bfloat16 and float32.
Delete when: tinyfsdp scales its loss.
"""

from collections.abc import Callable
from typing import Any

from precision_shim.adapting import Adapter, Call, collect, seam
from precision_shim_adapters.torch_fp16 import FEATURE, ScaledTraining

ENGINE = "tinyfsdp.engine:Engine"


def on_engine(method: str, why: str) -> Callable[[Any], Any]:
    """Declare that a function stands at a method of the engine."""
    return seam(f"{ENGINE}.{method}", FEATURE, why=why, delete_when="tinyfsdp scales its loss")


@on_engine("__init__", "makes the optimizer, and knows the dtype that the model computes in")
def make(call: Call, config: Any) -> None:
    """Give an engine in float16 its loss scaler."""
    call.proceed()
    engine = call.instance
    if config["dtype"] == "float16":
        ScaledTraining.make(
            "tinyfsdp",
            "model",
            device=next(engine.module.parameters()).device.type,
            because="dtype is float16, and tinyfsdp does not scale the loss",
        ).keep(engine)


@on_engine("compute_loss", "every loss comes from here")
def scale(call: Call) -> Any:
    """Scale the gradients of a loss; its value stays."""
    loss = call.proceed()
    training = ScaledTraining.of(call.instance)
    if training is not None:
        training.attach(loss)
    return loss


@on_engine("optim_step", "clips the gradients and steps once")
def step(call: Call) -> Any:
    """Unscale, step or skip, and report both figures."""
    training = ScaledTraining.of(call.instance)
    if training is None:
        return call.proceed()
    with training.one_step(call.instance.optimizer):
        metrics = call.proceed()
    return {**metrics, "grad_norm": training.norm(metrics["grad_norm"]), **training.metrics()}


@on_engine("save", "writes a checkpoint")
def save(call: Call, folder: Any) -> None:
    """Write the scaler's state beside the checkpoint."""
    call.proceed()
    training = ScaledTraining.of(call.instance)
    if training is not None:
        training.save(folder)


@on_engine("load", "reads a checkpoint")
def load(call: Call, folder: Any) -> None:
    """Read it again."""
    call.proceed()
    training = ScaledTraining.of(call.instance)
    if training is not None:
        training.restore(folder)


SEAMS = collect(make, scale, step, save, load)
EFFECTS = (f"{ENGINE}.__init__",)
ADAPTER = Adapter("tinyfsdp", "tinyfsdp", ("tinyfsdp",), ("1.0",), SEAMS, EFFECTS)
