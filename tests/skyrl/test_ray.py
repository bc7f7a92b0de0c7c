"""Workers of SkyRL's own actor classes, which SkyRL's own actor group starts in a local Ray.

The workers need the installed package with its start-up file. Ray counts GPUs that do not exist;
a setup hook of this test switches workers to gloo and the CPU.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ..every_framework.lacking import told_of_workers
from ..processes.rank_server import Ranks
from .support import python_path

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.usefixtures("start_up_file"), pytest.mark.slow, pytest.mark.oldest]

HOOK = '''
def setup():
    """Run by Ray in each worker."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh

    own, mesh = dist.init_process_group, device_mesh.init_device_mesh

    def init_process_group(*args, backend=None, **kwargs):
        return own(*args, backend="gloo", **kwargs)

    def init_device_mesh(device_type, *args, **kwargs):
        return mesh("cpu", *args, **kwargs)

    dist.init_process_group = init_process_group
    device_mesh.init_device_mesh = init_device_mesh
    torch.cuda.set_device = lambda *args: None
    if os.environ["TEST_BACKEND"] == "fsdp":
        from tests.skyrl.cpu import stay_on_cpu

        stay_on_cpu()
    if os.environ["TEST_BACKEND"] == "megatron":
        from tests.skyrl.cpu import import_megatron

        import_megatron()
'''

START = """
import json, os, sys
import ray

backend = sys.argv[1]
if backend == "megatron":
    from tests.skyrl.cpu import import_megatron

    import_megatron()
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import PolicyWorker
else:
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import PolicyWorker
import skyrl.train.utils.utils as utils
from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
from skyrl.train.config import SkyRLTrainConfig

strategy = "megatron" if backend == "megatron" else SkyRLTrainConfig().trainer.strategy
config = SkyRLTrainConfig.from_cli_overrides([f"trainer.strategy={strategy}"])
python = os.environ.get("TEST_OWN_PYTHON", os.environ["TEST_WORKER_PYTHON"])
utils.peer_access_supported = lambda **kwargs: True  # asks for GPUs
ray.init(
    address="local",
    num_cpus=2,
    num_gpus=2,
    include_dashboard=False,
    log_to_driver=False,
    runtime_env={
        "worker_process_setup_hook": "cpu_hook.setup",
        "py_executable": python,
        "env_vars": {
            "TEST_BACKEND": backend,
            **utils.prepare_runtime_environment(config),
        },
    },
)


def layers(kind, name):
    # A method and what is beneath it: Ray puts a function of its own over each.
    found = getattr(kind, name)
    while found is not None:
        yield found
        found = getattr(found, "__wrapped__", None)


def is_patched(kind, name):
    return any(type(layer).__name__ == "_BoundSeam" for layer in layers(kind, name))


def report(self):
    import precision_shim

    skyrl = precision_shim.status().to_dict()["frameworks"].get("skyrl", {"seams": []})
    methods = ("init_model", "forward_backward", "make_megatron_module", "init_configs")
    ddp = self.cfg.policy.megatron_config.ddp_config
    # By the class that a seam names: a subclass may have a method of its own that calls it.
    own = {(kind.__module__, kind.__name__): kind for kind in type(self).__mro__}
    of_the_worker, states = {}, {}
    for seam in skyrl["seams"]:
        module, _, path = seam["target"].partition(":")
        kind, _, name = path.rpartition(".")
        if (module, kind) in own:
            states[name] = seam["state"]
        if (module, kind) in own and seam["state"] == "wrapped":
            of_the_worker[path] = is_patched(own[module, kind], name)
    return {
        "of the worker": of_the_worker,
        "states": states,
        "patched": {
            name: is_patched(type(self), name) for name in methods if hasattr(type(self), name)
        },
        "bucket written": isinstance(ddp.grad_reduce_in_fp32, bool),
        "bucket": ddp.grad_reduce_in_fp32,
    }


def tools(self):
    from tests.processes.loaded_tools import loaded_tools

    return loaded_tools()


def look(group):
    handle = group._actor_handlers[0]
    found = ray.get(handle.__ray_call__.remote(report))
    found["listed"] = [n for n in ("init_model", "forward_backward") if hasattr(handle, n)]
    try:  # a call by name, as SkyRL's driver makes it, before there is a model
        ray.get(handle.forward_backward.remote(None))
    except ray.exceptions.RayTaskError as error:
        found["called"] = str(error)
    carried = ray.get_runtime_context().runtime_env["env_vars"]
    found["carried"] = {k: v for k, v in carried.items() if k.startswith("PRECISION_SHIM")}
    return found

"""

LOOKING = """
print("FOUND", json.dumps(look(PPORayActorGroup(config.trainer, 1, 1, PolicyWorker))))
"""

TRAINING = """
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

from tests.skyrl.support import batch, fsdp_config, metrics_of

model, folder = sys.argv[2], os.getcwd()
apart = [f"trainer.placement.{name}=false" for name in ("colocate_all", "colocate_policy_ref")]
config = fsdp_config("policy", model, "fp16", *apart)
group = PPORayActorGroup(config.trainer, 1, 1, PolicyWorker)
found = look(group)

dispatch = WorkerDispatch(config, policy_actor_group=group)
dispatch.init_model("policy", model, num_training_steps=10)


def train(seed, advantage=1.0):
    metrics = metrics_of(dispatch.forward_backward("policy", batch(seed, advantage=advantage)))
    return metrics, str(dispatch.optim_step("policy"))


found["steps"] = [train(0), train(1, 1e9), train(2)]
dispatch.save_checkpoint("policy", folder + "/saved")
found["on"] = [train(3), train(4)]
dispatch.load_checkpoint("policy", folder + "/saved")
found["again"] = [train(3), train(4)]
found["tools"] = ray.get(group._actor_handlers[0].__ray_call__.remote(tools))
print("FOUND", json.dumps(found))
"""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PRECISION_SHIM", "RAY_"))
    }
    path = python_path(folder, ROOT)
    return {**inherited, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path, **variables}


def drive(ranks: Ranks, folder: Path, script: str, backend: str, *arguments: str) -> dict[str, Any]:
    """Run a driver, in which SkyRL's actor group starts a worker; returns the driver's results.

    On FSDP Ray itself starts the worker; on Megatron the worker is a fork.
    """
    (folder / "cpu_hook.py").write_text(HOOK)
    (folder / "driver.py").write_text(START + script)
    variables = {
        "PRECISION_SHIM": "1",
        "PRECISION_SHIM_AUDIT_DIR": str(folder / "audits"),
        "PRECISION_SHIM_LOG": "quiet",
        "PRECISION_SHIM_LOSS_SCALE_INIT": "1024",
    }
    if backend == "fsdp":
        variables["TEST_OWN_PYTHON"] = sys.executable
    ranks(
        "script",
        world=1,
        timeout=540,
        arguments=[str(folder / "driver.py"), backend, *arguments],
        environment=environment(folder, **variables),
        cwd=str(folder),
        workers=True,
    )
    lines = [line for line in ranks.said[0].splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return found


def assert_wrapped(found: dict[str, Any], *methods: str) -> None:
    assert found["carried"]["PRECISION_SHIM"] == "1"
    # The actor's own class has the wrapped methods, not only the class in the imported module.
    for name in methods:
        assert found["patched"][name], found
        assert found["states"][name] == "wrapped", found
    # SkyRL's driver finds the methods on the handle, and the worker can run them.
    assert found["listed"] == ["init_model", "forward_backward"]
    assert "forward_backward()" in found["called"], found["called"]
    assert found["bucket written"] is False, "what was written travels with the config"
    assert found["bucket"] == True  # noqa: E712


@pytest.mark.timeout(600)
def test_a_megatron_worker_reports_wrapped(ranks: Ranks, tmp_path: Path) -> None:
    found = drive(ranks, tmp_path, LOOKING, "megatron")
    methods = ("forward_backward", "init_model", "make_megatron_module", "init_configs")
    assert_wrapped(found, *methods)


@pytest.mark.timeout(600)
def test_the_driver_trains_a_worker_in_fp16(
    ranks: Ranks, tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """With SkyRL's own dispatch an overflow is skipped, and a checkpoint contains the scaler."""
    found = drive(ranks, tmp_path, TRAINING, "fsdp", str(checkpoints["float32"]))
    figures = [
        [metrics.get(name) for name in ("loss_scale", "skipped_steps")]
        for metrics, _ in found["steps"] + found["on"]
    ]
    assert found["steps"][1][1] == "nan"
    assert found["tools"] == []
    assert_wrapped(found, "forward_backward")
    scales, skipped = zip(*figures, strict=True)
    assert scales == (1024.0, 1024.0, 512.0, 512.0, 512.0)
    assert skipped == (0.0, 0.0, 1.0, 1.0, 1.0)
    assert all(math.isfinite(float(norm)) for _, norm in found["steps"][2:] + found["on"])
    assert found["again"] == found["on"]
    # The worker audits its optimizer when it is built, and again after the first step.
    (file,) = (tmp_path / "audits").iterdir()
    audit = json.loads(file.read_text())
    assert file.name == "skyrl.policy.model.rank0.audit.json"
    assert (audit["ok"], audit["complete"]) == (True, True)
    (part,) = audit["parts"]
    assert part["components"]["exp_avg"]["dtypes"] == ["fp32"]
    assert part["scaler"] == "LossScaler"


@pytest.mark.timeout(600)
def test_the_driver_tells_of_a_worker_without_the_package() -> None:
    told_of_workers("skyrl", Path(python_path()))
