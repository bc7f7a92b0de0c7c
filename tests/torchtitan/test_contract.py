"""torchtitan passes the tests that are the same for every framework."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ..every_framework import contract
from ..every_framework.checkouts import Told, as_checkout
from ..every_framework.checkpoint_doctor import hold_groups
from ..every_framework.taken_out import Seams
from ..every_framework.upstreams_own import Own, fetch, in_a_fork_of
from ..processes.rank_server import Ranks
from .conftest import TORCHTITAN

PROJECT = """
[project]
name = "torchtitan"
dynamic = ["version"]

[tool.setuptools.dynamic]
version = {file = "assets/version.txt"}
"""
"""The part of torchtitan's own ``pyproject.toml`` that reads the version from a file."""


def add_project(root: Path, version: str) -> None:
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "assets").mkdir()
    (root / "assets/version.txt").write_text(f"{version}\n")


DRIVER = contract.Driver(
    "torchtitan",
    version=TORCHTITAN,
    pinned=TORCHTITAN,
    worker=Path(__file__).with_name("status_worker.py"),
    example="torchtitan_pretraining",
    state_version=add_project,
)


class TestRelease(contract.Release):
    driver = DRIVER

    @pytest.mark.slow
    def test_the_packages_alone_state_none_and_are_like_a_recorded_one(
        self, installed: Told, tmp_path: Path
    ) -> None:
        told = as_checkout("torchtitan", tmp_path)
        assert told.version == "unknown"
        assert f"all as in {installed.version}" in told.reason
        assert told.seams == installed.seams


class TestWorker(contract.Forked, contract.Worker):
    """The worker is a real RL trainer."""

    driver = DRIVER


@pytest.mark.usefixtures("torchtitan")
class TestSeams(contract.Contract, Seams):
    driver = DRIVER


class TestJob(contract.Forked, contract.Job):
    driver = DRIVER

    @pytest.mark.parametrize(("case", "group"), [("policy", "rl"), ("pretrain", "pretraining")])
    def test_the_checkpoint_doctor_asks_for_the_trainer_of_the_job(
        self, ranks: Ranks, tmp_path: Path, case: str, group: str
    ) -> None:
        ranks(case, folder=tmp_path, world=1, first=0, last=1, save=True)
        groups = {name: name == group for name in ("rl", "pretraining")}
        hold_groups(tmp_path / "checkpoint", "torchtitan", groups)


class TestUpstream(contract.Upstream):
    driver = DRIVER


UNIT = (
    "activation_checkpoint",
    "checkpoint",
    "compile_moe",
    "config_manager",
    "configurable",
    "distributed_utils",
    "expert_parallel",
    "fused_qkv",
    "gpt_oss_moe",
    "inference_moe",
    "invalid_loss",
    "linear",
    "lora",
    "loss",
    "lr_scheduler",
    "module",
    "moe",
    "no_new_cli_options",
    "optimizer_param_groups",
    "override",
    "parallel_dims",
    "set_determinism",
    "state_dict_keys",
    "train_spec",
    "trainer",
    "weight_tying",
)
"""Unit tests of the trainers, their configs and the functions that the shim wraps."""

COMMIT = "1fdf90d3f9b756ef709ce262bc839f1dab679b5e"
"""The commit of version 0.3.0rc1, which has no tag."""

PRELUDE = f"""
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.torchtitan import cpu
cpu.answer_for_gpus()


def pytest_collection_modifyitems(items):
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    items[:] = [
        item for item in items if not issubclass(item.cls or object, MultiProcessTestCase)
    ]


"""


@pytest.mark.slow
@pytest.mark.timeout(2000)
class TestUpstreamsOwn(contract.UpstreamsOwn):
    """torchtitan's own tests: RL tests from the wheel, unit tests from the repository.

    Tests that need vLLM, a GPU or the network fail with the shim on and off. Tests that start
    processes are left out: those processes read neither ``conftest.py`` nor the start-up file.
    """

    driver = DRIVER

    @pytest.fixture(params=["rl", "unit_tests"])
    def own(self, ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest) -> Own:
        folder = tmp_path / request.param
        folder.mkdir()
        if request.param == "rl":
            (place,) = importlib.util.find_spec("torchtitan").submodule_search_locations
            files = [*Path(place, "experiments", "rl", "tests").glob("test_*.py")]
        else:
            whole = tmp_path / "repository"
            whole.mkdir()
            url = "https://github.com/pytorch/torchtitan"
            fetch(whole, url, (COMMIT,), "tests/unit_tests")
            files = [whole / "tests" / "unit_tests" / f"test_{name}.py" for name in UNIT]
        for file in files:
            (folder / file.name).write_text(file.read_text())
        return Own(
            "torchtitan",
            folder,
            ["."],
            least=lambda count: count // 2 + 1,
            start=in_a_fork_of(ranks),
            environment={"CUDA_VISIBLE_DEVICES": ""},
            prelude=PRELUDE,
            install='precision_shim.install(settings={"log": "quiet"})',
        )
