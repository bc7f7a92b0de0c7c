"""Export and removal of the shim's actor class, and a user's subclass of NeMo-RL's worker."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import cloudpickle
import pytest
from packaging.version import Version

from precision_shim_adapters.nemo_rl.audit.optimizers import AuditedWorker
from precision_shim_adapters.nemo_rl.training.dtensor import ScaledWorker

from ..processes.actor_methods import described
from ..processes.rank_server import Ranks
from .cpu import nemo_rl_on_cpu
from .support import NAMES, NEMO_RL, actor_class, batch, each_kind, nll_loss, plain, scaler_of

CLIPS = ("nemo_rl.models.dtensor.parallelize", "nemo_automodel.components.training.utils")


@each_kind
def test_the_actor_class_keeps_name_options_and_methods(kind, shim) -> None:
    with nemo_rl_on_cpu():
        before = actor_class(kind)
    methods = described(before)
    assert {"__init__", "train", "save_checkpoint", "load_checkpoint"} <= methods.keys()
    shim()
    after = actor_class(kind)
    assert described(after) == methods
    assert type(after).__name__ == type(before).__name__
    assert after._default_options == before._default_options
    old, new = (one.__ray_metadata__ for one in (before, after))
    assert new.class_name == old.class_name
    ours = {"_precision_shim_inside", "_precision_shim_training"}
    assert set(new.method_meta.methods) - ours == set(old.method_meta.methods)
    mine, theirs = (one.modified_class.__ray_actor_class__ for one in (new, old))
    scaled = mine.__mro__[2]
    assert mine.__mro__[1:] == (AuditedWorker, scaled, ScaledWorker, *theirs.__mro__)
    assert scaled.__qualname__ == theirs.__qualname__
    assert (mine.__module__, mine.__qualname__) == (theirs.__module__, theirs.__qualname__)
    with pytest.raises(TypeError, match="nonsense"):
        inspect.signature(mine.load_checkpoint).bind(None, "weights", nonsense=1)
    with nemo_rl_on_cpu():
        cloudpickle.dumps(new.modified_class)


@pytest.mark.slow
@pytest.mark.oldest
@each_kind
def test_it_survives_the_way_that_ray_sends_it(kind, shim, ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "worker.pickle"
    with nemo_rl_on_cpu():
        actor_class(kind)
        shim()
        modified = actor_class(kind).__ray_metadata__.modified_class
        file.write_bytes(cloudpickle.dumps(modified))
    (names,) = ranks("unpickle", world=1, target=NAMES[kind], file=str(file))
    name = NAMES[kind].partition(":")[2]
    assert [one.removeprefix("Class(").removesuffix(")") for one in names[:5]] == [
        name,
        name,
        "AuditedWorker",
        name,
        "ScaledWorker",
    ]


@pytest.mark.skipif(Version("0.6") > NEMO_RL, reason="before 0.6 nothing can inherit from a worker")
def test_a_worker_of_the_users_own_scales_too(shim, worker, monkeypatch) -> None:
    shim()
    module, _, name = NAMES["v2"].partition(":")
    implementation = getattr(importlib.import_module(module), f"{name}Impl")

    class MyWorker(implementation):
        pass

    assert ScaledWorker not in MyWorker.__mro__
    monkeypatch.setattr("tests.nemo_rl.support.plain", lambda kind: MyWorker)
    with worker("v2", "float16") as one:
        metrics = one.train(batch(), nll_loss())["all_mb_metrics"]
        assert metrics["loss_scale"] == [65536.0]
        assert scaler_of(one).counter.steps == 1
    assert plain("v2") is not MyWorker
