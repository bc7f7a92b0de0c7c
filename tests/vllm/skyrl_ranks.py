"""A process with SkyRL's sender and receiver and the real vLLM, for ``test_skyrl.py``.

SkyRL sends requests to its servers over HTTP; :class:`Client` calls the engine directly instead.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks import both_sides
from examples.demo.rl.vllm_on_cpu import keep_weights

import precision_shim

from ..rank_server import Launch
from ..tiny_models import make_checkpoint
from . import engines

EXTENSION = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap"


class Client:
    """Replaces SkyRL's client of inference servers by direct calls of the engine."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, info: Any) -> None:
        self.llm.collective_rpc("init_weight_transfer_engine", args=(info,))

    def fetch_weights(self, **named: Any) -> None:
        self.llm.collective_rpc("fetch_weights", kwargs=named)

    def start_weight_update(self) -> None:
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, info: Any) -> None:
        self.llm.collective_rpc("update_weights", args=(info,))

    def finish_weight_update(self) -> None:
        self.llm.collective_rpc("finish_weight_update")

    def pause_generation(self) -> None:
        """Does nothing, because the engine is not generating."""

    resume_generation = pause_generation


def delta(folder: Path, stored: str, dtype: str) -> dict[str, Any]:
    """Compare an engine's weights after a delta sync with the trainer's.

    Args:
        folder: directory for the sync's files.
        stored: dtype of the base checkpoint.
        dtype: dtype of the engine, and SkyRL's ``model_dtype``.
    """
    from skyrl.backends.skyrl_train.weight_sync.delta import trainer
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
    from transformers import AutoModelForCausalLM
    from vllm.config import WeightTransferConfig

    base = make_checkpoint(folder / "model", stored, width=64)
    actor = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with both_sides.engine(
        base,
        dtype,
        32,
        weight_transfer_config=WeightTransferConfig(backend="delta"),
        worker_extension_cls=f"{EXTENSION}.NewInferenceWorkerWrap",
    ) as llm:
        (before,) = llm.collective_rpc(engines.read)
        with torch.no_grad():
            torch.manual_seed(1)
            for one in actor.parameters():
                one.add_(torch.randn_like(one) * 2**-6)
        info = trainer.DeltaTrainerInitInfo(
            base_model_path=str(base),
            sync_dir=str(folder / "sync"),
            local_checkpoint_dir=str(folder / "local"),
            publish_staging_dir=str(folder / "staging"),
            rank=0,
        )
        sender = trainer.DeltaTrainerWeightTransferEngine.trainer_init(
            info, client=Client(llm), source=FsdpWeightSource(actor, getattr(torch, dtype))
        )
        sender.send_weights()
        (held,) = llm.collective_rpc(engines.read)
    masters = {name: one.detach() for name, one in actor.state_dict().items()}
    return {
        "way": engines.ways(held, masters),
        "changed": all(not torch.equal(before[name], one) for name, one in held.items()),
        "dtypes": sorted({str(one.dtype) for one in held.values()}),
    }


def prepare() -> None:
    """Import SkyRL and vLLM in the server."""
    both_sides.load_vllm()
    keep_weights()
    from skyrl.backends.skyrl_train.weight_sync import register

    register.register_receive_engines()
    register.register_trainer_engines()
    import skyrl.backends.skyrl_train.weight_sync.delta.trainer
    import skyrl.backends.skyrl_train.weight_sync.sources  # noqa: F401


def run(launch: Launch) -> dict[str, Any]:
    """Run the rank from its start to its end."""
    torch.set_num_threads(1)
    if launch.case == "on":
        precision_shim.install()
    folder = Path(launch.folder)
    with ours() as said:
        found = {
            name: delta(folder / str(i), **options)
            for i, (name, options) in enumerate(launch.options.items())
        }
    return {"engines": found, "said": said}


@contextlib.contextmanager
def ours() -> Iterator[list[str]]:
    """Collect the shim's own warnings."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(one.message) for one in caught if "recision" in one.category.__name__]
