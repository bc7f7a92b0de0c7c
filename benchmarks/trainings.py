"""Trains one framework's engine or worker with the shim and without it; ``cost.py`` runs it.

    python -m benchmarks.trainings "verl FSDP" 7 FOLDER

One process imports the framework, and forks a process for each of ``VARIANTS``, which builds the
framework's real engine, worker or trainer on a CPU with the set-up of the tests. In each round each
process does each act once, one process after the other, in a new random order.
``FOLDER/figures.json`` gets the milliseconds of processor time of each act by process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import resource
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes.rank_server import freeze
from tests.stand_ins.tiny_models import make_checkpoint

import precision_shim
from precision_shim.auditing import weight_audit

ACTS = {"step": 10, "save": 1, "load": 1, "sync": 1, "audit": 5}
"""How often a process does each act in a round."""

SETTLING = 15
"""Steps before the first round: fp16's loss scale has fallen until no step is skipped."""

VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "bf16": ("bf16", None),
    "bf16, again": ("bf16", None),
    "bf16, shim": ("bf16", {}),
    "bf16, watched": ("bf16", {"watch_updates": 1}),
    "bf16, audited": ("bf16", {"audit_dir": "audits"}),
    "fp16": ("fp16", None),
    "fp16, again": ("fp16", None),
    "fp16, shim": ("fp16", {}),
}
"""Maps a process to its dtype and the shim's settings; ``None`` is a process without the shim."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

stay = contextlib.ExitStack().enter_context
"""Enters a stand-in, which stays until the process ends."""


@dataclass
class Training:
    """What a process does with its model and optimizer."""

    model: Any
    optimizer: Any
    step: Callable[[], object]
    save: Callable[[], object]
    load: Callable[[], object]
    sync: Callable[[], object]

    def audit(self) -> None:
        """Call the shim's ``audit``, which needs no installation."""
        precision_shim.audit(self.model, self.optimizer)


def verl(engine: Any, step: Callable[[], object], folder: Path) -> Training:
    """An engine of verl's; a worker would announce it to the audit of the sent weights."""
    from precision_shim_adapters.verl.audit import sent_weights

    sent_weights._senders[engine] = None
    return Training(
        engine.module,
        engine.optimizer,
        step,
        save=lambda: engine.save_checkpoint(str(folder), global_step=1),
        load=lambda: engine.load_checkpoint(str(folder), del_local_after_load=False),
        sync=lambda: deque(engine.get_per_tensor_param()[0], maxlen=0),
    )


def verl_fsdp(model: Path, dtype: str, folder: Path, on: bool) -> Training:
    from tests.pairs import drawing, fsdp

    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    job = drawing.Job(dtype=dtype, shim="on" if on else drawing.OFF)
    one = fsdp.Training(drawing.Pair(), job)
    return verl(one.engine, lambda: one.steps(range(1), ()), folder / "saved")


def verl_megatron(model: Path, dtype: str, folder: Path, on: bool) -> Training:
    from tests.verl.megatron_fp16_support import Training as Worker
    from tests.verl.support import local_layers

    from precision_shim_tools.testing import megatron_on_cpu, stand_in_transformer_engine
    from precision_shim_tools.testing.megatron_cpu import model_parallel

    stay(stand_in_transformer_engine())
    stay(megatron_on_cpu())
    stay(local_layers(weights=True))
    stay(model_parallel())
    one = Worker(model, pytest.MonkeyPatch(), dtype=DTYPES[dtype])
    return verl(one.engine, one.train, folder / "saved")


def skyrl(model: Path, dtype: str, folder: Path, on: bool) -> Training:
    from tests.skyrl import cpu, support, vllm_names

    from precision_shim_tools.testing import megatron_on_cpu
    from precision_shim_tools.testing.megatron_cpu import model_parallel

    stay(megatron_on_cpu())
    stay(cpu.skyrl_on_cpu())
    stay(model_parallel())
    vllm_names.put_in_place(pytest.MonkeyPatch())
    worker, saved = support.fsdp_worker("policy", model, dtype), str(folder / "saved")

    def step() -> None:
        worker.forward_backward(support.batch(0))
        worker.optim_step()

    return Training(
        worker.model.model,
        worker.optimizer,
        step,
        save=lambda: worker.save_checkpoint(saved),
        load=lambda: worker.load_checkpoint(saved),
        sync=lambda: support.weights_sent(worker, getattr(torch, DTYPES[dtype])),
    )


def nemo_rl(model: Path, dtype: str, folder: Path, on: bool) -> Training:
    from tests.nemo_rl import cpu, support
    from tests.nemo_rl.test_halves import send

    stay(cpu.nemo_rl_on_cpu())
    worker = support.make_worker("v2", support.policy_config(model, DTYPES[dtype], "v2"))
    patch, loss = pytest.MonkeyPatch(), support.nll_loss()
    return Training(
        worker.model,
        worker.optimizer,
        step=lambda: worker.train(support.batch(), loss),
        save=lambda: support.save(worker, folder / "saved"),
        load=lambda: worker.load_checkpoint(
            str(folder / "saved" / "weights"), str(folder / "saved" / "optimizer")
        ),
        sync=lambda: send(worker, patch),
    )


def torchtitan(model: Path, dtype: str, folder: Path, on: bool) -> Training:
    from tests.torchtitan import cpu

    cpu.enter()
    import torchstore.api
    from tests.torchtitan.test_halves import push

    async def client(store_name: str) -> None: ...

    async def put_state_dict(store: Any, state_dict: Any, key: str, **options: Any) -> None: ...

    torchstore.api.client = client  # it needs Monarch's actors
    torchstore.state_dict_utils.put_state_dict = put_state_dict
    trainer = cpu.policy_trainer(
        folder,
        DTYPES[dtype],
        generator_dtype=DTYPES[dtype],
        checkpoint={"enable": True, "last_save_model_only": False},
        training={"steps": 10_000},
    )
    return Training(
        trainer.model_parts,
        trainer.optimizers,
        step=lambda: cpu.policy_step(trainer, 0),
        save=lambda: trainer.checkpointer.save(1),
        load=lambda: trainer.checkpointer.load(1),
        sync=lambda: push(trainer),
    )


@dataclass(frozen=True)
class Kind:
    """How to import a framework in the process that forks, and how to build in a forked one."""

    modules: tuple[str, ...]
    build: Callable[[Path, str, Path, bool], Training]


KINDS = {
    "verl FSDP": Kind(("tests.pairs.fsdp",), verl_fsdp),
    "verl Megatron": Kind(("tests.pairs.megatron", "verl.workers.engine_workers"), verl_megatron),
    "SkyRL FSDP": Kind(("skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker",), skyrl),
    "NeMo-RL DTensor": Kind(("nemo_rl.models.policy.workers.dtensor_policy_worker_v2",), nemo_rl),
    "torchtitan": Kind(("tests.torchtitan.ranks",), torchtitan),
}


def import_framework(kind: Kind, folder: Path) -> None:
    """Import what the forked processes need."""
    if kind.build is skyrl:
        from tests.skyrl import cpu

        sys.path.insert(0, str(cpu.flash_attn_placeholder(folder)))
        cpu.import_megatron()
    for name in kind.modules:
        module = importlib.import_module(name)
        if name.startswith("tests."):
            module.prepare()


def spent() -> float:
    """Seconds of processor time of this process and of the children that it waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in usages)


def serve(kind: Kind, name: str, model: Path, folder: Path, pipe: Any) -> None:
    """Build a training, and do the acts that the pipe names."""
    dtype, settings = VARIANTS[name]
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    folder.mkdir()
    os.chdir(folder)
    if settings is not None:
        precision_shim.install(settings={"log": "quiet", **settings}, export=False)
        weight_audit.AT = range(1, sys.maxsize)  # a job audits few of its syncs
    one = kind.build(model, dtype, folder, settings is not None)
    for _ in range(SETTLING):
        one.step()
    while True:
        act = pipe.recv()
        began = spent()
        for _ in range(ACTS[act]):
            getattr(one, act)()
        pipe.send(1e3 * (spent() - began) / ACTS[act])


def main() -> None:
    """Measure one kind of training."""
    kind, rounds, folder = KINDS[sys.argv[1]], int(sys.argv[2]), Path(sys.argv[3])
    model = folder / "model"
    os.environ["MODEL"] = str(model)
    import_framework(kind, folder)
    if kind.build is not torchtitan:  # it makes its own model, without transformers
        make_checkpoint(model)
    freeze()
    fork = multiprocessing.get_context("fork")
    pipes, processes = {}, []
    found: dict[str, dict[str, list[float]]] = {
        act: {name: [] for name in VARIANTS} for act in ACTS
    }
    try:
        for name in VARIANTS:
            pipes[name], theirs = fork.Pipe()
            arguments = (kind, name, model, folder / name, theirs)
            processes.append(fork.Process(target=serve, args=arguments))
            processes[-1].start()
            theirs.close()  # so that the end of the process is the end of the pipe
        for number in range(rounds + 1):
            for act, each in found.items():
                for name in random.sample(list(VARIANTS), len(VARIANTS)):
                    pipes[name].send(act)
                    took = pipes[name].recv()
                    if number:  # the first round warms up
                        each[name].append(took)
    finally:
        for process in processes:
            process.kill()
    (folder / "figures.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
