"""A launch line that the plan reads, and the same line in verl's own entry point under Hydra."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from precision_shim.errors import PlanError
from precision_shim.process import registry
from precision_shim.process.settings import resolve
from precision_shim_tools.cli import main
from precision_shim_tools.plan.command import Options, read_launch_line
from precision_shim_tools.plan.verl.composing import compose

from ..every_framework.newest import on_the_newest
from ..processes.composed_once import composed_once
from ..processes.rank_server import Ranks, run_module

pytestmark = [on_the_newest("verl"), pytest.mark.slow]

ACTOR = "actor_rollout_ref.actor"
DTYPE = f"{ACTOR}.megatron.dtype"
OVERRIDE = f"{ACTOR}.optim.override_optimizer_config"
MEGATRON = "--config-name=ppo_megatron_trainer"
COMMON = (
    "trainer.n_gpus_per_node=1",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=256",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
)
FILES = {
    "mine/ppo_trainer.yaml": "trainer: {nnodes: 7}",
    "mine/job.yaml": "defaults: [ppo_megatron_trainer, _self_]\ntrainer: {nnodes: 4}",
    "own/job.yaml": (
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\n"
        "defaults: [ppo_megatron_trainer, _self_]\n"
        "states: &states {exp_avg_dtype: bf16}\n"
        "actor_rollout_ref: {actor: {optim: {override_optimizer_config: *states}}}"
    ),
    "groups/dtype/half.yaml": (
        "# @package _global_\nactor_rollout_ref: {actor: {megatron: {dtype: float16}}}"
    ),
}
LINES = (
    # Where the config is.
    ("-cn=ppo_megatron_trainer",),
    ("--config-nam=ppo_megatron_trainer.yaml",),
    (MEGATRON, "--config-name=ppo_trainer"),
    ("--config-path=pkg://verl.trainer.config", MEGATRON),
    ("--config-path={here}/own", "--config-name=job"),
    ("--config-path=own", "--config-name=job"),
    ("--config-dir=mine",),
    ("-cd", "mine", "-cn", "job"),
    ("--config-dir=nowhere", MEGATRON),
    ("--config-dir=groups", MEGATRON, "+dtype=half"),
    (MEGATRON, "hydra.searchpath=[file://groups]", "+dtype=half"),
    ("actor@actor_rollout_ref.actor=nothing",),
    # What is no override.
    (MEGATRON, f"{DTYPE}=", "float16"),
    (f"{DTYPE}=float16", MEGATRON, "trainer.nnodes=2"),
    ("--local_rank=0", MEGATRON),
    ("--", "trainer.nnodes=2", MEGATRON),
    ("-m", MEGATRON, f"{DTYPE}=float16,bfloat16"),
    # Overrides.
    (MEGATRON, f"{DTYPE}=float16,bfloat16"),
    (MEGATRON, f"+{DTYPE}=float16"),
    (
        *(MEGATRON, f"{DTYPE}= float16", f"++{DTYPE}='bfloat16'", " trainer.nnodes=int(2.7)"),
        f"+{OVERRIDE}={{exp_avg_dtype:'torch.bfloat16',exp_avg_sq_dtype:BF16}}",
        *(f"+{OVERRIDE}.main_grads_dtype=16", f"+{OVERRIDE}.main_params_dtype=null"),
        *("actor_rollout_ref.model.path='/a,b=c'", f"~{ACTOR}.megatron.seed"),
    ),
    (
        *(MEGATRON, f"+{OVERRIDE}.exp_avg_dtype=${{{DTYPE}}}"),
        f"+{OVERRIDE}.exp_avg_sq_dtype=${{oc.env:NOWHERE_SET,fp32}}",
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("composing")
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def in_full(line: tuple[str, ...], folder: Path) -> list[str]:
    return [*(word.replace("{here}", str(folder)) for word in line), *COMMON]


def test_a_main_function_that_the_script_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra looks beside the file with the decorator, and neither beside the script nor here."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine"
    for place, nodes in ((tmp_path, 2), (package, 3)):
        (place / "conf").mkdir(parents=True)
        (place / "conf" / "__init__.py").touch()
        (place / "conf" / "job.yaml").write_text(f"trainer: {{nnodes: {nodes}}}")
    (package / "__init__.py").touch()
    (package / "main.py").write_text(
        "import hydra\n@hydra.main(config_path='none', config_name='job', version_base=None)\n"
        "def main(config):\n    print(config.trainer.nnodes)\n"
    )
    (tmp_path / "verl_job.py").write_text(
        "from mine.main import main\ndef later():\n    import verl\nmain()\n"
    )
    words = ("verl_job.py", "--config-path=conf")
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    job = read_launch_line(
        ["python", *words], registry.entries().values(), resolve(environ={}), Options()
    )
    assert int(done.stdout) == compose(job)["trainer"]["nnodes"] == 3
    for option, told in (("--config-path=none", "relative to mine/main.py"), ("-cd=none", "Start")):
        job = replace(job, arguments=("--config-path=conf", option))
        with pytest.raises(PlanError, match=told):
            compose(job)


@pytest.fixture(scope="module")
def by_verl(folder: Path, ray_drivers: Ranks) -> dict[tuple[str, ...], dict[str, Any] | str]:
    """Maps each line to the config that verl's ``main`` gets, or why there is none."""
    file = folder / "lines.json"
    file.write_text(json.dumps([in_full(line, folder) for line in LINES]))
    words = ("tests.verl.composed_by_verl", file)
    code, said = run_module(ray_drivers, *words, cwd=folder, HYDRA_FULL_ERROR="1")
    assert code == 0, said
    answers = json.loads(file.read_text())
    return dict(zip(LINES, answers, strict=True))


def by_plan(words: list[str]) -> dict[str, Any] | str:
    line = ["python", "-m", "verl.trainer.main_ppo", *words]
    known = registry.entries().values()
    try:
        with composed_once():
            return compose(read_launch_line(line, known, resolve(environ={}), Options()))
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_the_plan_reads_a_line_as_verl_does(
    here: Path, by_verl: dict[tuple[str, ...], Any], line: tuple[str, ...]
) -> None:
    theirs = by_verl[line]
    ours = by_plan(in_full(line, here))
    assert isinstance(ours, str) == isinstance(theirs, str), (ours, theirs)
    if isinstance(ours, dict):
        ours["trainer"]["device"] = theirs["trainer"]["device"]  # verl sets it on some machines
        assert json.loads(json.dumps(ours)) == theirs


def planned(*words: str) -> tuple[int, Any, str]:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as end,
    ):
        main(["plan", "--parameters", "1M", "--json", "--", *words])
    return int(end.value.code or 0), json.loads(out.getvalue() or "null"), err.getvalue()


def test_a_config_may_refer_to_a_variable_of_the_line(here: Path) -> None:
    line = ("python3", "-m", "verl.trainer.main_ppo", MEGATRON, *COMMON)
    refers = f"{DTYPE}=${{oc.env:THE_DTYPE}}"
    code, plan, _ = planned("THE_DTYPE=float16", *line, refers)
    assert (code, plan["models"][0]["computes"]) == (1, "fp16")  # 1: the rollout stays in bf16
    assert not any("not resolved" in one for one in plan["notes"])
    assert "THE_DTYPE" not in os.environ
    _, plan, _ = planned(*line, refers)
    assert any("not resolved" in one for one in plan["notes"])


def test_a_misspelt_config(here: Path) -> None:
    code, _, said = planned("python3", "-m", "verl.trainer.main_ppo", MEGATRON[:-2])
    assert (code, "did you mean ppo_megatron_trainer? " in said) == (2, True)


def test_no_config_stays_in_hydra(here: Path) -> None:
    from hydra.core.global_hydra import GlobalHydra

    assert isinstance(by_plan(["--config-dir=mine", *COMMON]), dict)
    assert isinstance(by_plan(["actor_rollout_ref.nothing=1"]), str)
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize("option", ["--cfg=job", "--multirun", "-m", "--hydra-help"])
def test_options_that_start_no_single_job_are_refused(option: str) -> None:
    code, _, said = planned("python3", "-m", "verl.trainer.main_ppo", option, MEGATRON)
    assert code == 2
    assert option.partition("=")[0] in said
    assert "Correct the line." in said
