"""The ranks of the tests of verl's VeOmni, Automodel, torchtitan and FSDP Turbo engines.

``tests/processes/rank_server.py`` starts the ranks. The engines and their libraries are real;
``engine_support.py`` lets them run on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import precision_shim
from precision_shim.auditing import meters
from precision_shim_adapters.verl.training import engines, metrics

from ..every_framework.checkpoint_doctor import verdict
from ..every_framework.shim_warnings import ours
from ..processes.rank_server import Launch, look_ahead
from . import engine_support
from . import fsdp_support as support
from .engine_support import KINDS, MODULES, configs

SETTINGS = {"loss_scale_init": 2.0**12, "growth_interval": 2, "log": "quiet"}
OVERFLOWS = (2, 5)
"""The steps with an overflow, of eight steps."""


def prepare() -> None:
    """Import the engines in the server, and read the sources that the shim inspects."""
    engine_support.prepare()
    if importlib.util.find_spec("torchtitan") is not None:
        look_ahead("torchtitan")
    look_ahead("verl")


def engine(
    name: str, model: str, dtype: str = "float16", *, auxiliary: bool = False, **fields: Any
) -> Any:
    """A real, initialized engine of the installed verl.

    Args:
        name: a key of ``MODULES``.
        model: folder of the checkpoint.
        dtype: the dtype in which the engine computes matrix products.
        auxiliary: whether Automodel's model has an auxiliary loss, as a mixture of experts has.
        fields: see ``configs``.
    """
    torch.manual_seed(11)
    made = configs(name, model, dist.get_world_size(), dtype, **fields)
    one = getattr(importlib.import_module(MODULES[name]), KINDS[name])(**made)
    one.initialize()
    if auxiliary:
        _add_auxiliary_loss(one)
    return one


def _add_auxiliary_loss(one: Any) -> None:
    """Add an auxiliary loss to a model, as the router of Automodel's experts does.

    verl uses Automodel's own experts only with expert parallelism, so this function adds the loss
    to MLP layers, by Automodel's own function.
    """
    from nemo_automodel.components.moe.megatron.moe_utils import MoEAuxLossAutoScaler

    def hook(module: Any, args: Any, output: Any) -> Any:
        return MoEAuxLossAutoScaler.apply(output, 1e-2 * output.float().square().mean())

    for layer in one.module.model.layers:
        layer.mlp.register_forward_hook(hook)
    # With ep_size 2 verl sets the scale of the experts' auxiliary losses.
    object.__setattr__(one.engine_config, "ep_size", 2)


def batch(one: Any, step: int) -> Any:
    """This rank's batch of a step."""
    import verl.utils.tensordict_utils as tu

    found = support.batch(step)
    tu.assign_non_tensor(found, use_remove_padding=one.model_config.use_remove_padding)
    return found


def train(one: Any, steps: range, overflows: Any = (), factor: float = 1.0) -> list[list[float]]:
    """Train; returns the losses of the micro-batches and the grad norm, for each step."""
    said = []
    for step in steps:
        weights = (factor, factor * support.weight_at(step, overflows))
        with one.train_mode():
            found = one.train_batch(batch(one, step), support.loss_function(weights))
            one.lr_scheduler_step()
        said.append([*found["loss"], found["metrics"]["grad_norm"]])
    return said


def parts(one: Any) -> list[Any]:
    return list(one.module) if isinstance(one.module, list) else [one.module]


def optimizers(one: Any) -> list[Any]:
    """The torch optimizers of an engine."""
    found = one.optimizer
    if hasattr(found, "optimizers_dict"):
        return list(found.optimizers_dict.values())
    return list(found) if hasattr(found, "__iter__") else [found]


def state(one: Any) -> dict[str, Any]:
    """Digests of this rank's states, and figures, which are equal after two equal trainings."""
    from types import SimpleNamespace

    module = torch.nn.ModuleList(parts(one))
    states = {key: value for inner in optimizers(one) for key, value in inner.state.items()}
    scaler = getattr(one, "scaler", None)
    found = support.state(module, SimpleNamespace(state=states), scaler)
    counted = [value["step"] for value in states.values() if "step" in value]  # Muon counts none
    found["counts"] = sorted({float(one) for one in counted})
    return found


# -- the cases ---------------------------------------------------------------------------------

CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as a case of the ranks, by its name."""
    CASES[function.__name__] = function
    return function


@dataclass
class Job:
    """The folder and the model of a launch."""

    folder: Path
    model: str


def install(**settings: Any) -> None:
    precision_shim.install(settings={**SETTINGS, **settings})


@case
def equal(job: Job, name: str, **fields: Any) -> dict[str, Any]:
    """Train eight steps by hand without the shim, then the same steps with the shim."""
    hand = by_hand(job, name, **fields)
    install(watch_updates=1)
    one = engine(name, job.model, **fields)
    found = _eight(one, range(8), OVERFLOWS)
    kinds = sorted({type(module).__name__ for part in parts(one) for module in part.modules()})
    return {**found, "hand": hand, "lost": meters.metrics(one.optimizer), "kinds": kinds}


def _eight(one: Any, steps: range, overflows: Any) -> dict[str, Any]:
    """Train the given last steps; returns losses, state, metrics, decisions and audits."""
    said = train(one, steps, overflows)
    return {
        "said": said,
        "state": state(one),
        "metrics": metrics.of_engine(one),
        "decisions": _decided(),
        "audits": [audit.to_dict() for audit in precision_shim.status().audit],
    }


@case
def by_hand(job: Job, name: str, **fields: Any) -> dict[str, Any]:
    """Train eight steps without the shim, with an fp16 model and a loss scaler by hand."""
    with in_fp16_by_hand(name):
        return _by_hand(engine_by_hand(name, job.model, **fields))


def _by_hand(one: Any) -> dict[str, Any]:
    scale, good, said = SETTINGS["loss_scale_init"], 0, []
    for step in range(8):
        weights = (scale, scale * support.weight_at(step, OVERFLOWS))
        with one.train_mode():
            one.optimizer_zero_grad()
            loss_function = _with_auxiliary(support.loss_function(weights), scale)
            found = one.forward_backward_batch(batch(one, step), loss_function, forward_only=False)
            finite = torch.ones(())
            for parameter in (p for part in parts(one) for p in part.parameters()):
                if parameter.grad is not None:
                    local = support.local(parameter.grad)
                    finite *= float(torch.isfinite(local).all())
                    local.mul_(1.0 / scale)
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
            norm = one.optimizer_step()  # verl skips the step if the norm is not finite
            assert math.isfinite(norm) == bool(finite.item()), (step, norm, finite)
            if not finite and hasattr(one, "trainer"):
                # Without gradients torchtitan's optimizers only run their hooks: with the shim the
                # experts' bias advances in a skipped step, too, since no checkpoint has its counts.
                one.optimizer.step()
            one.lr_scheduler_step()
        said.append([*(loss / scale for loss in found["loss"]), norm if finite else math.nan])
        good = good + 1 if finite else 0
        if not finite:
            scale *= 0.5
        elif good == SETTINGS["growth_interval"]:
            scale, good = scale * 2, 0
    return {"said": said, "state": state(one), "scale": scale, "tracker": good}


def _with_auxiliary(loss_function: Any, scale: float) -> Any:
    """A loss function that also multiplies verl's scale of auxiliary losses by ``scale``."""
    from nemo_automodel.components.moe.megatron.moe_utils import MoEAuxLossAutoScaler

    own: list[Any] = []

    def scaled(*args: Any, **kwargs: Any) -> Any:
        if MoEAuxLossAutoScaler.main_loss_backward_scale is not None:
            # verl sets the scale of auxiliary losses once, before the micro-batches.
            own[:] = own or [MoEAuxLossAutoScaler.main_loss_backward_scale]
            MoEAuxLossAutoScaler.main_loss_backward_scale = own[0] * scale
        return loss_function(*args, **kwargs)

    return scaled


@contextlib.contextmanager
def in_fp16_by_hand(name: str) -> Iterator[None]:
    """Let an engine be built and run in float16 without the shim."""
    impl = importlib.import_module(MODULES[name])
    own = torch.autocast

    def autocast(device_type: str, dtype: Any = None, **kwargs: Any) -> Any:
        return own(device_type, dtype=torch.float16 if dtype is torch.bfloat16 else dtype, **kwargs)

    with contextlib.ExitStack() as stack:
        if name == "veomni":
            from veomni.arguments import MixedPrecisionConfig

            half = MixedPrecisionConfig(enable=True, param_dtype="float16")
            shard = impl.build_parallelize_model

            def in_half(*args: Any, **kwargs: Any) -> Any:  # verl 0.8 passes no mixed_precision
                return shard(*args, **{**kwargs, "mixed_precision": half})

            stack.enter_context(mock.patch.object(impl, "build_parallelize_model", in_half))
        if name == "torchtitan":
            from torchtitan.models.common.attention import VarlenAttention

            from precision_shim_adapters.torchtitan.training.attention import keep_float16

            made = functools.partial(impl.TrainingConfig, mixed_precision_param="float16")
            stack.enter_context(mock.patch.object(impl, "TrainingConfig", made))
            forward = keep_float16(VarlenAttention.forward)
            stack.enter_context(mock.patch.object(VarlenAttention, "forward", forward))
        stack.enter_context(mock.patch.object(torch, "autocast", autocast))
        yield


def engine_by_hand(name: str, model: str, **fields: Any) -> Any:
    """An engine in float16; call this within ``in_fp16_by_hand``."""
    if name == "automodel":
        fields |= {"mp_output_dtype": "fp16"}
    return engine(name, model, **fields)


@case
def unscaled(job: Job, name: str, **fields: Any) -> dict[str, Any]:
    """Train three steps in bf16 and three in fp32, without the shim and with it."""
    found: dict[str, Any] = {}
    for on in ("off", "on"):
        if on == "on":
            install()
        for dtype in ("bfloat16", "float32"):
            one = engine(name, job.model, dtype, **fields)
            found[f"{dtype} {on}"] = [train(one, range(3)), state(one)]
    return {**found, "decisions": _decided()}


def _decided() -> list[str]:
    return [str(one) for one in precision_shim.status().decisions if one.feature == "fp16-scaling"]


def _path(job: Job, step: int) -> str:
    return str(job.folder / f"global_step_{step}")


@case
def saved(job: Job, name: str, at: int, overflows: list[int], **fields: Any) -> dict[str, Any]:
    """Train eight steps, with a save; torchtitan allows one two-rank trainer per process."""
    install()
    one = engine(name, job.model, **fields)
    said = train(one, range(at), overflows)
    before = state(one)
    if name == "torchtitan":
        one.checkpointer.interval = at
    one.save_checkpoint(_path(job, at), global_step=at)
    after = state(one)
    found = _eight(one, range(at, 8), overflows)
    return {**found, "said": said + found["said"], "before": before, "after": after}


@case
def resumed(job: Job, name: str, at: int, overflows: list[int], **fields: Any) -> dict[str, Any]:
    """In a new process, load the checkpoint and train the rest of the steps."""
    install()
    one = engine(name, job.model, **fields)
    train(one, range(20, 22))  # the load has to replace existing states
    with ours() as warned:
        one.load_checkpoint(_path(job, at), del_local_after_load=False)
    loaded = state(one)
    found = _eight(one, range(at, 8), overflows)
    place = job.folder / f"step-{at}" if name == "torchtitan" else Path(_path(job, at))
    return {**found, "loaded": loaded, "warned": warned, "predicted": verdict(str(place), "verl")}


@case
def built(job: Job, asked: list[list[Any]], frameworks: Any = None) -> list[dict[str, Any]]:
    """Build engines; returns each engine's warnings or error, and number of optimizers."""
    precision_shim.install(frameworks=frameworks, settings=SETTINGS)
    return [_built(lambda one=one: engine(one[0], job.model, **one[1])) for one in asked]


def _built(make: Callable[[], Any]) -> dict[str, Any]:
    made: list[int] = []
    own = torch.optim.Optimizer.__init__

    def count(*args: Any, **kwargs: Any) -> None:
        made.append(1)
        own(*args, **kwargs)

    found: dict[str, Any] = {"error": ""}
    with ours() as said, mock.patch.object(torch.optim.Optimizer, "__init__", count):
        try:
            one = make()
            found["scaler"] = type(getattr(one, "scaler", None)).__name__
            found["policy"] = str(engines.policy_of(parts(one)[0]))
        except precision_shim.PrecisionShimError as error:
            found["error"] = f"{type(error).__name__}: {error}"
    return {**found, "said": said, "optimizers": len(made)}


@case
def unsaved(job: Job) -> list[str]:
    """The warning if torchtitan's interval skips a checkpoint."""
    install()
    one = engine("torchtitan", job.model)
    with ours() as said:
        one.save_checkpoint(_path(job, 10), global_step=10)
    assert not list(job.folder.glob("step-*"))
    return said


def run(launch: Launch) -> Any:
    """Run a rank from its start to its end."""
    os.environ.update(
        RANK=str(launch.rank), LOCAL_RANK="0", WORLD_SIZE=str(launch.world), MASTER_ADDR="localhost"
    )
    with launch.joined():
        torch.autograd.set_multithreading_enabled(False)
        options = {"model": os.environ["MODEL"], **launch.options}
        job = Job(Path(launch.folder), options.pop("model"))
        return CASES[launch.case](job, **options)
