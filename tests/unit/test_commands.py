"""A test executes every command of README and docs, or this file states the reason why not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from precision_shim.auditing import files
from precision_shim.auditing.record import COMPONENTS, Audit, AuditComponent, AuditPart

from .. import page_jobs
from ..documented import PAGES, ROOT, blocks, commands
from .checkpoints.written import megatrons

HERE = "tests/unit/test_commands.py"
NETWORK = "it downloads"
MENTION = "it names a way to start a process, and is no command of its own"
LONG = "it builds environments and runs for an hour; .ci/run takes this very line from README"


@dataclass(frozen=True)
class Held:
    """What covers a command: a test, the reason why none executes it, or both.

    Attributes:
        by: file, or file::test, that executes the command or a part of it.
        why_not: why the command is not executed as written.
    """

    by: str = ""
    why_not: str = ""


MANIFEST = {
    # The tests of this file execute these commands.
    "precision-shim doctor": Held(f"{HERE}::test_doctor"),
    "precision-shim doctor --verbose": Held(f"{HERE}::test_doctor"),
    "precision-shim audit /shared/audits": Held(f"{HERE}::test_audit"),
    "precision-shim audit DIR": Held(f"{HERE}::test_audit"),
    "precision-shim checkpoint PATH": Held(f"{HERE}::test_checkpoint"),
    "precision-shim checkpoint PATH --config *": Held(f"{HERE}::test_checkpoint"),
    "PRECISION_SHIM=1 * precision-shim checkpoint run": Held(f"{HERE}::test_checkpoint"),
    "precision-shim checkpoint * --framework roll": Held(f"{HERE}::test_checkpoint"),
    "precision-shim run -- *": Held(f"{HERE}::test_run"),
    "precision-shim run": Held(f"{HERE}::test_run"),
    "precision-shim run ?--features LIST? *": Held(f"{HERE}::test_run"),
    "python benchmarks/numerics.py --write": Held(
        f"{HERE}::test_numerics", "--write changes docs/; the tests compare what it would write"
    ),
    "python benchmarks/both_sides.py --heads --write": Held(
        "tests/vllm/test_mismatch.py::test_heads_in_fp32_in_both_engines_lower_the_mismatch",
        "it needs the real vLLM; the test runs its measurement on a smaller model",
    ),
    "python benchmarks/both_sides.py --write": Held(
        "tests/vllm/test_table.py",
        "a whole table takes minutes; the tests write one of a tiny model",
    ),
    # -- executed by other tests
    "swift rollout *": Held(
        "tests/ms_swift/test_pages.py::test_the_rollouts_server_takes_the_dtype",
        "it needs vLLM; the test reads it with ms-swift's own parser",
    ),
    "python -m benchmarks.rl_mismatch --write": Held(
        "tests/rl/test_mismatch_table.py",
        "a whole table takes half an hour; the tests make one of given logs",
    ),
    "export PRECISION_SHIM=1": Held(
        "tests/activation/test_processes.py::test_children_with_the_variable"
    ),
    "export PRECISION_SHIM=1 PRECISION_SHIM_FRAMEWORKS=megatron": Held(
        "tests/unit/test_by_name.py", "the unit environments have no Megatron"
    ),
    "unset PRECISION_SHIM": Held("tests/activation/test_startup.py::test_off_imports_nothing"),
    "export PRECISION_SHIM_OPTIMIZER_STATES=follow-model": Held(
        "tests/plan/test_command.py::test_variables_in_front_count"
    ),
    "pip install precision-shim": Held(
        "tests/environments/check_package.py", "before a release no index has it: from the wheel"
    ),
    "pip uninstall": Held("tests/environments/check_package.py", MENTION),
    "precision-shim doctor --against *.whl": Held(
        "tests/activation/test_against.py::test_a_wheel_that_holds", "the wheel is a download"
    ),
    "precision-shim doctor --record FILE": Held("tests/symbols_in_record.py"),
    "precision-shim demo": Held(
        "tests/cli/test_demo.py::test_the_effect_is_there_and_measured",
        "the unit environments have no verl",
    ),
    "precision-shim demo --rl": Held(
        "tests/cli/test_demo_rl.py", "the unit environments have no verl and no vLLM"
    ),
    "precision-shim plan -- *": Held(
        "tests/plan/test_frameworks.py::test_verl_on_megatron",
        "the unit environments have no verl",
    ),
    "uv run *precision-shim doctor": Held(f"{HERE}::test_doctor", NETWORK),
    "precision-shim plan --gpu-memory 80 -- *": Held(
        "tests/plan/test_frameworks.py::test_verl_on_megatron",
        "the unit environments have no verl",
    ),
    "precision-shim plan --gpu-memory 10 --search -- *": Held(
        "tests/plan/test_command.py::test_the_search_gives_up_no_more_than_it_has_to",
        "the unit environments have no verl",
    ),
    "python -m examples.verl_fsdp": Held("tests/verl/test_contract.py"),
    "python -m examples.skyrl_fsdp": Held("tests/skyrl/test_contract.py"),
    "python -m examples.nemo_rl_dtensor": Held("tests/nemo_rl/test_contract.py"),
    "python -m examples.torchtitan_pretraining": Held("tests/torchtitan/test_contract.py"),
    "*python -m benchmarks.gpu": Held(
        "tests/gpu/test_dry_run.py::test_every_part_runs_and_every_check_holds", "a GPU"
    ),
    "*python -m benchmarks.gpu --minutes 25 *": Held(
        "tests/gpu/test_dry_run.py::test_every_part_runs_and_every_check_holds", "a GPU"
    ),
    "*python -m benchmarks.gpu.report*": Held(
        "tests/gpu/test_dry_run.py::test_the_page_is_made_of_the_file"
    ),
    "python benchmarks/gpu/bundle.py *": Held(
        "tests/gpu/test_dry_run.py::test_the_bundle_is_in_pieces_that_join", NETWORK
    ),
    "sh build/gpu-bundle/unpack.sh *": Held(
        "tests/gpu/test_dry_run.py::test_the_bundle_is_in_pieces_that_join",
        "it installs what the bundle brings, for a GPU",
    ),
    # Nothing can execute these commands here.
    "export PRECISION_SHIM=1 NRL_FORCE_REBUILD_VENVS=true": Held(
        why_not="NeMo-RL then builds its workers' environments, from the network"
    ),
    "uv add precision-shim": Held(why_not="it changes a checkout of NeMo-RL, from the network"),
    "uv remove precision-shim": Held(why_not="it changes a checkout of NeMo-RL"),
    "uv pip install -p *": Held(why_not="it needs an environment that NeMo-RL has built"),
    "pip install 'precision-shim?*?'": Held(why_not=NETWORK),
    "pip install --no-deps -r benchmarks/gpu/requirements.txt": Held(
        "tests/gpu/test_dry_run.py::test_the_wheels_are_those_that_the_tests_have", NETWORK
    ),
    "pip download *": Held(why_not=NETWORK),
    "uv venv *": Held(why_not="a step that was timed, before a download"),
    "uv pip install *": Held(why_not=NETWORK),
    "python tests/environments/report_upstream.py": Held(why_not=NETWORK),
    "python tests/environments/report_mutants.py": Held(
        why_not="it needs the wheels that report_upstream.py downloads"
    ),
    "python tests/environments/record_symbols.py": Held(
        "tests/symbols_in_record.py", "it needs the environments of all versions"
    ),
    "python train.py ... --fp16": Held(
        "tests/flag_trainers/test_training.py",
        "it starts Ray workers on GPUs; the test executes their own steps",
    ),
    "python examples/start_rlvr_pipeline.py *": Held(
        "tests/roll/test_megatron.py",
        "it starts Ray workers on GPUs; the test executes their own steps",
    ),
    "python benchmarks/startup.py": Held(why_not="it measures for minutes on an idle machine"),
    "*tox run -e demo": Held(
        "tests/cli/test_demo.py::test_the_effect_is_there_and_measured",
        "tox would run in tox; the environment's command is what the test executes",
    ),
    "*tox run -e demo-rl": Held(
        "tests/rl/test_runs.py",
        "tox would run in tox; the environment's command is what the test executes",
    ),
    "*tox run-parallel -p 2": Held(".ci/run", LONG),
    "*tox run-parallel -p 2 -m matrix": Held(".ci/run", LONG),
    "*tox run-parallel -p 2 -m release": Held(
        ".ci/release.py", "it builds environments and runs for half an hour, before a release"
    ),
    "tox run -e te": Held(why_not="it compiles TransformerEngine, for ten minutes"),
    "tox run -e coverage*": Held(why_not="it runs these tests, for minutes"),
    "tox run -e mutation -- *": Held(why_not="it runs these tests a thousand times"),
    "tox run -e verl-0.9.1 -- *": Held(why_not="tox would run in tox"),
    "* tox run -e *": Held(why_not="tox would run in tox"),
    "python -m": Held(why_not=MENTION),
    "python -m X": Held(why_not=MENTION),
    "python -[IS]": Held("tests/activation/test_processes.py::test_flags_of_the_interpreter"),
    "python -c pass": Held(why_not="what benchmarks/startup.py measures"),
    "ray job submit": Held(why_not=MENTION),
    "uv sync": Held(why_not=MENTION),
    "python3 -m areal.infra.launcher...": Held("tests/areal/test_workers.py::test_the_launcher"),
    "uv run": Held(why_not=MENTION),
    "uv run examples/...": Held(why_not=MENTION),
}
"""Maps the pattern (:mod:`fnmatch`) of each documented command that is no job to its coverage."""

JOBS = {
    "verl": "tests/verl/test_pages.py::test_a_job_passes_verls_validation",
    "skyrl": "tests/skyrl/test_pages.py::test_a_job_passes_skyrls_validation",
    "nemo-rl": "tests/nemo_rl/test_pages.py::test_a_job_passes_nemo_rls_set_up",
    "torchtitan": "tests/torchtitan/test_pages.py::test_a_job_passes_torchtitans_validation",
    "areal": "tests/areal/test_pages.py::test_a_job_passes_areals_validation",
    "ms-swift": "tests/ms_swift/test_pages.py::test_a_job_passes_ms_swifts_validation",
    "roll": "tests/roll/test_pages.py::test_a_job_passes_rolls_validation",
}
"""Maps each framework to the test that validates its documented jobs with the framework."""

DOCUMENTED = {one: page.name for page in PAGES for one in commands(page)}


def test_every_command_is_held() -> None:
    jobs = {one.shown for one in page_jobs.jobs()}
    unheld = [
        f"{page}: {one}"
        for one, page in DOCUMENTED.items()
        if one not in jobs and not any(fnmatchcase(one, pattern) for pattern in MANIFEST)
    ]
    assert not unheld, "name the test that executes it in MANIFEST, or the reason why none can"
    gone = [
        pattern for pattern in MANIFEST if not any(fnmatchcase(one, pattern) for one in DOCUMENTED)
    ]
    assert not gone, "documented nowhere: take it out of MANIFEST"


@pytest.mark.parametrize("pattern", MANIFEST)
def test_what_holds_a_command_exists(pattern: str) -> None:
    held = MANIFEST[pattern]
    assert held.by or held.why_not
    if held.by:
        file, _, test = held.by.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not test or re.search(rf"^def {test}\(", text, re.MULTILINE), held.by


@pytest.mark.parametrize("framework", JOBS)
def test_the_jobs_of_each_framework_are_validated(framework: str) -> None:
    file, _, test = JOBS[framework].partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert page_jobs.of(framework)
    assert f'of("{framework}")' in text
    assert re.search(rf"^@pytest.mark.parametrize\(\"job\", .*\ndef {test}\(", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.name)
def test_no_block_has_a_job_that_no_test_reads(page: Path) -> None:
    """Every launch line must be in a block that is read as commands, and must be found there."""
    read = {one.shown for one in page_jobs.on_page(page)}
    for block in blocks(page):
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            words = line.split("  #")[0].removeprefix("$ ").split()
            if set(words) & set(page_jobs.ENTRIES):
                assert " ".join(words) in read, f"{page.name}: write it as a command: {line}"


# -- executed here -----------------------------------------------------------------------------


def execute(
    command: str, put: Mapping[str, str | None] | None = None, *more: str
) -> subprocess.CompletedProcess[str]:
    """Execute a documented command in its own process.

    Args:
        command: the command as the page shows it.
        put: replacements for words of the page, such as a directory; ``None`` drops a word.
        more: words for the end.
    """
    assert command in DOCUMENTED, f"no page has {command!r} any more"
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    start = {"precision-shim": ["-m", "precision_shim"], "python": []}[words[0]]
    here = ((put or {}).get(word, word) for word in words[1:])
    rest = [word for word in here if word is not None]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    return subprocess.run(
        [sys.executable, *start, *rest, *more],
        cwd=ROOT,
        env={**inherited, "PYTHONIOENCODING": "utf-8", **variables},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def matching(pattern: str) -> list[str]:
    return [one for one in DOCUMENTED if fnmatchcase(one, pattern)]


def output_of(page: str, command: str) -> str:
    """The output that the page shows below a command, up to the end of the block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.split(f"$ {command}\n")[1].split("```")[0]


@pytest.mark.parametrize("option", ["", "--verbose", "--json"])
def test_doctor(option: str) -> None:
    done = execute("precision-shim doctor", None, *([option] if option else []))
    assert (done.returncode, done.stderr) == (0, "")
    if option == "--json":
        assert json.loads(done.stdout)
    else:
        assert "start-up file" in done.stdout
        # With Megatron but no TransformerEngine the doctor adds limits: tests/verl/test_doctor.py.
        assert re.search(
            r"^no problems(, but the limits above)?\Z", done.stdout.strip(), re.MULTILINE
        )


def audit_of(rank: int) -> Audit:
    """The audit of one of the eight ranks in docs/audit.md."""
    dtypes = {"params": "bf16", "grad_buckets": "bf16", "exp_avg": "bf16", "exp_avg_sq": "bf16"}
    dtypes["master"] = "fp32" if rank == 5 else "int16"
    components = {
        name: AuditComponent((dtypes[name],), 8, 16, 2.0, name == "params", "cuda", "live")
        if name in dtypes
        else AuditComponent()
        for name in COMPONENTS
    }
    part = AuditPart("model", "DistributedOptimizer", 8, 800, 4, None, components)
    return Audit("verl", "actor", rank, 8, (part,), {"bytes": 40, "allocated": 80})


def test_audit(tmp_path: Path) -> None:
    for rank in range(7):
        one = audit_of(rank)
        files.write(tmp_path, files.stem(one), one)
    command = "precision-shim audit /shared/audits"
    done = execute(command, {"/shared/audits": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == output_of("audit.md", command)
    done = execute("precision-shim audit DIR", {"DIR": str(tmp_path)}, "--json")
    assert list(json.loads(done.stdout)["groups"][0]["differ"]) == ["5"]


@pytest.mark.parametrize("pattern", [one for one in MANIFEST if "m checkpoint" in one])
def test_checkpoint(pattern: str, tmp_path: Path) -> None:
    megatrons(tmp_path / "run")
    put = dict.fromkeys(("PATH", "run", "output/actor_train-0"), str(tmp_path / "run"))
    for command in matching(pattern):
        done = execute(command, put, "--framework=verl")
        assert (done.returncode, done.stderr) == (1, ""), "without verl no resume is exact"
        for label in ("written as", "params", "loss scaler", "resumed here  not here: "):
            assert f"\n  {label}" in done.stdout


def test_checkpoint_for_machines(tmp_path: Path) -> None:
    put = {"PATH": str(megatrons(tmp_path / "run"))}
    done = execute("precision-shim checkpoint PATH", put, "--framework=verl", "--json")
    assert json.loads(done.stdout)["parts"][0]["resume"]["verdict"] == "not here"


def test_run() -> None:
    (command,) = matching("precision-shim run -- *")
    job = dict.fromkeys(shlex.split(command)[4:])
    done = execute(command, {**job, "python": "true"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (usage,) = matching("precision-shim run ?--features*")
    shown = execute("precision-shim doctor", {"doctor": "run"}, "-h").stdout
    assert set(re.findall(r"--\w+", usage)) <= set(re.findall(r"--\w+", shown))


def test_the_demo_says_what_it_takes() -> None:
    done = execute("precision-shim demo", None, "--help")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is here")
@pytest.mark.parametrize(
    "command", sorted(one for one in DOCUMENTED if re.search("-shim plan .*verl", one))
)
def test_plan_without_the_framework(command: str) -> None:
    done = execute(command, {"...": "trainer.n_gpus_per_node=8"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "verl is not installed here" in done.stderr


def test_numerics() -> None:
    command = "python benchmarks/numerics.py --write"
    done = execute(command, {"--write": None})
    assert (done.returncode, done.stderr) == (0, "")
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    for name in re.findall(r"<!-- computed:([\w-]+) -->", page):
        assert f"{name}\n\n|" in done.stdout
