"""The proof on a GPU (``benchmarks.gpu``) without a GPU: all parts on a CPU, and broken parts."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from .test_on_gpu import NAMES, without_gpu

ROOT = Path(__file__).parents[2]
PROCESSOR_SECONDS = 120
"""Limit of a dry run's processor time; on a busy machine the wall clock is no measure."""
MINUTES = 4.5
"""The run's limit: a run that hangs ends itself and names the parts that did not run."""

Modules = Callable[[str], ModuleType]


@dataclass(frozen=True)
class Run:
    """A run's exit status, its output, its result file, and the processor time that it took."""

    status: int
    printed: str
    file: Path
    seconds: float

    @property
    def values(self) -> dict[str, Any]:
        """What the file holds."""
        return dict(json.loads(self.file.read_text(encoding="utf-8")))

    def figures(self, part: str) -> dict[str, dict[str, Any]]:
        """The figures of a part's results, by the quantity that was measured."""
        return {one["what"]: one["figures"] for one in self.values["parts"][part]["results"]}


def start(folder: Path, *arguments: str) -> Run:
    """Run the proof's command as a user does."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(folder), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    return Run(done.returncode, done.stdout + done.stderr, folder / "proof.json", took)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One dry run of everything."""
    return start(tmp_path_factory.mktemp("dry"), "--dry-run", "--minutes", str(MINUTES))


# -- the whole proof -------------------------------------------------------------------------


def test_every_part_runs_and_every_check_holds(dry: Run) -> None:
    parts = dry.values["parts"]
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(NAMES, "ran")
    assert dry.status == 0, dry.printed
    assert dry.seconds < PROCESSOR_SECONDS
    for name, part in parts.items():
        assert part["results"], name
        assert part["checks"], name
        assert part["title"] in dry.printed
        for check in part["checks"]:
            assert check["holds"] is not False, check
            assert check["holds"] is not None or check["why"]


def test_bytes_per_parameter_are_those_that_are_promised(dry: Run) -> None:
    found = {
        name: (one["audit_together"], one["resident_bytes"], one["peak_in_step_per_parameter"])
        for name, one in dry.figures("memory").items()
    }
    # The figures stay empty, because a CPU has no allocator that could report them.
    assert found == {
        "1.3 billion, without the shim": (18.0, None, None),
        "1.3 billion, with the shim": (10.0, None, None),
        "1.3 billion, with, whole masters": (12.0, None, None),
        "1.3 billion, with, fp8 moments": (8.0, None, None),
        "1.3 billion, with, fp16": (18.0, None, None),
        "7 billion, with the shim": (10.0, None, None),
        "7 billion, without the shim": (18.0, None, None),
    }


def test_what_a_step_has_to_move_follows_from_its_states(dry: Run) -> None:
    moved = {
        name: one["bytes_to_move_per_parameter"]
        for name, one in dry.figures("step-time").items()
        if "bytes_to_move_per_parameter" in one
    }
    # The step reads the gradient, reads and writes states and master, and writes the parameter. A
    # remainder's master has its upper half in the parameter, so the parameter is read too.
    assert moved["without the shim"] == pytest.approx(4 + 2 * (4 + 4 + 4) + 2, rel=0.02)
    assert moved["with the shim"] == pytest.approx(2 + 2 * (2 + 2 + 2) + 2 * 2, rel=0.02)
    assert moved["with, whole masters"] == pytest.approx(2 + 2 * (4 + 2 + 2) + 2, rel=0.02)


def test_parity_trains_each_seed_with_and_without(dry: Run) -> None:
    runs = [one for one in dry.figures("parity").values() if "losses" in one]
    assert sorted((one["seed"], one["shim"]) for one in runs) == [
        (seed, on) for seed in (0, 1, 2) for on in (False, True)
    ]
    assert all(one["losses"][-1] < one["losses"][0] for one in runs)


def test_host_synchronisations_are_not_counted_and_it_says_so(dry: Run) -> None:
    steps = dry.figures("fp16")["FSDP2, LossScaler beside a loop by hand"]["steps"]
    assert len(steps) == 5
    assert all(one["ours"] is None and one["by_hand"] is None for one in steps)
    said = [one for one in dry.values["parts"]["fp16"]["checks"] if one["holds"] is None]
    assert all("set_sync_debug_mode" in one["why"] for one in said)
    assert len(said) == 2


def test_the_stand_in_is_compared_with_a_loop_by_hand_and_it_says_so(dry: Run) -> None:
    found = dry.figures("stand-in")
    assert found["the stand-in beside a loop by hand"]["beside"] == "a loop by hand"
    # 3 parameter dtypes times 3 masters (fp32, fp16, none), bf16 remainders, 16 pairs of moments.
    assert len(found["the stand-in beside a loop by hand"]["combinations"]) == (3 * 3 + 1) * 16


def test_other_kernels_give_fp16_the_smaller_divergence(dry: Run) -> None:
    kl = dry.figures("why-fp16")["together"]["kl"]
    assert kl["bfloat16"].keys() == kl["float16"].keys()
    assert kl["bfloat16"]["fused attention"] > 0.0


def test_it_says_what_it_ran_on(dry: Run) -> None:
    machine = dry.values["machine"]
    assert "stand-in" in machine["transformer_engine"]
    assert machine["device"].startswith("a CPU")
    assert "memory_bytes" not in machine
    assert dry.printed.startswith("DRY RUN")


# -- the page --------------------------------------------------------------------------------


def test_the_page_is_made_of_the_file(dry: Run, gpu: Modules, tmp_path: Path) -> None:
    report = gpu("report")
    target = tmp_path / "proof.md"
    assert report.main([str(dry.file), "--page", str(target)]) == 0
    page = target.read_text(encoding="utf-8")
    assert "dry run" in page
    assert report.NOT_RUN not in page
    for part in dry.values["parts"].values():
        assert part["title"] in page
    drawn = sorted((tmp_path / "proof").iterdir())
    assert [one.stem for one in drawn] == ["memory", "parity", "step-time", "why-fp16"]
    for one in drawn:
        assert ElementTree.parse(one).getroot().tag.endswith("svg")
        assert f"proof/{one.name}" in page


def test_a_dry_run_never_becomes_the_page_of_the_docs(
    dry: Run, gpu: Modules, capsys: pytest.CaptureFixture[str]
) -> None:
    report = gpu("report")
    before = report.PAGE.read_bytes()
    assert report.main([str(dry.file)]) == 1
    assert "proves nothing about a GPU" in capsys.readouterr().err
    assert report.PAGE.read_bytes() == before


def test_the_page_of_the_docs_says_whether_a_gpu_ran_it(gpu: Modules) -> None:
    report = gpu("report")
    page = report.PAGE.read_text(encoding="utf-8")
    if report.NOT_RUN in page:
        assert page == report.page([], {}, "proof")
    else:
        assert re.search(r"^Run 1: \d{4}-\d\d-\d\d, \S.*GiB; .*TransformerEngine \d", page, re.M)


def test_of_several_runs_the_last_of_each_part_counts(dry: Run, gpu: Modules) -> None:
    report = gpu("report")
    first, second = dry.values, dry.values
    second["parts"]["memory"]["state"] = "failed"
    del second["parts"]["parity"]
    parts = report.merged([first, second])
    runs = {name: part["run"] for name, part in parts.items()}
    assert runs == {**dict.fromkeys(NAMES, 1), "memory": 0, "parity": 0}


# -- parts that fail -------------------------------------------------------------------------


def broken(gpu: Modules, folder: Path, *names: str, dry: bool, minutes: float) -> dict[str, Any]:
    """Run parts that break, and return the proof's values."""
    plan, store, runner = gpu("plan"), gpu("store"), gpu("runner")
    parts = [
        plan.Part(number, f"{number}-{name}", name, f"tests.gpu.broken.{name}", 0.5, 0.5)
        for number, name in enumerate(names)
    ]
    kept = store.Store(folder, parts, dry_run=dry, minutes=minutes)
    runner.Runner(kept, parts, dry=dry, minutes=minutes).run()
    values = json.loads((folder / "proof.json").read_text(encoding="utf-8"))
    assert values == kept.values
    return dict(values)


def states(values: dict[str, Any]) -> list[str]:
    """The states of a run's parts, in their order."""
    return [part["state"] for part in values["parts"].values()]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_part_that_fails_ends_neither_the_run_nor_its_results(
    gpu: Modules, tmp_path: Path, dry_run: bool
) -> None:
    names = ("works", "raises", "dies", "works")
    values = broken(gpu, tmp_path, *names, dry=dry_run, minutes=2)
    assert states(values) == ["ran", "failed", "failed", "ran"]
    assert all(part["results"] for part in values["parts"].values())
    assert "RuntimeError: no such kernel" in values["parts"]["1-raises"]["reason"]
    assert "status 7" in values["parts"]["2-dies"]["reason"]
    assert "no such kernel" in (tmp_path / "proof.log").read_text(encoding="utf-8")
    assert gpu("store").exit_status(values) == 1
    assert "no such kernel" in gpu("table").table(values)


def test_the_time_is_kept_and_what_did_not_run_is_named(gpu: Modules, tmp_path: Path) -> None:
    began = time.monotonic()
    values = broken(gpu, tmp_path, "works", "hangs", "works", dry=False, minutes=0.15)
    assert time.monotonic() - began < 60
    ended = {name: part["state"] for name, part in values["parts"].items()}
    assert ended == {"0-works": "ran", "1-hangs": "cut short", "2-works": "not run"}
    assert values["parts"]["1-hangs"]["results"]
    assert "--minutes" in values["parts"]["2-works"]["reason"]
    assert gpu("store").exit_status(values) == 3


ENDED_FROM_OUTSIDE = """
import sys
from benchmarks.gpu import __main__ as command, plan
plan.PARTS = tuple(
    plan.Part(number, f"{number}-{name}", name, f"tests.gpu.broken.{name}", 0.0, 0.0)
    for number, name in enumerate(("works", "hangs", "works"))
)
raise SystemExit(command.main(["--dry-run", "--out", sys.argv[1]]))
"""


def test_a_run_that_is_ended_from_outside_keeps_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "proof.json"

    def stored() -> list[str]:
        return states(json.loads(file.read_text("utf-8"))) if file.exists() else []

    command = [sys.executable, "-c", ENDED_FROM_OUTSIDE, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        try:
            while stored() != ["ran", "running", "waiting"]:
                assert run.poll() is None
                time.sleep(0.1)
        finally:
            run.terminate()
        printed, _ = run.communicate()
    assert run.returncode == 3
    assert stored() == ["ran", "cut short", "not run"]
    assert "of 3 parts ran" in printed


def test_a_check_that_does_not_hold_is_in_the_exit_status(gpu: Modules) -> None:
    held = {"state": "ran", "checks": [{"holds": True}, {"holds": None}]}
    values = {"parts": {"one": held}}
    assert gpu("store").exit_status(values) == 0
    held["checks"] = [{"holds": False}]
    assert gpu("store").exit_status(values) == 1


@without_gpu
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert run.status == 2
    assert "sees no GPU" in run.printed
    assert "--dry-run" in run.printed
    assert not run.file.exists()


def test_a_part_that_there_is_not_is_refused(gpu: Modules) -> None:
    plan = gpu("plan")
    assert [part.name for part in plan.named("3,memory")] == ["memory", "parity"]
    with pytest.raises(ValueError, match="no part speed; allowed: memory, step-time"):
        plan.named("speed")


# -- what the machine needs ------------------------------------------------------------------


def pins(path: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)", text, re.MULTILINE))


def test_the_wheels_are_those_that_the_tests_have() -> None:
    wanted = pins(ROOT / "benchmarks" / "gpu" / "requirements.txt")
    here = pins(ROOT / "tests" / "environments" / "verl-0.7.1.txt")
    built = pins(ROOT / "tests" / "environments" / "transformer-engine.txt")
    assert wanted["megatron-core"] == here["megatron-core"]
    assert {wanted[name] for name in wanted if name.startswith("transformer-engine")} == {
        built["transformer-engine"]
    }


def test_the_bundle_is_in_pieces_that_join(gpu: Modules, tmp_path: Path) -> None:
    bundle = gpu("bundle")
    content, target = tmp_path / "content", tmp_path / "target"
    content.mkdir()
    target.mkdir()
    (content / "large").write_bytes(bytes(range(256)) * 1000)
    made = bundle.pack(content, tmp_path / "pieces", 100_000)
    assert len(made) > 2
    assert all(piece.stat().st_size <= 100_000 for piece in made)
    sums = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    subprocess.run(sums, cwd=tmp_path / "pieces", check=True)
    joined = b"".join(piece.read_bytes() for piece in made)
    subprocess.run(["tar", "-xf", "-", "-C", str(target)], input=joined, check=True)
    assert (target / "large").read_bytes() == (content / "large").read_bytes()
    assert (tmp_path / "pieces" / "unpack.sh").is_file()
