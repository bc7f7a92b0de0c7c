"""The launch lines for which the tests compare the plan with verl's engines."""

from __future__ import annotations

from typing import Any

from ..plan.verdicts import Drawn, Key
from ..processes.composed_once import composed_once

ACTOR = "actor_rollout_ref.actor"
_FLAG = ("true", "false")
_OPTIM, _OVERRIDE = f"{ACTOR}.optim", f"{ACTOR}.optim.override_optimizer_config"
_BUCKET = f"{ACTOR}.megatron.override_ddp_config"
_FSDP = f"{ACTOR}.fsdp_config"
MEGATRON = (
    Key(f"{ACTOR}.megatron.dtype"),
    Key(f"{ACTOR}.megatron.dtype", ("float16", "bfloat16"), ()),
    Key(f"{_OPTIM}.use_precision_aware_optimizer", _FLAG, ()),
    *(
        Key(f"{_OPTIM}.{name}")
        for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Key(f"{_OVERRIDE}.use_precision_aware_optimizer", ("true", "true", "false"), ()),
    *(
        Key(f"{_OVERRIDE}.{name}")
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Key(f"{_OVERRIDE}.initial_loss_scale", ("4096", "65536"), ("0.5",)),
    Key(f"{_OVERRIDE}.min_loss_scale", ("1", "16"), ()),
    Key(f"{_OVERRIDE}.loss_scale", ("128",), ()),
    Key(f"{_OVERRIDE}.adam_beta2", ("0.95", "0.999"), ()),
    Key(f"{_OVERRIDE}.store_param_remainders", _FLAG, ()),
    Key(f"{_BUCKET}.grad_reduce_in_fp32", _FLAG, ()),
    Key(f"{_BUCKET}.check_for_nan_in_grad", _FLAG, ()),
)
FSDP = (
    Key(f"{_FSDP}.dtype"),
    Key(f"{_FSDP}.model_dtype"),
    Key(f"{_FSDP}.mixed_precision.param_dtype"),
    Key(f"{_FSDP}.mixed_precision.param_dtype", ("fp16", "float16", "16")),
    Key(f"{_FSDP}.mixed_precision.reduce_dtype"),
    Key(f"{_FSDP}.mixed_precision.buffer_dtype"),
    Key(f"{_OPTIM}.optimizer", ("AdamW", "Adam"), ()),
)
_COMMON = (
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
)
ON_MEGATRON = (
    "--config-name=ppo_megatron_trainer",
    f"{ACTOR}.megatron.vanilla_mbridge=True",
    f"{ACTOR}.megatron.use_remove_padding=False",
)
ON_FSDP = (f"{ACTOR}.strategy=fsdp2", f"{_FSDP}.use_torch_compile=False")


def line(drawn: Drawn, *more: str) -> list[str]:
    """The launch line of a drawn config; ``more`` are further arguments."""
    written = [f"++{key}={value}" for key, value in drawn.written.items()]
    return ["python3", "-m", "verl.trainer.main_ppo", *more, *_COMMON, *written]


def actor_of(words: list[str]) -> Any:
    """verl's own config object of the actor, which its worker makes from the composed config."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    from precision_shim.process import registry as _registry
    from precision_shim.process.settings import resolve
    from precision_shim_tools.plan.command import Options, read_launch_line
    from precision_shim_tools.plan.verl.composing import compose

    job = read_launch_line(words, _registry.entries().values(), resolve(environ={}), Options())
    with composed_once():
        config = OmegaConf.create(compose(job))
    made = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    made.optim.total_training_steps = 10
    return made
