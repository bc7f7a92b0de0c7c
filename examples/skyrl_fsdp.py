"""SkyRL's FSDP policy worker trains a tiny Qwen2 in float16: python -m examples.skyrl_fsdp."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import precision_shim

precision_shim.install()

# The imports up to main() replace a GPU and a real model: a job does not need them.
from tests.skyrl import cpu, support  # noqa: E402
from tests.stand_ins.tiny_models import make_checkpoint  # noqa: E402

from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu, model_parallel  # noqa: E402


def main() -> None:
    """Build the worker as SkyRL's trainer does, train it, and print the shim's status."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(cpu.flash_attn_placeholder(Path(folder))))
        cpu.import_megatron()
        with megatron_on_cpu(), cpu.skyrl_on_cpu(), model_parallel():
            model = make_checkpoint(Path(folder))
            # In a job: trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16
            worker = support.fsdp_worker("policy", model, "fp16")
            for step in range(8):
                found = support.metrics_of(worker.forward_backward(support.batch(0)))
                norm = worker.optim_step()
                print(f"step {step}", {"grad_norm": norm, **found})
    print(precision_shim.status())


if __name__ == "__main__":
    main()
