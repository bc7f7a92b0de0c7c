"""README's lines for verl: verl's own config takes them, with the meaning that is promised."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ..readme_lines import on_start_page, overrides


def composed(words: list[str]) -> Any:
    from hydra import compose, initialize_config_dir
    from verl.trainer import config as shipped

    name = "ppo_trainer"
    values = [word for word in words if not word.startswith("--")]
    for word in words:
        if word.startswith("--config-name="):
            name = word.partition("=")[2]
    with initialize_config_dir(os.path.dirname(shipped.__file__), version_base=None):
        return compose(name, overrides=values).actor_rollout_ref.actor


def test_the_lines_are_taken() -> None:
    megatron, fsdp = overrides("verl", "verl.trainer.main_ppo")
    made = composed(megatron)
    assert made.strategy == "megatron"
    assert dict(made.optim.override_optimizer_config) == {
        "use_precision_aware_optimizer": True,  # Megatron takes low-precision moments with it alone
        "exp_avg_dtype": "bf16",
    }
    made = composed(fsdp)
    assert made.strategy != "megatron"
    assert made.fsdp_config.mixed_precision.param_dtype == "fp16"


def test_the_start_page_is_taken() -> None:
    alone, states, fp16 = on_start_page("verl", "verl.trainer.main_ppo")
    assert composed(alone).strategy == "megatron"
    made = composed([*alone, *states]).optim.override_optimizer_config
    assert made.use_precision_aware_optimizer is True
    assert made.exp_avg_sq_dtype == "bf16"
    assert made.adam_beta2 == 0.95
    without = [one for one in fp16 if "fsdp_config" in one]
    assert composed(without).fsdp_config.mixed_precision.param_dtype == "fp16"


def test_a_key_that_is_none_is_refused() -> None:
    from hydra.errors import ConfigCompositionException

    with pytest.raises(ConfigCompositionException):
        composed(["actor_rollout_ref.actor.optim.no_such_key=1"])
