"""verl's validation accepts the jobs in README and docs, whose dtypes are as promised."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import pytest
from packaging.version import Version

from ..pages.page_jobs import Job, of
from ..processes.composed_once import composed_once
from .conftest import VERL

OWN = "actor_rollout_ref.actor.optim.use_precision_aware_optimizer"
"""verl 0.9's own key: the pages show it for that version."""
JOBS = [one for one in of("verl") if Version("0.9") <= VERL or one.value(OWN) is None]

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="the pages promise nothing of verl 0.6"
)


def composed(settings: tuple[str, ...]) -> Any:
    """The config that hydra composes for verl's entry point."""
    import hydra
    from verl.trainer import config as shipped

    name = "ppo_trainer"
    for word in settings:
        if word.startswith("--config-name="):
            name = word.partition("=")[2]
    values = [word for word in settings if not word.startswith("--")]
    place = os.path.dirname(shipped.__file__)
    with hydra.initialize_config_dir(place, version_base=None), composed_once():
        return hydra.compose(name, values)


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
    for section in (config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.optim):
        omega_conf_to_dataclass(section)  # verl's workers do the same
    return config


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_verls_validation(job: Job) -> None:
    assert importlib.util.find_spec(job.entry)
    config = validated(job.settings)
    actor = config.actor_rollout_ref.actor
    marks = ".megatron.", "precision_aware", "override_optimizer_config"
    if any(mark in word for word in job.settings for mark in marks):
        assert actor.strategy == "megatron", "nothing else reads these keys"
    if any("fsdp_config" in word for word in job.settings):
        assert actor.strategy != "megatron", "nothing else reads these keys"


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_both_sides_of_a_job_compute_in_one_dtype(job: Job) -> None:
    config = validated(job.settings).actor_rollout_ref
    mixed = (config.actor.get("fsdp_config") or {}).get("mixed_precision") or {}
    half = mixed.get("param_dtype") == "fp16"
    assert config.rollout.dtype == ("float16" if half else "bfloat16")
