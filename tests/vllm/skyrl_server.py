"""A delta sync into SkyRL's own inference server with the real vLLM; prints the audit's records.

The server runs as in SkyRL's actor: vLLM's engine has its own process, SkyRL's client sends over
HTTP. Arguments: a folder with a model, a folder for files, the dtype.
"""

from __future__ import annotations

import asyncio
import contextlib
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


async def main(model: str, folder: Path, dtype: str) -> list[str]:
    """Start the server and sync once; returns the audit's records before and after the sync."""
    import httpx
    import skyrl.backends.skyrl_train.inference_servers.vllm_server_actor as actors
    from skyrl.backends.skyrl_train.inference_servers.common import find_and_reserve_port

    port, reservation = find_and_reserve_port(18000)
    reservation.close()
    arguments = {
        "model": model,
        "dtype": dtype,
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": 32,
        "max-num-seqs": 4,
        "kv-cache-memory-bytes": 16 << 20,
        "worker-cls": "vllm.v1.worker.cpu_worker.CPUWorker",  # SkyRL's default needs a GPU
        "weight-transfer-config": json.dumps({"backend": "delta"}),
        "worker-extension-cls": f"{SERVERS}.new_inference_worker_wrap.NewInferenceWorkerWrap",
    }
    written = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    given: Any = actors._build_standalone_cli_args([*written, "--enforce-eager"])
    server = asyncio.create_task(actors._build_and_serve_vllm_server(given))
    audits = Path(os.environ["PRECISION_SHIM_AUDIT_DIR"])
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(timeout=240) as client:
        while True:
            if server.done():
                await server
            try:
                if (await client.get(f"{url}/health")).status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.5)
    (before,) = [path.read_text("utf-8") for path in audits.iterdir()]
    await asyncio.to_thread(sync, url, model, folder, dtype)
    (after,) = [path.read_text("utf-8") for path in audits.glob("*.held.*")]
    server.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await server
    return [before, after]


if __name__ == "__main__":
    # SkyRL's server actor sets these variables in its constructor.
    os.environ["VLLM_SERVER_DEV_MODE"] = os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    found = asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
    print("FOUND " + json.dumps(found), flush=True)
