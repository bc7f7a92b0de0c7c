"""README's lines for NeMo-RL: NeMo-RL's own overrides take them."""

from __future__ import annotations

from ..readme_lines import on_start_page, overrides


def test_the_lines_are_taken() -> None:
    from nemo_rl.utils.config import parse_hydra_overrides
    from omegaconf import OmegaConf

    (given,) = overrides("nemo-rl", "examples/run_grpo.py")
    config = OmegaConf.create({"policy": {"precision": "bfloat16"}})
    OmegaConf.set_struct(config, True)  # a key that is not there is an error
    assert parse_hydra_overrides(config, given).policy.precision == "float16"


def test_the_start_page_is_taken() -> None:
    from nemo_rl.utils.config import parse_hydra_overrides
    from omegaconf import OmegaConf

    for given in on_start_page("nemo-rl", "examples/run_grpo.py"):
        config = OmegaConf.create(
            {
                "policy": {"precision": "bfloat16", "model_name": ""},
                "cluster": {"gpus_per_node": 1},
            }
        )
        OmegaConf.set_struct(config, True)
        assert given[0] == "--config"
        made = parse_hydra_overrides(config, given[2:])
        assert made.cluster.gpus_per_node == 8
        last = "policy.precision=float16" in given
        assert made.policy.precision == ("float16" if last else "bfloat16")
