"""NeMo-RL passes the tests that are the same for every framework."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from precision_shim.process.registry import entries, load
from precision_shim.process.settings import resolve
from precision_shim.seams._source import looking_at
from precision_shim_adapters.nemo_rl.config import read_requested
from precision_shim_adapters.nemo_rl.training.workers import POLICIES, VALUE
from precision_shim_tools.predicted import predict_seams

from ..every_framework import contract
from ..every_framework.checkouts import Told
from ..every_framework.checkpoint_doctor import hold_groups
from ..every_framework.mutants import Sources
from ..every_framework.newest import on_the_newest
from ..every_framework.requested_configs import Case
from ..every_framework.taken_out import Seams
from ..every_framework.upstreams_own import Own, fetch, in_a_fork_of
from ..processes.rank_server import Ranks
from .megatron import support as on_megatron
from .megatron.conftest import cpu  # noqa: F401
from .support import NEMO_RL, batch, loss_for, save

DRIVER = contract.Driver(
    "nemo-rl",
    # The tag v0.5.0 has the version 0.5.0rc0.
    version=Version(version("nemo-rl")).public,
    pinned=NEMO_RL.base_version,
    worker=Path(__file__).with_name("megatron") / "status_worker.py",
    example="nemo_rl_dtensor",
)


class TestRelease(contract.Release):
    """Also tests a checkout on ``PYTHONPATH``, because NeMo-RL's own launcher uses a checkout."""

    driver = DRIVER

    @on_the_newest("nemo-rl")
    @pytest.mark.slow
    def test_a_checkout_before_another_that_is_installed(self, tmp_path: Path) -> None:
        """The version comes from the imported checkout, not from metadata elsewhere on the path."""
        place = next(Path(path, "nemo_rl") for path in sys.path if Path(path, "nemo_rl").is_dir())
        shutil.copytree(place, tmp_path / "nemo_rl")
        stated = tmp_path / "nemo_rl/package_info.py"
        lines = stated.read_text("utf-8").splitlines()
        changed = ["MINOR = 99" if line.startswith("MINOR") else line for line in lines]
        stated.write_text("\n".join(changed), "utf-8")
        told = Told("nemo-rl", [str(tmp_path), *(path for path in sys.path if path)])
        assert told.version.split(".")[1] == "99"
        assert "not among the tested versions" in told.reason

    def test_without_megatron_workers_their_metrics_are_absent_and_not_refused(self) -> None:
        sources = Sources()
        sources.changed = dict.fromkeys((*POLICIES, VALUE))
        with looking_at(sources.find):
            seams = predict_seams(load(entries()["nemo-rl"]), resolve(environ={}))
        metrics = [one for one in seams if one.group == "megatron metrics"]
        assert {one.state for one in metrics} == {"absent"}


class TestWorker(contract.Forked, contract.Worker):
    driver = DRIVER


class TestRequestedConfigs(contract.RequestedConfigs):
    driver = DRIVER
    OPEN = ("bf16", "fp16", "params_dtype", "use_precision_aware_optimizer", "adam_beta2")
    """Keys in NeMo-RL's YAML files that ``requested_of`` omits, unless the case sets them."""

    @pytest.fixture
    def requested_of(self, model: Path) -> Callable[[Case], Any]:
        def read(case: Case) -> Any:
            assert set(self.OPEN) <= set(on_megatron.OPTIMIZER)
            precision = str(case.dtype).removeprefix("torch.")
            config = on_megatron.policy_config(
                model, precision, drop=self.OPEN, optimizer=dict(case.asked)
            )
            ddp = config["megatron_cfg"]["distributed_data_parallel_config"]
            del ddp["grad_reduce_in_fp32"]
            if case.bucket is not None:
                ddp["grad_reduce_in_fp32"] = case.bucket
            return read_requested(config, "policy", megatron_fsdp=False, trains=True)

        return read


@pytest.mark.usefixtures("cpu")
class TestSeams(contract.Contract, Seams):
    driver = DRIVER


class TestJob(contract.Forked, contract.Job):
    driver = DRIVER

    @pytest.mark.slow
    def test_all_say_what_the_worker_says(self) -> None:
        super().test_all_say_what_the_worker_says()


@pytest.mark.parametrize("kind", ["v1", "v2"])  # v1 saves weights as .distcp, v2 as safetensors
def test_the_checkpoint_doctor_asks_for_the_workers_of_the_job(
    worker: Any, shim: Any, tmp_path: Path, kind: str
) -> None:
    shim()
    folder = tmp_path / "step_1" / "policy"
    with worker(kind, "float16") as trained:
        trained.train(batch(), loss_for(kind))
        save(trained, folder)
    hold_groups(folder, "nemo-rl", {f"dtensor {each}": each == kind for each in ("v1", "v2")})


class TestUpstream(contract.Upstream):
    driver = DRIVER


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestUpstreamsOwn(contract.UpstreamsOwn):
    """Tests in NeMo-RL's repository at the installed version's tag; the package has none.

    The run omits the repository's ``conftest.py``, which starts a Ray cluster for every test. A
    test that needs a fixture of ``conftest.py`` errors both with the shim and without it.
    """

    driver = DRIVER
    FILES = (
        *(
            f"models/automodel/test_automodel_{name}.py"
            for name in ("checkpoint", "setup", "train")
        ),
        "models/policy/test_utils.py",
        "utils/test_automodel_checkpoint.py",
    )
    """Tests of workers and wrapped symbols; some versions of NeMo-RL lack some of the files.

    Left out are files whose tests fail here before they begin, each after it has started Ray or for
    want of a GPU or the network, and those of functions that no seam reaches: data, LoRA.
    """

    @pytest.fixture
    def own(self, ranks: Ranks, tmp_path: Path) -> Own:
        folder = tmp_path / "RL"
        folder.mkdir()
        fetch(folder, "https://github.com/NVIDIA-NeMo/RL", (f"refs/tags/v{NEMO_RL}",), ".")
        return Own(
            "nemo-rl",
            folder,
            [f"tests/unit/{file}" for file in self.FILES],
            least=lambda count: 15,  # 0.4.0 has the fewest: 18
            start=in_a_fork_of(ranks),
            environment={"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
            conftest="tests/unit/conftest.py",
            # These each start two processes, which fail for want of a GPU.
            options=("-k", "not zmq_impl"),
            markers=("automodel", "mcore", "vllm", "sglang", "hf_gated", "run_first", "nemo_gym"),
        )
