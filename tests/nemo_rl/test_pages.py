"""NeMo-RL's own loader and config class accept the jobs in README and docs, and their variable.

The configs come from NeMo-RL's checkout in uv's cache, because the package has none.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from ..pages.page_jobs import Job, of


def loaded(job: Job, checkout: Path) -> Any:
    """The config as NeMo-RL's script makes it, with NeMo-RL's own loader and config class."""
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.utils import config as loader
    from omegaconf import OmegaConf
    from pydantic import TypeAdapter

    register = getattr(loader, "register_omegaconf_resolvers", None)
    if register is not None:
        register()
    else:  # up to 0.5 each script registers the resolver
        OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    path = job.value("config")
    assert path is not None
    at = job.settings.index("--config") if "--config" in job.settings else -1
    words = (
        [one for n, one in enumerate(job.settings) if n not in (at, at + 1)]
        if at >= 0
        else [one for one in job.settings if not one.startswith("--config=")]
    )
    config = loader.parse_hydra_overrides(loader.load_config(checkout / path), words)
    plain = OmegaConf.to_container(config, resolve=True)
    made = TypeAdapter(MasterConfig).validate_python(plain)
    return plain if isinstance(made, dict) else made  # MasterConfig is a TypedDict up to 0.6


@pytest.mark.parametrize("job", of("nemo-rl"), ids=str)
def test_nemo_rl_takes_a_jobs_keys(job: Job, checkout: Path) -> None:
    config = loaded(job, checkout)
    policy = config["policy"] if isinstance(config, dict) else config.policy
    assert policy["generation"]["vllm_cfg"]["precision"] == policy["precision"]
    megatron = bool(policy["megatron_cfg"]["enabled"])
    for part in ("megatron_cfg", "dtensor_cfg"):
        if any(f".{part}." in word for word in job.settings):
            assert megatron == (part == "megatron_cfg"), f"nothing else reads {part}"


def test_the_variable_that_builds_a_workers_environment_anew() -> None:
    """An environment that NeMo-RL built earlier lacks the package."""
    from nemo_rl.utils import venvs

    assert 'os.environ.get("NRL_FORCE_REBUILD_VENVS"' in inspect.getsource(venvs)
