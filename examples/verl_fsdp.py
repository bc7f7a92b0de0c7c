"""verl's FSDP2 engine trains a tiny Qwen2 in float16: python -m examples.verl_fsdp."""

from __future__ import annotations

import tempfile
from pathlib import Path

import precision_shim

precision_shim.install()

# The imports up to main() replace a GPU and a real model: a job does not need them.
import torch.distributed as dist  # noqa: E402
from tests.stand_ins.tiny_models import make_checkpoint  # noqa: E402
from tests.verl import fsdp_support as cpu  # noqa: E402


def main() -> None:
    """Build the engine as verl's workers do, train it, and print the shim's status."""
    cpu.prepare()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        model = make_checkpoint(Path(folder))
        # In a job: actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16
        engine = cpu.engine(str(model), param_dtype="fp16")
        for step in range(8):
            with engine.train_mode():
                found = engine.train_batch(cpu.batch(0), cpu.loss_function())
                engine.lr_scheduler_step()
            scale = {"loss_scale": engine.scaler.loss_scale}
            print(f"step {step}", found["loss"], {**found["metrics"], **scale})
        dist.destroy_process_group()
    print(precision_shim.status())


if __name__ == "__main__":
    main()
