"""verl's validation accepts the jobs in README and docs, whose dtypes are as promised."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
from typing import Any

import pytest
from packaging.version import Version

from ..documented import ROOT
from ..page_jobs import Job, of
from .conftest import VERL

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="the pages promise nothing of verl 0.6"
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
OVERRIDE = "actor_rollout_ref.actor.optim.override_optimizer_config"


def composed(settings: tuple[str, ...]) -> Any:
    """The config that hydra composes for verl's entry point."""
    from hydra import compose, initialize_config_dir
    from verl.trainer import config as shipped

    name = "ppo_trainer"
    for word in settings:
        if word.startswith("--config-name="):
            name = word.partition("=")[2]
    values = [word for word in settings if not word.startswith("--")]
    with initialize_config_dir(os.path.dirname(shipped.__file__), version_base=None):
        return compose(name, overrides=values)


@functools.cache
def validated(settings: tuple[str, ...]) -> Any:
    """The config after the validation that verl runs before it makes a worker."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = composed(settings)
    OmegaConf.to_container(config, resolve=True)
    OmegaConf.resolve(config)
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # verl's workers do the same
    return config


@pytest.mark.parametrize("job", of("verl"), ids=str)
def test_a_job_passes_verls_validation(job: Job) -> None:
    assert importlib.util.find_spec(job.entry)
    config = validated(job.settings)
    actor = config.actor_rollout_ref.actor
    if any(".megatron." in word or "override_optimizer_config" in word for word in job.settings):
        assert actor.strategy == "megatron", "nothing else reads these keys"
    if any("fsdp_config" in word for word in job.settings):
        assert actor.strategy != "megatron", "nothing else reads these keys"


@pytest.mark.parametrize("job", of("verl"), ids=str)
def test_both_sides_of_a_job_compute_in_one_dtype(job: Job) -> None:
    config = validated(job.settings).actor_rollout_ref
    mixed = (config.actor.get("fsdp_config") or {}).get("mixed_precision") or {}
    half = mixed.get("param_dtype") == "fp16"
    assert config.rollout.dtype == ("float16" if half else "bfloat16")


def test_low_precision_states_are_asked_for_with_the_optimizer_that_has_them() -> None:
    states = [one for one in of("verl") if one.value(f"{OVERRIDE}.exp_avg_dtype")]
    assert {"README.md", "docs/start/verl.md", "docs/verl.md"} <= {one.page for one in states}
    for job in states:
        made = validated(job.settings).actor_rollout_ref.actor.optim.override_optimizer_config
        assert made.use_precision_aware_optimizer is True
        assert made.exp_avg_dtype == "bf16"
        assert made.adam_beta2 == 0.95  # a bf16 second moment cannot decay at Megatron's default


def test_a_job_that_verl_does_not_take_is_noticed() -> None:
    start = next(one for one in of("verl") if one.page == "docs/start/verl.md")
    without = tuple(one for one in start.settings if "use_dynamic_bsz" not in one)
    assert without != start.settings
    with pytest.raises(TypeError):
        validated(without)
    with pytest.raises(Exception, match="Invalid loss_agg_mode"):
        validated((*start.settings, "actor_rollout_ref.actor.loss_agg_mode=none"))
    with pytest.raises(Exception, match="no_such_key"):
        validated((*start.settings, "actor_rollout_ref.actor.optim.no_such_key=1"))


@pytest.mark.skipif(Version("0.8") <= VERL, reason="the page says this of 0.7.1")
def test_the_key_that_a_legacy_actor_needs_is_taken() -> None:
    start = [one for one in of("verl") if one.page == "docs/start/verl.md"][-1]
    config = validated((*start.settings, "actor_rollout_ref.actor.fsdp_config.dtype=float16"))
    assert config.actor_rollout_ref.actor.fsdp_config.dtype == "float16"
    text = " ".join((ROOT / start.page).read_text(encoding="utf-8").split())
    assert "`actor_rollout_ref.actor.fsdp_config.dtype`: set that to `float16`, too" in text


def test_the_errors_that_readme_quotes_are_megatrons_own() -> None:
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.optimizer.optimizer_config as configs

    rows = [one for one in README.splitlines() if one.startswith("| `")]
    (row,) = (one for one in rows if "when not using precision-aware optimizer" in one)
    rest = "_dtype can only be fp32 when not using precision-aware optimizer"
    text = inspect.getsource(configs)
    fields = re.findall(r"`(\w+)_dtype", row)
    assert sorted(fields) == sorted(re.findall(rf'"(\w+){rest}"', text))
    assert f"`{fields[0]}{rest}`" in row
    (row,) = (one for one in rows if "in local grad norm" in one)
    quoted = row.split("`")[1]
    for one in (quoted, quoted.replace("NaN", "Inf")):
        assert one in inspect.getsource(buffers)
