"""NeMo-RL's DTensor policy worker trains a tiny Qwen2: python -m examples.nemo_rl_dtensor."""

from __future__ import annotations

import tempfile
from pathlib import Path

import precision_shim

precision_shim.install()

# The imports up to main() replace a GPU and a real model: a job does not need them.
from tests.nemo_rl import support  # noqa: E402
from tests.nemo_rl.cpu import nemo_rl_on_cpu  # noqa: E402
from tests.stand_ins.tiny_models import make_checkpoint  # noqa: E402


def main() -> None:
    """Build the worker as NeMo-RL's policy does, train it, and print the shim's status."""
    with tempfile.TemporaryDirectory() as folder, nemo_rl_on_cpu():
        model = make_checkpoint(Path(folder))
        # In a job: policy.precision=float16
        worker = support.make_worker("v1", support.policy_config(model, "float16"))
        for step in range(8):
            found = worker.train(support.batch(), support.nll_loss())
            metrics = {
                name: values[-1]
                for name, values in found["all_mb_metrics"].items()
                if name in ("loss_scale", "skipped_steps")
            }
            print(f"step {step}", found["global_loss"], found["grad_norm"], metrics)
    print(precision_shim.status())


if __name__ == "__main__":
    main()
