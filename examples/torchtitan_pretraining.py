"""torchtitan's Trainer trains in float16: python -m examples.torchtitan_pretraining."""

from __future__ import annotations

import tempfile

import precision_shim

precision_shim.install()

# The next import replaces a GPU and a real model: a job does not need it.
from tests.torchtitan import cpu  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402


def main() -> None:
    """Build the trainer as torchtitan.train does, train it, and print the shim's status."""
    cpu.enter()
    init_logger()  # as torchtitan.train does: the log shows INFO
    with tempfile.TemporaryDirectory() as folder:
        # In a job: --training.mixed_precision_param=float16
        trainer = cpu.pretrainer(folder, "float16")
        trainer.train()
        trainer.close()
    print(precision_shim.status())


if __name__ == "__main__":
    main()
