"""Save the scaler's state beside verl's FSDP checkpoints, and restore it.

The engine has the scaler; the checkpoint manager of legacy workers has the optimizer. The state is
written after verl's files, with their fingerprints, because verl overwrites its files in place,
one after the other. If a job is killed between verl's last file and the shim's file, the scaler's
state is lost, and a resume warns.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch.distributed as dist

from precision_shim.adapting import Call, seam, versioned, warn
from precision_shim.adapting.scaling import FILE_NAME, Files

from ... import torch_fp16
from ..config import SHARDED, VEOMNI
from ..training.engines import on
from ..training.fsdp import ON_ENGINE, WITH_LEGACY, training_of

_MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"

_CONTENTS = ("optimizer", "extra")
"""The shim saves the scaler's state if verl saves one of these parts of its checkpoint."""

_NAMES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""Maps the parts of verl's checkpoints to the prefixes of a rank's file names."""


_OF_ENGINE: dict[str, Any] = {
    **ON_ENGINE,
    "why": "the engine has the scaler, verl's manager has not",
    "delete_when": "verl keeps the scaler in its checkpoints",
    "relies_on": ("checkpoint_manager",),
    "unless": (f"{_MANAGER}.save_checkpoint mentions scaler",),
}
_OF_MANAGER: dict[str, Any] = {
    **WITH_LEGACY,
    "why": "one place for actor and critic; its optimizer tells which scaler",
    "relies_on": ("optimizer",),
}


@seam(f"{SHARDED}.save_checkpoint", **_OF_ENGINE)
@seam(f"{VEOMNI}.save_checkpoint", **{**_OF_ENGINE, **on(VEOMNI)})
@seam(f"{_MANAGER}.save_checkpoint", **_OF_MANAGER)
def save(call: Call, local_path: Any) -> Any:
    """Write the scaler's state beside the checkpoint of an engine or a legacy worker."""
    manager, training = _find_manager(call.instance)
    contents = manager.checkpoint_save_contents
    if training is None or not _goes_with(manager, local_path, contents):
        return call.proceed()
    with training.saved_aside(local_path, {"": local_path}) as aside:
        call.arguments["local_path"] = aside[""]
        result = call.proceed()
        # verl removes old checkpoints by this list
        here, paths = os.path.abspath(local_path), manager.previous_saved_paths
        manager.previous_saved_paths = [here if one == aside[""] else one for one in paths]
    return result


@seam(f"{SHARDED}.load_checkpoint", **_OF_ENGINE)
@seam(f"{VEOMNI}.load_checkpoint", **{**_OF_ENGINE, **on(VEOMNI)})
@seam(f"{_MANAGER}.load_checkpoint", **_OF_MANAGER)
def load(call: Call, local_path: Any, del_local_after_load: Any = False) -> Any:
    """Restore the scaler from the file beside the checkpoint of an engine or a legacy worker."""
    manager, training = _find_manager(call.instance)
    result = call.proceed()
    contents = manager.checkpoint_load_contents
    if training is not None and _goes_with(manager, local_path, contents):
        files = _files(manager, local_path, contents)
        with _near(local_path, bool(del_local_after_load)) as directory:
            training.restore(directory, files)
    return result


def _find_manager(instance: Any) -> tuple[Any, torch_fp16.ScaledTraining | None]:
    manager = getattr(instance, "checkpoint_manager", None)
    if manager is not None:
        return manager, training_of(instance)
    return instance, torch_fp16.ScaledTraining.of(instance.optimizer)


def _files(manager: Any, path: str, loaded: Any = ()) -> Files:
    """This rank's checkpoint files; for a remote checkpoint, the local copies that verl loaded."""
    from verl.utils.fs import copy_to_local, is_non_local

    remote = is_non_local(path)
    files = {}
    for part, beginning in _NAMES.items():
        if part in loaded or not remote:
            name = f"{beginning}_world_size_{manager.world_size}_rank_{manager.rank}.pt"
            place = os.path.join(path, name)
            # ``copy_to_local`` returns the copy that verl has made
            files[name] = copy_to_local(place) if remote else place
    return files


def _goes_with(manager: Any, path: Any, contents: Any) -> bool:
    return (
        path is not None
        and manager.optimizer is not None
        and any(part in contents for part in _CONTENTS)
    )


@contextlib.contextmanager
def _near(path: str, delete: bool) -> Any:
    """On rank 0, copy a remote scaler file and yield the copy's directory; else yield ``path``."""
    from verl.utils.fs import copy_to_local, is_non_local

    if not is_non_local(path) or (dist.is_initialized() and dist.get_rank() != 0):
        yield path
        return
    copied = None
    try:
        copied = copy_to_local(os.path.join(path, FILE_NAME), always_recopy=True)
    except Exception as error:  # an error raised here would leave the other ranks waiting
        warn(f"{versioned('verl')}: {path}/{FILE_NAME} cannot be copied: {error!r}")
    yield path if copied is None else os.path.dirname(copied)
    if copied is not None and delete:
        with contextlib.suppress(OSError):
            os.remove(copied)
