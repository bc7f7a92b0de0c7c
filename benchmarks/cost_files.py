"""Writes the models and checkpoints that ``cost.py`` gives to the commands, into a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed import checkpoint

ROOT = Path(__file__).resolve().parent.parent
MOMENTS = ("exp_avg", "exp_avg_sq")


def write_ranks(folder: Path, number: int) -> None:
    """Write so many parameters as verl and SkyRL do, with moments that are bf16 numbers."""
    place = folder / f"ranks-{number}" / "global_step_1" / "actor"
    place.mkdir(parents=True)
    weight, step = torch.randn(4, 4).bfloat16().float(), torch.tensor(1.0)
    states = {
        i: {"step": step.clone(), **{name: weight.clone() for name in MOMENTS}}
        for i in range(number)
    }
    contents = {
        "model": {f"layers.{i}.weight": weight.clone() for i in range(number)},
        "optim": {"state": states, "param_groups": [{"params": [*range(number)]}]},
        "extra_state": {"lr_scheduler": {}},
    }
    for name, content in contents.items():
        torch.save(content, place / f"{name}_world_size_1_rank_0.pt")


def main() -> None:
    """Write everything into the folder that is the argument."""
    sys.path.insert(0, str(ROOT))
    from tests.plan.models import DEEPSEEK_V3, QWEN25_7B

    folder = Path(sys.argv[1])
    for name, config in (("7B", QWEN25_7B), ("671B", DEEPSEEK_V3)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), "utf-8")
    for number in (4000, 20000, 60000):
        write_ranks(folder, number)
    names = ("model.{}", *(f"optimizer.state.{{}}.{name}" for name in MOMENTS))
    keys = [name.format(f"layers.{i}.weight") for i in range(20000 // len(names)) for name in names]
    tensors = {key: torch.randn(4, 4) for key in keys}
    checkpoint.save(tensors, checkpoint_id=folder / "distributed")


if __name__ == "__main__":
    main()
