"""The ranks of the fp16 tests on FSDP; ``tests/processes/rank_server.py`` starts them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import precision_shim
from precision_shim.scaling import FILE_NAME

from ..every_framework.checkpoint_doctor import FP16, verdict
from ..every_framework.shim_warnings import ours
from ..processes.rank_server import Launch, look_ahead
from . import fsdp_support as support

LOUD = 2.0**11
"""A loss weight at which gradients overflow at a grown scale, but not at a fresh one."""

OVERFLOWS = {2: support.HUGE, 9: LOUD}
"""Loss weights by step: gradients overflow at one step before and one after a save at step 6."""

SAVED, STEPS = 6, 11

SETTINGS = {"loss_scale_init": 2.0**12, "growth_interval": 3}
"""Scaler settings: a fresh scaler differs from a scaler that grew and fell."""

GROWING = {"loss_scale_init": 2.0, "growth_interval": 2, "growth_factor": 8.0}
"""At step 9 of ``OVERFLOWS`` a kept scale is 2**12; a scale restarted at step 6 is 2**4.

With ``LOUD`` the gradients of step 9 overflow at 2**12 and not at 2**4. The ratio of 256 is far
larger than differences between CPUs' kernels, so every CPU gives the same result.
"""

CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as a case of the ranks, by its name."""
    CASES[function.__name__] = function
    return function


class Job:
    """The models and the folder of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.folder = Path(launch.folder)
        self.model, self.value_model = os.environ["MODEL"], os.environ["VALUE_MODEL"]

    def path(self, name: str) -> str:
        """The directory of a checkpoint, by its name."""
        return str(self.folder / name)


def install(**settings: Any) -> None:
    """Install the shim with the settings that a user would set as variables."""
    precision_shim.install(settings={**SETTINGS, **settings})


def verls_own(one: Any) -> None:
    """Replace verl's own scaler, which torch disables without a GPU, by one that works on a CPU."""
    one.scaler = ShardedGradScaler(
        device="cpu",
        init_scale=GROWING["loss_scale_init"],
        growth_interval=2,
        growth_factor=GROWING["growth_factor"],
    )


# -- engines -----------------------------------------------------------------------------------


@case
def exact(job: Job) -> dict[str, Any]:
    """Train all steps straight, and again with a save and a load at step ``SAVED``."""
    install(**GROWING)
    one = support.engine(job.model)
    kind = type(one.scaler).__name__
    said = support.train(one, range(STEPS), OVERFLOWS)
    straight = support.engine_state(one)

    two = support.engine(job.model)
    support.train(two, range(SAVED), OVERFLOWS)
    half = support.engine_state(two)
    calls: list[int] = []
    step = two.optimizer.step
    two.optimizer.step = lambda *args, **kwargs: calls.append(1) or step(*args, **kwargs)
    two.save_checkpoint(job.path("shim"), global_step=SAVED)
    after_save = support.engine_state(two)
    three = support.engine(job.model)
    support.train(three, range(50, 51))  # the load has to replace existing states
    three.load_checkpoint(job.path("shim"), del_local_after_load=False)
    loaded = support.engine_state(three)
    again = support.train(three, range(SAVED, STEPS), OVERFLOWS)
    return {
        "kind": kind,
        "straight": straight,
        "half": half,
        "after_save": after_save,
        "loaded": loaded,
        "same_process": support.engine_state(three),
        "said": said,
        "said_again": again,
        "steps_while_saving": len(calls),
        "files": support.folder_of(job.path("shim")),
    }


@case
def half(job: Job) -> str:
    """Train a step with the shim on rank 0 only; returns the error."""
    from precision_shim.process import marks

    marks.PATIENCE = 1.0
    if dist.get_rank() == 0:
        install()
    try:
        support.train(support.engine(job.model), range(1))
    except (precision_shim.PartialInstallationError, RuntimeError) as error:  # the other has left
        return str(error)
    return ""


@case
def strict(job: Job) -> dict[str, Any]:
    """Under strict, errors of the shim are raised when a trained engine builds an optimizer."""
    from precision_shim.process import session as _session
    from precision_shim_adapters.verl import adapter

    found: dict[str, Any] = {}

    def build(name: str, **options: Any) -> None:
        try:
            support.engine(job.model, **options)
            found[name] = ""
        except precision_shim.PrecisionShimError as error:
            found[name] = f"{type(error).__name__}: {error}"

    os.environ.update({"PRECISION_SHIM": "strict", "PRECISION_SHIM_GROWTH_INTERVAL": "often"})
    _session.start()
    build("bad setting")
    build("bad setting, reference", forward_only=True)
    precision_shim.uninstall()
    del os.environ["PRECISION_SHIM"], os.environ["PRECISION_SHIM_GROWTH_INTERVAL"]

    whole = adapter.SEAMS
    broken = tuple(
        dataclasses.replace(one, relies_on=("no_such_name",)) if one.group == "fsdp engine" else one
        for one in whole
    )
    adapter.SEAMS = broken
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(precision_shim.SeamError):  # verl is imported already
            precision_shim.install(strict=True)
        build("refused")
        build("refused, reference", forward_only=True)
        precision_shim.uninstall()
        precision_shim.install()
        build("refused, not strict")
        precision_shim.uninstall()
    adapter.SEAMS = whole
    precision_shim.install(strict=True)
    build("nothing wrong")
    return found


@case
def resumed(job: Job) -> dict[str, Any]:
    """In a new process, resume from ``exact`` without the shim, and with it; the latter trains."""
    plain = support.engine(job.model)
    plain.load_checkpoint(job.path("shim"), del_local_after_load=False)
    of_the_shim = support.engine_state(plain)
    support.train(plain, range(1))
    plain.save_checkpoint(job.path("plain"), global_step=1)
    late = precision_shim.install(settings={**SETTINGS, **GROWING}).notes
    one = support.engine(job.model)
    with ours() as said:
        one.load_checkpoint(None)
        one.load_checkpoint(job.path("shim"), del_local_after_load=False)
    support.train(one, range(SAVED, STEPS), OVERFLOWS)
    end = support.engine_state(one)
    predicted = [verdict(job.path(name), "verl", FP16) for name in ("shim", "plain")]
    two = support.engine(job.model)
    with ours() as without:
        two.load_checkpoint(job.path("plain"), del_local_after_load=False)
        two.load_checkpoint(job.path("plain"), del_local_after_load=False)
    return {
        "of_the_shim": of_the_shim,
        "late": late,
        "end": end,
        "predicted": predicted,
        "said": said,
        "said_without": without,
        "fresh": support.engine_state(two)["scale"],
        "trains": support.train(two, range(1)),
    }


@case
def rounds(job: Job) -> list[Any]:
    """Resume an engine in fp32 as one in fp32 and as one in bf16, also under strict."""
    precision_shim.install()
    wide = support.engine(job.model, param_dtype="bf16")
    support.train(wide, range(1))
    wide.save_checkpoint(job.path("fp32"), global_step=1)
    told: list[Any] = []
    for dtype in ("fp32", "bf16"):
        one = support.engine(job.model, param_dtype="bf16", model_dtype=dtype)
        with ours() as said:
            one.load_checkpoint(job.path("fp32"), del_local_after_load=False)
        told.append(said)
    precision_shim.install(strict=True)
    one = support.engine(job.model, param_dtype="bf16", model_dtype="bf16")
    try:
        one.load_checkpoint(job.path("fp32"), del_local_after_load=False)
    except precision_shim.CheckpointLayoutError as error:
        told.append(str(error))
    return told


@case
def faults(job: Job) -> dict[str, Any]:
    """Test an overflow on rank 1 only, NaN, evaluation, endless skips, and a failing save."""
    install()
    found: dict[str, Any] = {}
    one = support.engine(job.model)
    support.train(one, range(2))
    before = support.engine_state(one)
    with one.train_mode():
        one.optimizer_zero_grad()
        one.forward_backward_batch(support.batch(2), support.loss_function(), forward_only=False)
        grad = support.local(next(p.grad for p in one.module.parameters() if p.grad is not None))
        if dist.get_rank() == 1:
            grad.view(-1)[0] = math.inf
        norm = one.optimizer_step()
    found["alone"] = [before, support.engine_state(one), norm]

    before = support.engine_state(one)
    with one.train_mode():
        weights = (1.0, math.nan) if dist.get_rank() == 0 else (1.0, 1.0)
        got = one.train_batch(support.batch(3), support.loss_function(weights))
    found["nan"] = [before, support.engine_state(one), got["metrics"]["grad_norm"], got["loss"]]

    before = support.engine_state(one)
    with one.eval_mode():
        looked = one.infer_batch(support.batch(4), support.loss_function())
    found["eval"] = [before, support.engine_state(one), looked["loss"]]
    found["after"] = support.train(one, range(5, 6))

    # A directory blocks the shim's file; verl writes its own files.
    Path(job.path("blocked"), "precision_shim_scaler.json").mkdir(parents=True, exist_ok=True)
    with ours() as said:
        one.save_checkpoint(job.path("blocked"), global_step=1)
    found["blocked"] = [said, support.folder_of(job.path("blocked"))]

    two = support.engine(job.model)
    two.scaler.counter.steps = two.scaler.counter.in_row = 22
    try:
        support.train(two, range(4), range(4))
    except precision_shim.PrecisionShimError as error:
        found["end"] = [type(error).__name__, str(error), two.scaler.counter.steps]
    return found


@case
def shards(job: Job) -> dict[str, Any]:
    """Train fp16 shards whose gradients' norm is far above 256."""
    install(loss_scale_init=1.0, growth_interval=1)
    one = support.engine(job.model, model_dtype="fp16", optimizer={"fused": True}, lr=1e-3)
    before = support.bits(support.parameters(one.module))
    with one.train_mode():
        one.optimizer_zero_grad()
        weights = (2.0**10, 2.0**10)
        one.forward_backward_batch(
            support.batch(0), support.loss_function(weights), forward_only=False
        )
        held = [p for p in one.module.parameters() if p.grad is not None]
        expected = torch.cat([p.grad.full_tensor().double().flatten() for p in held]).norm()
        norm = one.optimizer_step()
        clipped = torch.cat([p.grad.full_tensor().double().flatten() for p in held]).norm()
    return {
        "norms": [float(norm), float(expected), float(clipped)],
        "moved": support.bits(support.parameters(one.module)) != before,
        "skipped": one.scaler.counter.skipped,
        "kinds": sorted({str(p.dtype) for p in held}),
    }


@case
def own_step(job: Job) -> dict[str, Any]:
    """Drop gradients on purpose and save; then a user's step that unscales nothing."""
    found: dict[str, Any] = {}
    for scale in (2.0**10, 2.0**40):  # at 2**40 the user's check lets no step through
        precision_shim.uninstall()
        install(loss_scale_init=scale)
        one = support.engine(job.model)
        with one.train_mode():
            for step in range(2):
                one.forward_backward_batch(
                    support.batch(step), support.loss_function(), forward_only=False
                )
                one.optimizer_zero_grad()
        one.save_checkpoint(job.path(f"dropped {scale}"), global_step=1)
        one.load_checkpoint(job.path(f"dropped {scale}"), del_local_after_load=False)
        support.train(one, [0])  # a step of verl's own, after which no gradient is scaled
        verls = type(one).optimizer_step
        # An override that calls verl's own function.
        type(one).optimizer_step = lambda self, own=verls: own(self)
        support.train(one, [0])

        def mine(self: Any) -> float:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0).full_tensor()
            if torch.isfinite(norm):
                self.optimizer.step()
            return norm.item()

        type(one).optimizer_step = mine
        before = support.bits(support.parameters(one.module))
        try:
            support.train(one, range(2))
            found[str(scale)] = ""
        except precision_shim.PrecisionShimError as error:
            found[str(scale)] = f"{type(error).__name__}: {error}"
        del type(one).optimizer_step
        found["unmoved"] = support.bits(support.parameters(one.module)) == before
    return found


@case
def contents(job: Job) -> dict[str, Any]:
    """Test partial checkpoints, rotation, a second save, a remote load, and a reference model."""
    install()
    found: dict[str, Any] = {}
    only = support.engine(job.model, contents=("model",))
    support.train(only, range(2))
    with ours() as said:
        only.save_checkpoint(job.path("only"), global_step=1)
        only.load_checkpoint(job.path("only"), del_local_after_load=False)
    found["model_only"] = [support.folder_of(job.path("only")), said]

    one = support.engine(job.model)
    support.train(one, range(2), (1,))
    for number in (1, 2, 3):
        one.save_checkpoint(job.path(f"turn/{number}"), global_step=number, max_ckpt_to_keep=2)
    found["rotated"] = support.folder_of(job.path("turn"))
    dist.barrier()  # the next save removes a directory before its own barrier
    one.save_checkpoint(job.path("turn/2"), global_step=4, max_ckpt_to_keep=2)
    found["again"] = support.folder_of(job.path("turn/2"))
    one.save_checkpoint(None)

    part = support.engine(job.model, contents=("model", "optimizer", "extra"), load=("model",))
    before = support.engine_state(part)["scale"]
    with ours() as said:
        part.load_checkpoint(job.path("turn/3"), del_local_after_load=False)
    found["load_model_only"] = [before, support.engine_state(part)["scale"], said]

    import verl.utils.fs as fs
    import verl.utils.hdfs_io as hdfs_io

    def get(source: str, target: str, **kwargs: Any) -> bool:
        import shutil

        near = job.path("turn/3") + source.removeprefix("hdfs://far")
        with contextlib.suppress(OSError):  # a failed copy raises no error in HDFS's client
            shutil.copy(near, target)
        return True

    fs.copy = hdfs_io.copy = get
    tempfile.tempdir = str(job.folder)  # verl puts local copies into tempdir
    far, files = support.engine(job.model), sorted(job.folder.rglob(FILE_NAME))
    with ours() as said:
        far.load_checkpoint("hdfs://far", del_local_after_load=True)
    dist.barrier()  # rank 0 has removed its copy
    left = [str(path) for path in job.folder.rglob(FILE_NAME) if path not in files]
    found["remote"] = [support.engine_state(one), support.engine_state(far), said, left]

    reference = support.engine(job.model, forward_only=True, offload_policy=False)
    found["reference"] = type(getattr(reference, "scaler", None)).__name__
    return found


@case
def late(job: Job) -> dict[str, Any]:
    """Call install() after the engine is built: verl's own scaler stays, and is saved."""
    one = support.engine(job.model)
    verls_own(one)
    support.train(one, range(2), (1,))
    install()
    support.train(one, range(2, 3))
    one.save_checkpoint(job.path("late"), global_step=1)
    two = support.engine(job.model)
    two.load_checkpoint(job.path("late"), del_local_after_load=False)
    return {
        "kind": type(one.scaler).__name__,
        "saved": support.engine_state(one),
        "loaded": support.engine_state(two),
        "loaded_kind": type(two.scaler).__name__,
    }


@case
def metrics(job: Job) -> dict[str, Any]:
    """The metrics that verl's TrainingWorker returns to a trainer, for an actor and a critic."""
    import verl.utils.tensordict_utils as tu
    from verl.utils.metric import reduce_metrics

    install()
    found: dict[str, Any] = {}
    for critic in (False, True):
        path = job.value_model if critic else job.model
        one = support.engine(path, critic=critic)
        worker = support.training_worker(one, critic=critic)
        said = []
        for step in range(3):
            weight = support.HUGE if step == 1 else 1.0
            worker.set_loss_fn(support.loss_function([weight] * 9, critic=critic))
            data = support.batch(step)
            tu.assign_non_tensor(data, global_token_num=None, update_lr_scheduler=True)
            said.append(dict(tu.get(worker.train_batch(data), "metrics")))
        plain = support.loss_function([1.0] * 9, critic=critic)
        worker.set_loss_fn(plain)
        data = support.batch(5)
        tu.assign_non_tensor(data, global_token_num=None)
        looked = dict(tu.get(worker.infer_batch(data), "metrics"))
        minis = None
        if hasattr(worker, "train_mini_batch"):
            data = support.batch(6, sequences=4)
            tu.assign_non_tensor(data, mini_batch_size=2 * dist.get_world_size(), epochs=1, seed=1)
            minis = dict(tu.get(worker.train_mini_batch(data), "metrics"))
            # The trainers reduce metrics in this way before they log.
            minis = {k: float(v) for k, v in reduce_metrics(dict(minis)).items()}
        found["critic" if critic else "actor"] = [said, looked, minis]
    meter = [name for name in sys.modules if name == "precision_shim.auditing.updates"]
    return {"subjects": found, "meter": meter}


@case
def lost_updates(job: Job) -> dict[str, Any]:
    """Metrics of a training with the meter, and whether the meter changes the training."""
    import verl.utils.tensordict_utils as tu

    def train() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        one = support.engine(job.model, param_dtype="bf16")
        worker = support.training_worker(one)
        said = []
        for step in range(4):
            worker.set_loss_fn(support.loss_function([1.0] * 9))
            data = support.batch(step)
            tu.assign_non_tensor(data, global_token_num=None, update_lr_scheduler=True)
            metrics = tu.get(worker.train_batch(data), "metrics")
            said.append({k: v for k, v in metrics.items() if isinstance(v, float)})
        return said, support.engine_state(one)

    _, plain = train()
    install(watch_updates=1)
    said, watched = train()
    (audit,) = precision_shim.status().audit
    return {"metrics": said, "kept": audit.parts[0].updates, "same": plain == watched}


@case
def legacy_lost_updates(job: Job) -> dict[str, Any]:
    """The lost-update metrics of 0.7.1's legacy workers."""
    install(watch_updates=1)
    found = {}
    for role in ("actor", "critic"):
        one = support.Legacy(job.model if role == "actor" else job.value_model, role)
        found[role] = [
            {name: value for name, value in metrics.items() if "updates" in name}
            for metrics in one.train(range(4))
        ]
    return found


@case
def by_hand(job: Job) -> dict[str, Any]:
    """Compare reported losses and norms with an unscaled loop that is written by hand."""
    install(loss_scale_init=2.0**10)
    one = support.engine(job.model)
    weights = support.parameters(one.module)
    with one.train_mode():
        got = one.train_batch(support.batch(0), support.loss_function())
    scale = one.scaler.get_scale()
    precision_shim.uninstall()

    # Scale and unscale the gradients, and compute the norm, without the shim.
    two = support.engine(job.model)
    same = support.furthest(weights, support.parameters(two.module))
    losses: list[float] = []
    with two.train_mode():
        two.optimizer_zero_grad()
        made = support.loss_function()

        def scaled(*args: Any, **kwargs: Any) -> Any:
            loss, metrics = made(*args, **kwargs)
            losses.append(loss.item())
            return loss * 1024.0, metrics

        two.forward_backward_batch(support.batch(0), scaled, forward_only=False)
        total = torch.zeros((), dtype=torch.float64)
        for parameter in two.module.parameters():
            parameter.grad /= 1024.0
            total += support.local(parameter.grad).double().square().sum()
        dist.all_reduce(total)
    return {
        "losses": [got["loss"], losses],
        "norms": [got["metrics"]["grad_norm"], total.sqrt().item()],
        "scale": scale,
        "start": same,
    }


@case
def untouched(job: Job, dtype: str | None, on: bool) -> dict[str, Any]:
    """Train without fp16, with or without the shim, and count calls of verl's functions."""
    if on:
        install()
    counted: dict[Any, int] = {}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":  # a training has hundreds of thousands of calls
            counted[frame.f_code] = counted.get(frame.f_code, 0) + 1

    def calls() -> dict[str, int]:
        found: dict[str, int] = {}
        for code, times in counted.items():
            name = code.co_filename
            theirs = "precision_shim" not in name
            if theirs and ("/verl/" in name or "grad_scaler" in name or "c10d" in name):
                key = f"{name.rpartition('site-packages/')[2]}:{code.co_name}"
                found[key] = found.get(key, 0) + times
        return found

    with ours() as said:
        one = support.engine(job.model, param_dtype=dtype)
        # After the first step the audit reads the optimizer once, outside the count.
        support.train(one, range(1))
        sys.setprofile(count)
        try:
            support.train(one, range(1, 3))
            one.save_checkpoint(job.path("plain"), global_step=1)
            one.load_checkpoint(job.path("plain"), del_local_after_load=False)
        finally:
            sys.setprofile(None)
    return {
        "state": support.engine_state(one),
        "calls": calls(),
        "files": support.folder_of(job.path("plain")),
        "scaler": type(getattr(one, "scaler", None)).__name__,
        "said": said,
    }


@case
def without_effect(job: Job, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build engines with further fields of their config, each first warned, then under strict."""
    return [_warned_and_strict(job, fields) for fields in configs]


def _warned_and_strict(job: Job, fields: dict[str, Any]) -> dict[str, Any]:
    install()
    with ours() as said:
        one = support.engine(job.model, param_dtype=None, **fields)
    audits = precision_shim.status().audit
    precision_shim.uninstall()
    precision_shim.install(strict=True)
    error = ""
    try:
        support.engine(job.model, param_dtype=None, **fields)
    except precision_shim.PrecisionShimError as raised:
        error = f"{type(raised).__name__}: {raised}"
    precision_shim.uninstall()
    held = {parameter.dtype for parameter in one.module.parameters()}
    return {
        "said": said,
        "scaler": type(getattr(one, "scaler", None)).__name__,
        "problems": [each.message for audit in audits for each in audit.problems],
        "dtypes": sorted({str(one.module.config.dtype), *map(str, held)}),
        "error": error,
    }


def audits_of(folder: Path) -> dict[str, Any]:
    """The contents of this rank's audit files, by file name."""
    mine = sorted(folder.glob(f"*.rank{dist.get_rank()}.audit.json"))
    return {path.name: json.loads(path.read_text()) for path in mine}


@case
def audited(job: Job) -> dict[str, Any]:
    """Audit an actor, a critic and a LoRA actor that train, and a reference model."""
    folder = Path(job.path("audits"))
    install(audit_dir=str(folder))
    actor = support.engine(job.model)
    critic = support.engine(job.value_model, param_dtype=None, critic=True)
    support.engine(job.model, forward_only=True)
    before = audits_of(folder)
    support.train(actor, range(1))
    support.train(critic, range(1), critic=True)
    after = audits_of(folder)
    lora = support.engine(job.model, param_dtype=None, lora=True)
    support.train(lora, range(1))
    found = {"all": audits_of(folder), "kept": len(precision_shim.status().audit)}
    precision_shim.install(settings=SETTINGS, strict=True)
    with ours() as said:
        bare = support.engine(job.model, param_dtype="bf16", model_dtype="bf16", lr=1e-6)
        support.train(bare, range(1))
    (audit,) = (one for one in precision_shim.status().audit if not one.ok)
    codes = [problem.code for problem in audit.problems]
    return {**found, "before": before, "after": after, "bare": (codes, said)}


@case
def adapted(job: Job) -> dict[str, Any]:
    """Audit actors with LoRA adapters over weights in fp32 and bf16; peft refuses a critic."""
    install()
    audits = []
    for stored in ("fp32", "bf16"):
        one = support.engine(job.model, param_dtype="bf16", lora=True, model_dtype=stored)
        support.train(one, range(1))
        audits.append(precision_shim.status().audit[-1].to_dict())
    error = ""
    try:
        support.engine(job.value_model, param_dtype="bf16", critic=True, lora=True)
    except AttributeError as raised:
        error = str(raised)
    return {"audits": audits, "critic": error}


# -- 0.7.1's legacy workers --------------------------------------------------------------------


@case
def legacy_exact(job: Job, role: str) -> dict[str, Any]:
    """The case ``exact`` for a legacy worker, with the metrics of its trainer."""
    install(**GROWING)
    model = job.model if role == "actor" else job.value_model
    one = support.Legacy(model, role)
    told = one.train(range(STEPS), OVERFLOWS)
    straight = one.state()
    two = support.Legacy(model, role)
    two.train(range(SAVED), OVERFLOWS)
    half = two.state()
    two.worker.save_checkpoint(job.path("shim"), global_step=SAVED)
    three = support.Legacy(model, role)
    three.train(range(50, 51))
    three.worker.load_checkpoint(job.path("shim"), del_local_after_load=False)
    loaded = three.state()
    three.train(range(SAVED, STEPS), OVERFLOWS)
    return {
        "kind": type(one.inner.scaler).__name__,
        "straight": straight,
        "half": half,
        "loaded": loaded,
        "same_process": three.state(),
        "metrics": [{k: v for k, v in one.items() if role in k} for one in told],
        "files": support.folder_of(job.path("shim")),
    }


@case
def legacy_resumed(job: Job, role: str) -> dict[str, Any]:
    """In a new process, load a legacy worker's checkpoint and train the other steps."""
    install(**GROWING)
    one = support.Legacy(job.model if role == "actor" else job.value_model, role)
    one.worker.load_checkpoint(None)
    one.worker.load_checkpoint(job.path("shim"), del_local_after_load=False)
    one.train(range(SAVED, STEPS), OVERFLOWS)
    return {"end": one.state()}


# -- processes ---------------------------------------------------------------------------------


def prepare() -> None:
    """Import verl in the server."""
    support.prepare()
    look_ahead("verl")
    # They add cases to this module.
    for name in ("fsdp_saves", "head_ranks", "sync_ranks", "verdict_ranks"):
        importlib.import_module(f"tests.verl.{name}")


def run(launch: Launch) -> dict[str, Any]:
    """Run a rank from its start to its end."""
    if launch.case == "half":  # its ranks do not meet at the end
        launch.join()
        return CASES["half"](Job(launch))
    with launch.joined():
        return CASES[launch.case](Job(launch), **launch.options)
