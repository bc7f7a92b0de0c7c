"""The actor class: how it is exported, what inherits from it, and that it comes out again."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from packaging.version import Version

import precision_shim
from precision_shim_adapters.nemo_rl.dtensor import ScaledWorker

from .support import KINDS, NAMES, NEMO_RL, actor_class, batch, loss_for, plain, scaler_of

pytestmark = pytest.mark.parametrize("kind", KINDS)

CLIPS = ("nemo_rl.models.dtensor.parallelize", "nemo_automodel.components.training.utils")


@pytest.fixture(autouse=True)
def _imported(kind: str, worker: Any) -> None:
    from precision_shim.testing.nemo_rl_cpu import nemo_rl_on_cpu

    with nemo_rl_on_cpu():
        actor_class(kind)


def contents(kind: str) -> dict[str, dict[str, Any]]:
    module, _, name = NAMES[kind].partition(":")
    spaces = {one: dict(vars(importlib.import_module(one))) for one in (module, *CLIPS)}
    implementation = getattr(importlib.import_module(module), f"{name}Impl", None)
    if implementation is not None:
        spaces[implementation.__name__] = dict(vars(implementation))
    return spaces


def changed(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> set[str]:
    return {
        f"{space}:{name}"
        for space in before
        for name in before[space].keys() | after[space].keys()
        if before[space].get(name, before) is not after[space].get(name, before)
    }


def test_in_and_out_leaves_nothing_behind(kind, shim) -> None:
    before = contents(kind)
    for _ in range(2):
        shim()
        module, _, name = NAMES[kind].partition(":")
        assert f"{module}:{name}" in changed(before, contents(kind))
        states = {
            seam.target: seam.state for seam in precision_shim.status().frameworks["nemo-rl"].seams
        }
        assert states[NAMES[kind]] == "wrapped"
        assert not {"refused"} & set(states.values())
        precision_shim.uninstall()
        assert not changed(before, contents(kind))


def test_the_actor_class_keeps_name_options_and_methods(kind, shim) -> None:
    before = actor_class(kind)
    shim()
    after = actor_class(kind)
    assert type(after).__name__ == type(before).__name__
    assert after._default_options == before._default_options
    old, new = (one.__ray_metadata__ for one in (before, after))
    assert new.class_name == old.class_name
    ours = {"_precision_shim_inside", "_precision_shim_training"}
    assert set(new.method_meta.methods) - ours == set(old.method_meta.methods)
    mine, theirs = (one.modified_class.__ray_actor_class__ for one in (new, old))
    assert mine.__mro__[1:] == (ScaledWorker, *theirs.__mro__)
    assert (mine.__module__, mine.__qualname__) == (theirs.__module__, theirs.__qualname__)


UNPICKLE = """
import sys, warnings
warnings.simplefilter("ignore")
from precision_shim.testing.nemo_rl_cpu import nemo_rl_on_cpu
with nemo_rl_on_cpu():
    import cloudpickle
    import importlib
    import precision_shim
    kind, file = sys.argv[1:]
    importlib.import_module(kind.partition(":")[0])
    worker = cloudpickle.load(open(file, "rb"))
    names = [one.__name__ for one in worker.__mro__]
    print("MRO", names[:3])
    hidden = worker.train
    print("TRAIN", hidden.__qualname__)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_survives_the_way_that_ray_sends_it(kind, shim, tmp_path: Path) -> None:
    from precision_shim.testing.nemo_rl_cpu import nemo_rl_on_cpu

    shim()
    modified = actor_class(kind).__ray_metadata__.modified_class
    file = tmp_path / "worker.pickle"
    with nemo_rl_on_cpu():
        file.write_bytes(cloudpickle.dumps(modified))
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLE, NAMES[kind], str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    name = NAMES[kind].partition(":")[2]
    assert f"MRO ['{name}', '{name}', 'ScaledWorker']" in done.stdout.replace("Class(", "")


@pytest.mark.skipif(Version("0.6") > NEMO_RL, reason="before 0.6 nothing can inherit from a worker")
def test_a_worker_of_the_users_own_scales_too(kind, shim, worker, monkeypatch) -> None:
    shim()
    module, _, name = NAMES[kind].partition(":")
    implementation = getattr(importlib.import_module(module), f"{name}Impl")

    class MyWorker(implementation):
        pass

    assert ScaledWorker not in MyWorker.__mro__
    monkeypatch.setattr("tests.nemo_rl.support.plain", lambda kind: MyWorker)
    with worker(kind, "float16") as one:
        metrics = one.train(batch(), loss_for(kind))["all_mb_metrics"]
        assert metrics["loss_scale"] == [65536.0]
        assert scaler_of(one).counter.steps == 1
    assert plain(kind) is not MyWorker
