"""NeMo-RL on Megatron: patch the functions that build a model.

Each optimizer field counts as the user's: NeMo-RL's YAML files set nearly all. The NaN check of
gradients has no config key. Ray pickles the patched function by reference, unlike methods. Dtype
names become dtypes when Megatron-Bridge 0.4 makes the OptimizerConfig, in later versions in
``finalize()``, which ``validate()`` calls before the build. For a skipped step the shim returns the
grad norm NaN, because ``train`` fails on None.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from precision_shim.adapting import Call, seam

from ... import megatron
from ...common.ray_actors import put_in_front
from ...megatron import BUILDING, SCALING, building
from ..audit.optimizers import report_lost_updates
from ..config import BLOCK, FRAMEWORK, read_requested
from .dtensor import add_figures
from .workers import INHERITED, INLINE, MEGATRON, POLICIES, SETUP, VALUE, exported, mixin

_ONE_PLACE = "NeMo-RL decides bucket and optimizer states in one place"
_COPIES = ("megatron.bridge.training.setup", *POLICIES, SETUP)
"""Modules that import Bridge's ``setup_optimizer`` by value."""


_BUILD: dict[str, Any] = {
    "feature": BUILDING,
    "group": "megatron",
    "why": "model and optimizer are made here, from the policy config and Bridge's",
    "delete_when": _ONE_PLACE,
    "relies_on": ("get_model", "setup_optimizer", "ddp", "optimizer"),
    "optional": True,
}
"""Arguments of the seams on the function that builds model and optimizer."""


@seam(at=[{"target": target, "only_if": (target,)} for target in INLINE], **_BUILD)
def worker_build_inline(call: Call, policy_cfg: Any, load_optimizer: Any, cfg: Any) -> Any:
    """Record that a worker of NeMo-RL 0.4 or 0.5 builds a model, and whether the model trains."""
    return _build_model(call, policy_cfg, cfg.ddp, "policy", bool(load_optimizer))


@seam(
    f"{SETUP}:setup_model_and_optimizer",
    aliases=tuple(f"{module}:setup_model_and_optimizer" for module in (*POLICIES, VALUE)),
    unless=INLINE,
    **_BUILD,
)
def worker_build(
    call: Call,
    policy_cfg: Any,
    load_optimizer: Any,
    megatron_cfg: Any,
    additional_pre_wrap_hooks: Any = None,
) -> Any:
    """Record that a worker builds a model, and whether the model trains or is a teacher."""
    # Only a value worker passes ``additional_pre_wrap_hooks``, which add the value head.
    subject = "value" if additional_pre_wrap_hooks else "policy"
    return _build_model(call, policy_cfg, megatron_cfg.ddp, subject, bool(load_optimizer))


def _build_model(call: Call, policy_cfg: Any, ddp_config: Any, subject: str, trains: bool) -> Any:
    fsdp = bool(getattr(ddp_config, "use_megatron_fsdp", False))
    # Up to NeMo-RL 0.5 a worker's ``__init__`` builds the reference model; no seam can patch this
    # method, because Ray pickles it by value. The reference's DDP has the policy's DDP config.
    megatron.expect_reference(
        ddp_config, FRAMEWORK, partial(read_requested, policy_cfg, "reference", fsdp, False)
    )
    with building(FRAMEWORK, partial(read_requested, policy_cfg, subject, fsdp, trains)):
        return call.proceed()


@seam(
    "megatron.bridge.training.optim:setup_optimizer",
    BUILDING,
    group="megatron",
    why="config, parameters and buckets are known, and the optimizer comes out here",
    delete_when="NeMo-RL dispatches on policy.precision, fp16 with a scaler that suits it",
    aliases=tuple(f"{module}:setup_optimizer" for module in _COPIES),
    optional=True,
)
def set_up_optimizer(call: Call, optimizer_config: Any, model: Any) -> Any:
    """Set OptimizerConfig fields by the model's dtype, if the policy config lacks these fields."""
    build = megatron.current_build(FRAMEWORK)
    if build is None:
        return call.proceed()
    plan = megatron.apply_plan(build)
    config = megatron.with_fields(optimizer_config, plan.added)
    megatron.keep_layout(plan, config)
    megatron.check(FRAMEWORK, config, model)
    call.arguments["optimizer_config"] = config
    optimizer, *rest = call.proceed()
    # Set the result of a skipped step here, because no seam can patch ``train`` of an actor.
    megatron.answer_skips(optimizer, succeeds=False)
    return (optimizer, *rest)


@seam(
    f"{SETUP}:make_policy_like_config",
    SCALING,
    group="megatron",
    why="a value worker's config is copied key by key, without the shim's block",
    delete_when="it copies what it does not know",
    aliases=(f"{VALUE}:make_policy_like_config",),
    optional=True,
    only_if=(f"{SETUP}:make_policy_like_config",),
)
def keep_block(call: Call, config: Any) -> Any:
    """Copy the shim's config block into the policy config that a value worker makes."""
    made = call.proceed()
    return {**made, BLOCK: config[BLOCK]} if BLOCK in config else made


_DELETE = "NeMo-RL reports the loss scale"
_RELIES_ON = ("train", "optimizer", "all_mb_metrics", "grad_norm", "eval_mode")


@seam(
    feature=SCALING,
    at=[each.method("train") for each in MEGATRON],
    why=INHERITED,
    delete_when=_DELETE,
    relies_on=_RELIES_ON,
)
def report(call: Call, eval_mode: Any = False) -> Any:
    """Add the loss scale and the skipped steps to the metrics of a worker's ``train``."""
    result = call.proceed()
    if not eval_mode:
        add_figures(result, megatron.metrics(call.instance.optimizer))
    return result


def times_loss_scale(function: Any, worker: Any) -> Any:
    """Multiply a worker's gradient scale for an auxiliary loss by the loss scale.

    Megatron 0.19 and later uses the auxiliary losses' scale instead of the loss scale.
    """
    optimizer = worker.optimizer
    scales = optimizer is not None and megatron.dynamic_scalers(optimizer)
    if function is None or not scales or hasattr(function, "_precision_shim"):
        return function

    def scaled() -> Any:
        return function() * optimizer.get_loss_scale()

    scaled._precision_shim = True  # type: ignore[attr-defined]
    return scaled


@seam(
    feature=SCALING,
    at=[
        each.method(name)
        for name in ("_set_moe_grad_scale_func", "_set_mtp_grad_scale_func")
        for each in MEGATRON
    ],
    why="a scale of its own, which Megatron from 0.19 takes for the loss scale",
    delete_when="it has the loss scale in it",
)
def scale_own(call: Call, func: Any) -> Any:
    """Multiply a worker's gradient scale for an MoE or multi-token loss by the loss scale."""
    call.arguments["func"] = times_loss_scale(func, call.instance)
    return call.proceed()


ReportingWorker = mixin(
    __name__,
    "ReportingWorker",
    train=[report, report_lost_updates],
    _set_moe_grad_scale_func=[scale_own],
    _set_mtp_grad_scale_func=[scale_own],
)
"""A mixin that reports a worker's metrics."""


@exported(
    (each.actor_class(f"{each.beneath}.train", *_RELIES_ON) for each in MEGATRON),
    feature=SCALING,
    delete_when=_DELETE,
)
def redecorate(actor_class: Any) -> Any:
    """Make the actor class again with ``ReportingWorker`` as the worker's first base class."""
    return put_in_front(ReportingWorker, actor_class)
