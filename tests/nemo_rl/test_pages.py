"""The configs of NeMo-RL's jobs in README and docs pass through NeMo-RL's own set-up.

The configs come from NeMo-RL's checkout in uv's cache, because the package has none. NeMo-RL's
config classes, ``setup`` and ``Policy`` run until Ray would start the first worker. For Megatron
jobs the dtype checks of NeMo-RL's worker run too.
"""

from __future__ import annotations

import importlib
import json
import os
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..page_jobs import Job, of
from ..upstreams_own import fetch

JOBS = of("nemo-rl")


class NextIsAWorkerError(Exception):
    """Raised at the point where NeMo-RL would start a worker."""


class Cluster:
    """Stands in for NeMo-RL's Ray cluster; returns a number of GPUs that do not exist."""

    _sorted_bundle_indices = None

    def __init__(self, bundle_ct_per_node_list: list[int], **more: object) -> None:
        self.gpus = bundle_ct_per_node_list

    def world_size(self) -> int:
        return sum(self.gpus)


class Anything:
    """Stands in for objects that are made before the policy: the logger, the rollout engine."""

    def __init__(self, *args: object, **more: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: None


def start_no_worker(*args: object, **more: object) -> None:
    raise NextIsAWorkerError


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NeMo-RL's checkout at the installed commit, from uv's cache or from GitHub."""
    commit = json.loads(distribution("nemo-rl").read_text("direct_url.json") or "{}")
    commit = commit.get("vcs_info", {}).get("commit_id", "none")
    cache = os.environ.get("UV_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "uv"
    )
    for found in Path(cache).glob("git-v*/checkouts/*/*"):
        if commit.startswith(found.name) and (found / "examples" / "configs").is_dir():
            return found
    url = "https://github.com/NVIDIA-NeMo/RL"
    return fetch(tmp_path_factory.mktemp("RL"), url, (commit,), "examples")


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


def policy_of(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config["policy"] if isinstance(config, dict) else config.policy
    return found


def set_up(config: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run NeMo-RL's set-up until the first worker would start."""
    from nemo_rl.algorithms import grpo
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.models.policy import lm_policy

    monkeypatch.chdir(folder)  # NeMo-RL makes the directories in the config.
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")  # NeMo-RL's container sets this name.
    monkeypatch.setattr(grpo, "RayVirtualCluster", Cluster)
    monkeypatch.setattr(grpo, "Logger", Anything)
    monkeypatch.setattr(grpo, "VllmGeneration", Anything)
    monkeypatch.setattr(lm_policy, "RayWorkerGroup", start_no_worker)
    monkeypatch.setattr(lm_policy, "RayWorkerBuilder", Anything)
    if hasattr(lm_policy, "RayQueue"):
        monkeypatch.setattr(lm_policy, "RayQueue", Anything)
    tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    policy = policy_of(config)
    policy["generation"] = configure_generation_config(policy["generation"], tokenizer)
    rows: Any = [{}] * 64
    with pytest.raises(NextIsAWorkerError):
        grpo.setup(config, tokenizer, rows, rows)


def dtypes_of_megatron(policy: dict[str, Any]) -> None:
    """Run NeMo-RL's functions that check the dtypes of a Megatron config; 0.6 added them."""
    try:
        setup = importlib.import_module("nemo_rl.models.megatron.setup")
    except ModuleNotFoundError:
        return
    import torch

    dtype = getattr(torch, policy["precision"])
    model = SimpleNamespace()
    setup._apply_precision_config(model, policy, dtype)
    setup._validate_optimizer_config(policy)
    setup._validate_dtype_config(
        dtype, model, SimpleNamespace(**policy["megatron_cfg"]["optimizer"])
    )


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_passes_nemo_rls_set_up(
    job: Job, checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = loaded(job, checkout)
    policy = policy_of(config)
    set_up(config, monkeypatch, tmp_path)
    assert policy["generation"]["vllm_cfg"]["precision"] == policy["precision"]
    megatron = bool(policy["megatron_cfg"]["enabled"])
    for part in ("megatron_cfg", "dtensor_cfg"):
        if any(f".{part}." in word for word in job.settings):
            assert megatron == (part == "megatron_cfg"), f"nothing else reads {part}"
    if megatron:
        dtypes_of_megatron(policy)
