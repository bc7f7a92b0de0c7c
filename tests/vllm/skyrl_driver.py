"""A SkyRL driver: SkyRL's own group starts its vLLM server in a real Ray actor; prints results.

Run as a script, because the actor inherits the driver's environment. The one GPU of the local Ray
is only a number. Arguments: a folder with a model, a folder for files, the dtype.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

KEY = "generator.inference_engine.model_dtype"
SERVERS = "skyrl.backends.skyrl_train.inference_servers"


def sync(url: str, model: str, folder: Path, dtype: str) -> None:
    """Change a trainer's weights and send them by SkyRL's own sender."""
    import torch
    from skyrl.backends.skyrl_train.weight_sync import register
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient
    from skyrl.backends.skyrl_train.weight_sync.delta import trainer
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
    from transformers import AutoModelForCausalLM

    from precision_shim.auditing.sending import tell_asked

    register.register_trainer_engines()
    actor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        torch.manual_seed(1)
        for one in actor.parameters():
            one.add_(torch.randn_like(one) * 2**-6)
    tell_asked("skyrl", dtype, KEY)  # as SkyRL's worker does, which needs a GPU
    info = trainer.DeltaTrainerInitInfo(
        base_model_path=model,
        sync_dir=str(folder / "sync"),
        local_checkpoint_dir=str(folder / "local"),
        publish_staging_dir=str(folder / "staging"),
        rank=0,
    )
    sender = trainer.DeltaTrainerWeightTransferEngine.trainer_init(
        info,
        client=SkyrlWeightSyncClient([url]),
        source=FsdpWeightSource(actor, getattr(torch, dtype)),
    )
    sender.send_weights()


def arguments_of(model: str, dtype: str) -> Any:
    """vLLM's arguments for a server on a CPU, read by SkyRL's own parser."""
    import skyrl.backends.skyrl_train.inference_servers.vllm_server_actor as actors

    arguments = {
        "model": model,
        "dtype": dtype,
        "max-model-len": "32",
        "max-num-seqs": "4",
        "kv-cache-memory-bytes": str(16 << 20),
        "worker-cls": "vllm.v1.worker.cpu_worker.CPUWorker",  # SkyRL's default needs a GPU
        "weight-transfer-config": json.dumps({"backend": "delta"}),
        "worker-extension-cls": f"{SERVERS}.new_inference_worker_wrap.NewInferenceWorkerWrap",
    }
    written = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    return actors._build_standalone_cli_args([*written, "--enforce-eager"])


def in_actor(server: Any) -> dict[str, Any]:
    """What the shim has done in the actor; runs there."""
    import precision_shim

    seams = precision_shim.status().frameworks["skyrl"].seams
    found = {one.target: one.state for one in seams if "VLLMServerActor" in one.target}
    return {"process": os.getpid(), "seams": found}


def main(model: str, folder: Path, dtype: str) -> dict[str, Any]:
    """Start the server, generate, and sync once; returns the audit's records and the answers."""
    import httpx
    import ray

    from tests.ray_cluster import start

    start(3, num_gpus=1)
    from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup

    group = ServerGroup(
        arguments_of(model, dtype),
        num_servers=1,
        start_port=18000,
        distributed_executor_backend="mp",
    )
    (info,) = group.start()
    audits = Path(os.environ["PRECISION_SHIM_AUDIT_DIR"])
    (before,) = [json.loads(path.read_text("utf-8")) for path in audits.iterdir()]
    asked = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    answer = httpx.post(f"{info.url}/skyrl/v1/generate", json=asked, timeout=240).json()
    sync(info.url, model, folder, dtype)
    (after,) = [json.loads(path.read_text("utf-8")) for path in audits.glob("*.held.*")]
    (actor,) = group.get_actors()
    found = {
        "held": [before, after],
        "tokens": len(answer["choices"][0]["token_ids"]),
        "process": os.getpid(),
        "actor": ray.get(actor.__ray_call__.remote(in_actor)),
    }
    group.shutdown()
    ray.shutdown()
    return found


if __name__ == "__main__":
    print("FOUND " + json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])), flush=True)
