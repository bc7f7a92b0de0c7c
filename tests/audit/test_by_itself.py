"""The audit runs by itself after a Megatron optimizer is made, and after its first step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import InconsistentPrecisionError, PrecisionShimWarning

from ..every_framework.shim_warnings import ours
from ..processes.rank_server import Ranks
from . import builds

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("verl", reason="an adapter on Megatron is woken by its framework")

HONEST = builds.HONEST["precision-aware"]
LYING = builds.NEMO_RL


@pytest.fixture
def shim(one_process: Any) -> Iterator[Callable[..., precision_shim.Status]]:
    def install(**options: Any) -> precision_shim.Status:
        return precision_shim.install(features=["audit"], export=False, **options)

    try:
        yield install
    finally:
        precision_shim.uninstall()


def inner(optimizer: Any) -> Any:
    return getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer


def stepped() -> Any:
    """A model and its optimizer after one step; ``status()`` forgets optimizers that are gone."""
    made = builds.make(HONEST)
    builds.step(*made)
    return made


def test_before_and_after_the_first_step(
    shim: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shim(settings={"audit_dir": tmp_path / "audits"})
    made = builds.make(HONEST)
    (before,) = precision_shim.status().audit
    (path,) = (tmp_path / "audits").iterdir()
    assert (before.ok, before.complete) == (True, False)
    assert json.loads(path.read_text()) == before.to_dict()
    assert "audit: " not in capsys.readouterr().err
    builds.step(*made)
    (after,) = precision_shim.status().audit
    assert (after.ok, after.complete) == (True, True)
    assert json.loads(path.read_text()) == after.to_dict()
    assert [one.name for one in (tmp_path / "audits").iterdir()] == [path.name]
    line = "audit: bf16 parameters, bf16 buckets, int16 masters, bf16/bf16 moments; no problems"
    assert capsys.readouterr().err.count(line) == 1
    assert line.removeprefix("audit: ") in " ".join(str(precision_shim.status()).split())
    assert str(after) in precision_shim.status().details()
    assert precision_shim.status().to_dict()["audit"] == [after.to_dict()]
    precision_shim.uninstall()
    assert list(precision_shim.status().audit) == []


def test_a_second_hook_and_later_steps(shim: Any) -> None:
    shim()
    made = builds.make(HONEST)
    calls = []
    inner(made[1]).register_step_post_hook(lambda *_: calls.append(1))
    builds.step(*made)
    (after,) = precision_shim.status().audit
    builds.step(*made)
    assert calls == [1, 1]
    assert precision_shim.status().audit == [after]


@pytest.mark.parametrize("stepped", [False, True], ids=["before its step", "after it"])
def test_uninstall_leaves_no_hook(shim: Any, stepped: bool) -> None:
    shim()
    made = builds.make(HONEST)
    if stepped:
        builds.step(*made)
    assert len(inner(made[1])._optimizer_step_post_hooks) == 1
    precision_shim.uninstall()
    assert not inner(made[1])._optimizer_step_post_hooks
    builds.step(*made)
    assert list(precision_shim.status().audit) == []


def test_no_step_is_changed(shim: Any) -> None:
    def losses() -> list[float]:
        return builds.train(*builds.make(HONEST), 4)

    shim()
    with_it = losses()
    precision_shim.uninstall()
    assert losses() == with_it


def test_optimizers_that_others_make(shim: Any) -> None:
    """ROLL uses its own copy of get_megatron_optimizer, which does not chain optimizers."""
    shim()
    names = ("bf16, not distributed", "fp32, not distributed", "fp32")
    several = [builds.make(builds.HONEST[name]) for name in names]  # status() forgets those gone
    for made in several:
        builds.step(*made)
    kinds = [one.parts[0].optimizer for one in precision_shim.status().audit]
    assert kinds == ["Float16OptimizerWithFloat16Params", "FP32Optimizer", "DistributedOptimizer"]
    assert all(one.ok and one.complete for one in precision_shim.status().audit)


def test_a_problem_warns_once(shim: Any) -> None:
    shim()
    with ours() as said:
        builds.step(*builds.make(LYING))
    assert ["main-grads-dtype" in one for one in said] == [True]


def test_strict_raises(shim: Any) -> None:
    shim(strict=True)
    builds.make(HONEST)
    with pytest.raises(InconsistentPrecisionError, match="expected fp32, found bf16"):
        builds.make(LYING)


def test_what_comes_to_light_with_the_first_step_raises_there(shim: Any) -> None:
    shim(strict=True)
    made = builds.make(builds.PLANTED["moment-dtype"])
    builds.plant("moment-dtype", made[1])
    with pytest.raises(InconsistentPrecisionError, match="exp_avg_sq"):
        builds.step(*made)


def test_what_the_user_wrote_does_not_raise(shim: Any) -> None:
    from megatron.core.distributed import DistributedDataParallel

    from precision_shim_adapters.megatron.training.ddp import compared_with

    shim(strict=True)
    own = DistributedDataParallel.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        compared_with[self] = torch.float32

    with pytest.MonkeyPatch.context() as patch, ours() as said:
        patch.setattr(DistributedDataParallel, "__init__", note)
        made = builds.make(LYING)
    assert made
    assert any("main-grads-dtype" in one for one in said)
    assert [one.ok for one in precision_shim.status().audit] == [False]


def test_off_it_is_not_there(one_process: Any) -> None:
    try:
        precision_shim.install(features=["dtype-coercion"], export=False)
        builds.step(*builds.make(HONEST))
        assert list(precision_shim.status().audit) == []
    finally:
        precision_shim.uninstall()


def test_a_directory_that_cannot_be_written_costs_the_file(shim: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shim(settings={"audit_dir": tmp_path / "file" / "audits"})
    with pytest.warns(PrecisionShimWarning, match="the audit was not written"):
        made = stepped()
    assert made
    assert [one.complete for one in precision_shim.status().audit] == [True]


def notes_on_files() -> list[str]:
    """The notes, except those on other tests' optimizers, which are older than the patches."""
    return [note for note in precision_shim.status().notes if "built before install" not in note]


def test_a_directory_that_cannot_be_written_is_one_warning_with_a_remedy(shim: Any) -> None:
    """``/proc/self`` acts as a read-only mount, because Linux lets nobody create a file there."""
    shim(settings={"audit_dir": "/proc/self"})
    with ours() as said:
        several = [builds.make(HONEST) for _ in range(2)]
        for made in several:
            builds.step(*made)
    (told,) = said
    assert told.startswith("PRECISION_SHIM_AUDIT_DIR=/proc/self: the audit was not written: ")
    assert "rank0.audit.json" not in told, "the name of a temporary file, another one each time"
    assert "Set PRECISION_SHIM_AUDIT_DIR to a directory that every rank may write to" in told
    status = precision_shim.status()
    assert notes_on_files() == [told]
    shown = " ".join(str(status).split())
    assert told in shown.partition("what is wrong, and what to do")[2]
    assert len(status.audit) == 2


@pytest.mark.parametrize(
    ("features", "last", "told"),
    [
        ("audit", "torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)", True),
        ("-audit", "torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)", False),
        ("audit", "", False),
    ],
)
def test_a_process_whose_optimizer_nothing_audits_says_so_at_its_end(
    run_ranks: Ranks, tmp_path: Path, features: str, last: str, told: bool
) -> None:
    code = (
        "import precision_shim, torch\n"
        f"settings = {{'audit_dir': {str(tmp_path)!r}}}\n"
        f"precision_shim.install(features={features!r}, settings=settings)\n"
    )
    run_ranks("ended", world=1, code=code + last)
    expected = f"{tmp_path}: no audit was written: this process built an optimizer (SGD), but"
    assert (expected in run_ranks.said[0]) is told
    assert bool(run_ranks.said[0]) is told


def test_a_directory_that_can_be_written_again_is_no_problem_any_more(
    shim: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    shim(settings={"audit_dir": tmp_path / "file" / "audits"})
    made = builds.make(HONEST)
    assert len(notes_on_files()) == 1
    (tmp_path / "file").unlink()
    builds.step(*made)
    assert notes_on_files() == []
    assert len(list((tmp_path / "file" / "audits").iterdir())) == 1
