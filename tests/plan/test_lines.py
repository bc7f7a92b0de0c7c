"""Launch lines that a framework refuses, or that need a feature, are refused by the plan, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from precision_shim.cli import main

from .test_frameworks import LLAMA, SKYRL, model, needs, planned  # noqa: F401


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", "--parameters", "1M", "--", *words])
    said = capsys.readouterr()
    assert end.value.code == 2, said.out
    return said.err


@needs("skyrl")
@pytest.mark.parametrize(
    "stray", [("trainer.strategy=", "fsdp2"), ("fsdp2",), ("--strategy",)], ids=" ".join
)
def test_a_stray_word_in_a_line_of_skyrls(
    capsys: pytest.CaptureFixture[str], stray: tuple[str, ...]
) -> None:
    from skyrl.train.config import SkyRLTrainConfig

    try:
        SkyRLTrainConfig.from_cli_overrides(list(stray))
    except Exception:
        refused(capsys, *SKYRL, *stray)
    else:  # a version that passes over it
        planned(capsys, "--parameters", "1M", "--", *SKYRL, *stray)


EXAMPLE = """
import argparse
from nemo_rl.utils.config import load_config, parse_hydra_overrides
def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, default=None)
    parser.add_argument(
        "--mine",
        action="store_true",
    )
    return parser.parse_known_args()
def main():
    args, overrides = parse_args()
    return parse_hydra_overrides(load_config(args.config), overrides)
"""
JOB = """
policy: {{model_name: {model}, precision: bfloat16, dtensor_cfg: {{enabled: true}}}}
cluster: {{gpus_per_node: 8, num_nodes: 1}}
"""


@needs("nemo_rl")
@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (("--config={job}",), True),
        (("cluster.num_nodes=2", "--conf", "{job}", "--mine"), True),
        (("--config", "{job}", "--nodes=2"), False),
        (("--config", "{job}", "stray"), False),
        (("--config", "{job}", "cluster.num_nodes=", "2"), False),
    ],
)
def test_a_line_of_nemo_rls(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,  # noqa: F811
    words: tuple[str, ...],
    runs: bool,
) -> None:
    job, example = model / "job.yaml", model / "run_mine.py"
    job.write_text(JOB.format(model=model))
    example.write_text(EXAMPLE)
    named = [word.replace("{job}", str(job)) for word in words]
    space: dict[str, object] = {}
    exec(EXAMPLE, space)
    monkeypatch.setattr("sys.argv", [str(example), *named])
    try:
        space["main"]()  # type: ignore[operator]
    except Exception:
        assert not runs
        refused(capsys, "python", str(example), *named)
    else:
        assert runs
        assert planned(capsys, "--", "python", str(example), *named)[0] == 0


@needs("torchtitan")
@pytest.mark.parametrize("out", ["PRECISION_SHIM_FRAMEWORKS=verl", "PRECISION_SHIM_FEATURES=audit"])
def test_a_name_of_torchtitans_where_it_is_not_coerced(
    capsys: pytest.CaptureFixture[str], out: str
) -> None:
    words = ("torchrun", "--nproc-per-node=1", *LLAMA, "--training.mixed_precision_param=bf16")
    assert planned(capsys, "--", *words)[0] == 0
    assert "bf16" in refused(capsys, out, *words)
