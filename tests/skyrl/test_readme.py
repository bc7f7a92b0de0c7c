"""README's lines for SkyRL: SkyRL's own command line takes them."""

from __future__ import annotations

import importlib.util

from ..readme_lines import on_start_page, overrides


def test_the_lines_are_taken() -> None:
    from skyrl.train.config import SkyRLTrainConfig

    entry = "skyrl.train.entrypoints.main_base"
    assert importlib.util.find_spec(entry)
    (given,) = overrides("skyrl", entry)
    made = SkyRLTrainConfig.from_cli_overrides(given)
    asked = made.trainer.policy.megatron_config.optimizer_config_kwargs
    assert asked["use_precision_aware_optimizer"] is True
    assert asked["main_grads_dtype"] == asked["exp_avg_dtype"] == "bf16"


def test_the_start_page_is_taken() -> None:
    from skyrl.train.config import SkyRLTrainConfig

    alone, fp16 = on_start_page("skyrl", "skyrl.train.entrypoints.main_base")
    for given, dtype in ((alone, "bf16"), (fp16, "fp16")):
        made = SkyRLTrainConfig.from_cli_overrides(given).trainer
        assert made.strategy == "fsdp2"
        mixed = made.policy.fsdp_config.mixed_precision
        assert (mixed.param_dtype if mixed else "bf16") == dtype
