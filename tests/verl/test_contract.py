"""verl passes the tests that are the same for every framework."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from precision_shim.scaling import save
from precision_shim_adapters.verl.config import of_engine

from ..every_framework import contract
from ..every_framework.checkpoint_doctor import verdict
from ..every_framework.in_force import refused
from ..every_framework.requested_configs import Case
from ..every_framework.taken_out import Seams
from ..every_framework.upstreams_own import Own, fetch
from ..processes.rank_server import Ranks
from ..unit.checkpoints.written import of_ranks, scaler
from .conftest import VERL
from .support import engine, optim_config

DRIVER = contract.Driver(
    "verl",
    version=str(VERL),
    pinned=str(VERL),
    worker=Path(__file__).with_name("status_worker.py"),
    example="verl_fsdp",
    tested=Version("0.7") <= VERL,
)
in_force = pytest.mark.skipif(
    not DRIVER.tested,
    reason="verl 0.6 stands for a version never tested: test_untested_version has all of it",
)


class TestRelease(contract.Release):
    driver = DRIVER


class Forked(contract.Contract):
    """Processes are forks of one with the slowest imports."""

    @pytest.fixture
    def server(self, ray_drivers: Ranks) -> Ranks:
        return ray_drivers


@in_force
class TestWorker(Forked, contract.Worker):
    driver = DRIVER


@in_force
class TestRequestedConfigs(contract.RequestedConfigs):
    driver = DRIVER

    @pytest.fixture
    def requested_of(self, checkpoint: Path) -> Callable[[Case], Any]:
        def read(case: Case) -> Any:
            asked = dict(case.asked)
            optimizer = {"optimizer": asked.pop("optimizer")} if "optimizer" in asked else {}
            made = engine(
                checkpoint,
                str(case.dtype).removeprefix("torch."),
                optim=optim_config(override_optimizer_config=asked, **optimizer),
                ddp={} if case.bucket is None else {"grad_reduce_in_fp32": case.bucket},
            )
            made.param_dtype = case.dtype  # verl's initialize sets the dtype first
            return of_engine(made)

        return read


@in_force
@pytest.mark.usefixtures("cpu")
class TestSeams(contract.Contract, Seams):
    driver = DRIVER


@in_force
class TestJob(Forked, contract.Job):
    driver = DRIVER

    def test_the_checkpoint_doctor_asks_for_the_workers_of_the_job(self, tmp_path: Path) -> None:
        """By default verl 0.7's PPO trains in legacy workers, but its SFT does not."""
        actor = of_ranks(tmp_path / "global_step_1" / "actor")
        sft = of_ranks(tmp_path / "sft" / "global_step_1")
        for folder in (actor, sft):
            save(folder, scaler())

        def said() -> list[str]:
            return [
                verdict(actor, "verl", on=True),
                verdict(actor, "verl", {"use_legacy_worker_impl": "disable"}, on=True),
                verdict(sft, "verl", on=True),
            ]

        assert said() == ["exact"] * 3
        with refused("verl", "fp16-scaling", "fsdp engine"):
            ppo = "exact" if Version("0.8") > VERL else "starts anew"
            assert said() == [ppo, "starts anew", "starts anew"]
        with refused("verl", "fp16-scaling", "legacy fsdp workers"):
            ppo = "starts anew" if Version("0.8") > VERL else "exact"
            assert said() == [ppo, "exact", "exact"]


class TestUpstream(contract.Upstream):
    driver = DRIVER


@in_force
@pytest.mark.slow
class TestUpstreamsOwn:
    """verl's own tests of init_megatron_optim_config, at the tag that contains them.

    The tests run on every version of verl in ``as-configured`` mode. One test must fail: it passes
    the invalid dtype ``"sentinel-override"``, which coercion must refuse.
    """

    @pytest.fixture(scope="class")
    def own(self, tmp_path_factory: pytest.TempPathFactory) -> Own:
        whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("verl")
        fetch(whole, "https://github.com/verl-project/verl", ("v0.9.0",), "tests/utils/megatron")
        shutil.copy(whole / "tests/utils/megatron/test_optimizer.py", folder)
        return Own(
            "verl",
            folder,
            ("test_optimizer.py",),
            install="precision_shim.install(settings={'optimizer_states': 'as-configured'})",
        )

    @pytest.mark.parametrize("on", [True, False], ids=["shim on", "shim off"])
    def test_upstreams_own_tests(self, own: Own, on: bool) -> None:
        ended = own.run(on=on)
        failed = ended.names("failed")
        assert len(failed | ended.names("passed")) == 11, ended.said
        if on:
            assert failed == {"test_override_optimizer_config_overrides_branch_defaults"}, (
                ended.said
            )
            assert "DtypeError" in ended.said
        elif Version("0.9") > VERL:
            assert len(failed) > 5, "without the shim this version lacks what they test"
        else:
            assert not failed, ended.said
