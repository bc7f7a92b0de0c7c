"""How the plan reads the launch lines of the frameworks."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ..processes.commands import command
from .rows import SKYRL_ON_FSDP
from .test_frameworks import LLAMA, SKYRL, model, needs, planned, refused  # noqa: F401


@needs("skyrl")
@pytest.mark.parametrize(
    "stray", [("trainer.strategy=", "fsdp2"), ("fsdp2",), ("--strategy",)], ids=" ".join
)
def test_a_stray_word_in_a_line_of_skyrls(stray: tuple[str, ...]) -> None:
    from skyrl.train.config import SkyRLTrainConfig

    try:
        SkyRLTrainConfig.from_cli_overrides(list(stray))
    except Exception:
        refused("--", *SKYRL, *stray)
    else:  # a version that passes over it
        planned("--parameters", "1M", "--", *SKYRL, *stray)


@needs("skyrl")
def test_a_key_that_only_the_users_program_has(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from skyrl.train.config import make_config\n")
    words = ("trainer.algorithm.mine=1", "trainer.strategy=megatron")
    code, plan = planned("--parameters", "1M", "--", "python", str(mine), *words)
    assert (code, plan["megatron_core"] is not None) == (0, True)
    assert any("no such keys: trainer.algorithm.mine (of " in note for note in plan["notes"])
    assert "mine" in refused("--", *SKYRL, *words)


@needs("skyrl")
@pytest.mark.parametrize(
    "front", ["precision-shim", "python -m precision_shim", "A=1 uv run /opt/bin/precision-shim"]
)
def test_a_line_that_starts_the_job_by_run(front: str) -> None:
    """The options of ``precision-shim run`` count as they do in the job."""
    job = (*SKYRL, "trainer.strategy=megatron", "trainer.algorithm.use_kl_loss=false")
    size = ("--parameters", "1M", "--")

    def models(*words: str) -> list[dict[str, object]]:
        _, plan = planned(*size, *words)
        return [one["with_shim"] for one in plan["models"]] + plan["models"][0]["decisions"]

    run = (*front.split(), "run")
    follow = ("--set", "optimizer_states=follow-model")
    assert models(*run, "--", *job) == models(*job)
    low = models("PRECISION_SHIM_OPTIMIZER_STATES=follow-model", *job)
    assert models(*run, *follow, "--", *job) == models(*run, *follow, *job) == low
    assert low != models(*job)
    features = ("--features", "-bf16-dispatch")
    assert models(*run, *features, *job) == models("PRECISION_SHIM_FEATURES=-bf16-dispatch", *job)
    assert models("PRECISION_SHIM=0", *run, *follow, *job) == models("PRECISION_SHIM=0", *job)
    assert "nonsense" in refused("--", *run, "--set", "nonsense=1", *job)


@needs("skyrl")
@pytest.mark.parametrize("value", ["abc", "null", "2.5", "???"])
def test_a_number_of_gpus_that_is_none(value: str) -> None:
    key = "trainer.placement.policy_num_gpus_per_node"
    assert f"{key}=" in (said := refused("--", *SKYRL, f"{key}={value}"))
    assert "expected a whole number" in said


@needs("skyrl")
@pytest.mark.parametrize("said", ["in the line", "in the environment"])
def test_the_kill_switch(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    words = (
        *SKYRL,
        "trainer.strategy=megatron",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32=true",
    )
    on = ["PRECISION_SHIM_OPTIMIZER_STATES=follow-model", "PRECISION_SHIM_GRAD_BUCKET=align"]
    _, plan = planned("--parameters", "1M", "--", *on, "PRECISION_SHIM=1", *words)
    (one,) = plan["models"]
    assert one["without"] != one["with_shim"]
    assert one["decisions"]
    assert not [note for note in plan["notes"] if "PRECISION_SHIM" in note]
    if said == "in the line":
        on.append("PRECISION_SHIM=Off")
    else:
        monkeypatch.setenv("PRECISION_SHIM", "Off")
    _, plan = planned("--parameters", "1M", "--", *on, *words)
    (one,) = plan["models"]
    assert one["without"] == one["with_shim"]
    assert one["decisions"] == []
    assert plan["notes"][0].startswith("PRECISION_SHIM=Off is set, so the shim does nothing")
    elsewhere = "PRECISION_SHIM_FRAMEWORKS=verl"
    _, plan = planned("--parameters", "1M", "--", *on[:2], elsewhere, "PRECISION_SHIM=1", *words)
    assert plan["models"][0]["decisions"] == []
    assert plan["notes"][0].startswith(f"{elsewhere} is set, so the shim does nothing")
    # As for a job, the line's own variable counts, not the environment's.
    _, plan = planned("--parameters", "1M", "--", *on, "PRECISION_SHIM=strict", *words)
    assert plan["models"][0]["decisions"]


JSON, OFF = """'{"env_vars": {"PRECISION_SHIM": "1"}}'""", "PRECISION_SHIM=0 is set"
EVERYWHERE = "in the driver and the workers: PRECISION_SHIM=1"
UNSET, UNREAD = (
    "PRECISION_SHIM is unset: ",
    "PRECISION_SHIM is unset as far as this line can be read",
)
LAUNCHED = [
    # The line, in a shell in which the shim is on, and what the plan says of it.
    ("JOB", "legal\n"),
    ("nohup torchrun --nproc-per-node=2 -m TARGET", "legal\n"),
    ("accelerate launch --num_processes 2 -m TARGET", "legal\n"),
    ("env -u PRECISION_SHIM JOB", UNSET),
    ("env -iu A JOB", UNSET),
    ("/usr/bin/env - PRECISION_SHIM=1 JOB", EVERYWHERE),
    ("env -S '-u PRECISION_SHIM python' -m TARGET", UNSET),
    ("env -S'PRECISION_SHIM=0 JOB'", OFF),
    ("env --block-signal JOB", "env --block-signal: this option is not known here"),
    ("srun --export=NONE JOB", UNSET),
    ("srun --export none,PRECISION_SHIM=1 JOB", EVERYWHERE),
    ("srun --export=all -n 2 JOB", EVERYWHERE),
    ("sbatch --wrap='srun JOB' --export=NONE", UNSET),
    ("sbatch --export=ALL,PRECISION_SHIM=0 --wrap 'JOB'", OFF),
    ("ray job submit -- JOB", "is unset, unless the Ray cluster was started with it: "),
    ("ray job submit --runtime-env-json=JSON --no-wait -- JOB", EVERYWHERE),
    ("ray job submit --runtime-env-json JSON -- env -u PRECISION_SHIM JOB", "in the driver: PREC"),
    ("bash -c 'ray job submit --runtime-env=on.yaml -- JOB'", EVERYWHERE),
    ("ray job submit --working-dir=. --runtime-env number.yaml -- JOB", UNREAD),
    ("ray job submit --runtime-env none.yaml -- JOB", UNREAD),
    ("ray submit cluster.yaml JOB", UNREAD),
    ("bash -lc 'cd .. && export A=1 PRECISION_SHIM=0; JOB 2>&1 | tee log'", OFF),
    ("bash -e -o pipefail -c 'unset PRECISION_SHIM\n# not it\nJOB \\\n >log'", UNSET),
    ("PRECISION_SHIM=0 bash -c 'PRECISION_SHIM=1 exec JOB'", "legal\n"),
    ("bash -c 'PRECISION_SHIM=0; JOB'", "PRECISION_SHIM=0: what it does to PRECISION_SHIM is not"),
    ("bash -c 'source off.sh && JOB'", "source off.sh: what it does to PRECISION_SHIM is not"),
    ("bash -c '. none.sh; JOB'", ". none.sh cannot be read here"),
    ("sh -c 'PRECISION_SHIM=$MINE JOB'", "PRECISION_SHIM=$MINE is not computed here"),
    ("env -u PRECISION_SHIM uv run --env-file off.sh -m TARGET", OFF),
    ("uv run --env-file=off.sh -m TARGET", "legal\n"),
    ("env - uv run --env-file on.sh --env-file off.sh -m TARGET", OFF),
    ("docker run --rm image JOB", "whether docker passes on PRECISION_SHIM, or sets it, is not"),
    ("docker run -e PRECISION_SHIM image JOB", EVERYWHERE),
    ("docker run --env=PRECISION_SHIM=0 image sh -c 'JOB'", OFF),
    ("podman run --env-file off.sh image JOB", OFF),
    ("sudo JOB", UNREAD),
    ("ssh host env PRECISION_SHIM=1 JOB", EVERYWHERE),
    ("mpirun -np 2 -x PRECISION_SHIM JOB", EVERYWHERE),
]


@needs("skyrl")
def test_a_plan_says_which_processes_of_a_line_have_the_shim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRECISION_SHIM", "1")
    Path("on.yaml").write_text("env_vars: {PRECISION_SHIM: '1'}\n")
    Path("number.yaml").write_text("env_vars: {PRECISION_SHIM: 1}\n")
    Path("on.sh").write_text("PRECISION_SHIM=1\n")
    Path("off.sh").write_text("A=1\nexport PRECISION_SHIM='0'  # not now\n")
    target = " ".join(SKYRL_ON_FSDP[3:])
    other = []
    for line, said in LAUNCHED:
        line = line.replace("JOB", "python -m TARGET")  # noqa: PLW2901
        words = line.replace("TARGET", target).replace("JSON", JSON)
        ended = command("plan", "--parameters", "1M", "--", *shlex.split(words))
        told = ended.out if said.endswith("\n") else " ".join(ended.out.split())
        if said not in told:
            other.append(f"{line}\n{ended.out}{ended.err}")
    assert not other, "\n\n".join(other)


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
policy:
  model_name: {model}
  precision: bfloat16
  dtensor_cfg: {{enabled: true}}
cluster: {{gpus_per_node: 8, num_nodes: 1}}
"""


def write_job(folder: Path) -> tuple[Path, Path]:
    """Write a NeMo-RL job's YAML and its example script into its model's folder."""
    job, example = folder / "job.yaml", folder / "run_mine.py"
    job.write_text(JOB.format(model=folder))
    example.write_text(EXAMPLE)
    return job, example


@needs("nemo_rl")
@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (("--config={job}",), True),
        (("cluster.num_nodes=2", "--conf", "{job}", "--mine"), True),
        (("--config", "{job}", "stray"), False),
        (("--config", "{job}", "cluster.num_nodes=", "2"), False),
    ],
)
def test_a_line_of_nemo_rls(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,  # noqa: F811
    words: tuple[str, ...],
    runs: bool,
) -> None:
    job, example = write_job(model)
    named = [word.replace("{job}", str(job)) for word in words]
    space: dict[str, object] = {}
    exec(EXAMPLE, space)
    monkeypatch.setattr("sys.argv", [str(example), *named])
    try:
        space["main"]()  # type: ignore[operator]
    except Exception:
        assert not runs
        refused("--", "python", str(example), *named)
    else:
        assert runs
        assert planned("--", "python", str(example), *named)[0] == 0


@needs("torchtitan")
@pytest.mark.parametrize(
    "out", ["PRECISION_SHIM_FRAMEWORKS=verl", "PRECISION_SHIM_FEATURES=audit", "PRECISION_SHIM=0"]
)
def test_a_name_of_torchtitans_where_it_is_not_coerced(out: str) -> None:
    words = ("torchrun", "--nproc-per-node=1", *LLAMA, "--training.mixed_precision_param=bf16")
    assert planned("--", *words)[0] == 0
    assert "bf16" in refused("--", out, *words)


@needs("nemo_rl")
@pytest.mark.parametrize(
    "key", ["policy", "policy.dtensor_cfg", "policy.generation", "env", "data", "cluster"]
)
def test_a_section_of_nemo_rls_without_keys(
    model: Path,  # noqa: F811
    key: str,
) -> None:
    job, example = write_job(model)
    line = ("python", str(example), "--config", str(job))
    said = refused("--", *line, f"++{key}=abc")
    assert f"{key}='abc' (str): expected a section with keys" in said
