"""README's lines for NeMo-RL: NeMo-RL's own overrides take them."""

from __future__ import annotations

from ..readme_lines import overrides


def test_the_lines_are_taken() -> None:
    from nemo_rl.utils.config import parse_hydra_overrides
    from omegaconf import OmegaConf

    (given,) = overrides("nemo-rl", "examples/run_grpo.py")
    config = OmegaConf.create({"policy": {"precision": "bfloat16"}})
    OmegaConf.set_struct(config, True)  # a key that is not there is an error
    assert parse_hydra_overrides(config, given).policy.precision == "float16"
