"""SkyRL passes the tests that are the same for every framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from precision_shim_adapters.skyrl.training.megatron import of_worker

from ..every_framework import contract
from ..every_framework.requested_configs import Case
from ..every_framework.taken_out import Seams
from ..every_framework.upstreams_own import Own, fetch, in_a_fork_of
from ..processes.rank_server import Ranks
from .conftest import SKYRL
from .support import megatron_worker, python_path

DRIVER = contract.Driver(
    "skyrl",
    version=str(SKYRL),
    pinned=str(SKYRL),
    worker=Path(__file__).with_name("status_worker.py"),
    example="skyrl_fsdp",
)
CONFIG = "trainer.policy.megatron_config"


class TestRelease(contract.Release):
    driver = DRIVER


class Forked(contract.Contract):
    """Processes are forks of one with the slowest imports."""

    @pytest.fixture
    def server(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Ranks:
        monkeypatch.setenv("PYTHONPATH", python_path())
        return ranks


class TestWorker(Forked, contract.Worker):
    driver = DRIVER


class TestRequestedConfigs(contract.RequestedConfigs):
    driver = DRIVER

    @pytest.fixture
    def requested_of(self, checkpoints: dict[str, Path]) -> Callable[[Case], Any]:
        def read(case: Case) -> Any:
            written = [
                f"{CONFIG}.optimizer_config_kwargs.{key}={value}"
                for key, value in case.asked.items()
            ]
            if case.bucket is not None:
                bucket = str(case.bucket).lower()
                written.append(f"{CONFIG}.ddp_config.grad_reduce_in_fp32={bucket}")
            dtype = str(case.dtype).removeprefix("torch.")
            worker = megatron_worker(
                checkpoints[dtype],
                f"trainer.bf16={str(dtype == 'bfloat16').lower()}",
                "trainer.policy.optimizer_config.adam_betas=[0.9,0.95]",
                *written,
            )
            worker.provider = SimpleNamespace(mtp_num_layers=None)  # init_configs sets it
            return of_worker(worker, worker.cfg.policy.megatron_config.ddp_config)

        return read


@pytest.mark.usefixtures("skyrl")
class TestSeams(contract.Contract, Seams):
    driver = DRIVER


class TestJob(Forked, contract.Job):
    driver = DRIVER


class TestUpstream(contract.Upstream):
    driver = DRIVER


URL = "https://github.com/NovaSky-AI/SkyRL"
TAG = f"refs/tags/skyrl-v{SKYRL}"
BEFORE = {Version("0.4.0"): "a9564572eb8e91076be43c1bd5e4615e3de17265"}
"""A commit before a release, for mirrors that lack the tag. A few tests of that commit need names
that the release has removed, and fail with the shim and without it."""

_BACKEND = "tests/backends/skyrl_train"
FILES = (
    f"{_BACKEND}/distributed/test_moe_config.py",
    f"{_BACKEND}/distributed/test_optimizer_dtype_coercion.py",
    f"{_BACKEND}/distributed/test_worker_dispatch.py",
    f"{_BACKEND}/mtp/test_grad_clip.py",
    f"{_BACKEND}/weight_sync/test_weight_extractor_utils.py",
    f"{_BACKEND}/workers",
    "tests/train/test_config.py",
    "tests/train/test_trainer_utils.py",
)
"""Tests of workers, optimizers and configs; some versions of SkyRL lack some of the files."""

PRELUDE = """
import warnings
warnings.simplefilter("ignore")
from precision_shim_tools.testing.transformer_engine import stand_in_transformer_engine
stand_in = stand_in_transformer_engine("2.11.0")
stand_in.__enter__()
"""


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestUpstreamsOwn(contract.UpstreamsOwn):
    """SkyRL's own tests from its repository, without the ``conftest.py`` that starts Ray."""

    driver = DRIVER

    @pytest.fixture
    def own(self, ranks: Ranks, tmp_path: Path) -> Own:
        before = [commit for version, commit in BEFORE.items() if version == SKYRL]
        folder = tmp_path / "skyrl"
        folder.mkdir()
        fetch(folder, URL, (TAG, *before), "tests")
        for conftest in folder.rglob("conftest.py"):
            conftest.unlink()
        return Own(
            "skyrl",
            folder,
            FILES,
            least=lambda count: 30,
            start=in_a_fork_of(ranks),
            environment={"PYTHONPATH": python_path(folder), "RAY_ADDRESS": "local"},
            prelude=PRELUDE,
            markers=("megatron", "vllm", "integrations"),
        )
