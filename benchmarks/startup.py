"""Measures how much the start-up file slows the start of Python, and the import of torch.

    python benchmarks/startup.py                       # builds the wheel, makes the environments
    python benchmarks/startup.py --rounds 101 --torch /path/to/python-with-torch

Each case has its own environment. All environments have the same interpreter and differ only in
site-packages. A second set of environments has no bytecode in site-packages, as after an install by
uv and in many images, and writes no bytecode (PYTHONDONTWRITEBYTECODE=1). Cases named "a package"
import a package from site-packages, as nearly every process does.
Each round runs all cases in a new random order, and each figure is a median over the rounds. The
difference of two cases is the median of their differences within a round. On an idle machine wall
and processor time agree; on a busy machine only processor time is reliable.
The program needs ``uv``, and a package index for autowrapt and opentelemetry.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASS = ("-c", "pass")
IMPORT_PACKAGE = ("-c", "import packaging.version")
IMPORT_TORCH = ("-c", "import torch")
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
NO_EXPORTER = {f"OTEL_{what}_EXPORTER": "none" for what in ("TRACES", "METRICS", "LOGS")}
UNSET_GOAL_MS = 0.3
SET_GOAL_RATIO = 1.10
NO_BYTECODE_GOAL_RATIO = 1.15


@dataclass
class Case:
    """A way to start Python, and the times of its runs in milliseconds."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """The inherited variables without the shim's, and the case's own variables."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
        return {**inherited, **self.variables}

    def run(self) -> None:
        """Run the command once, and store its wall and processor time."""
        environment = self.environment()
        began = time.perf_counter_ns()
        pid = os.posix_spawn(self.command[0], self.command, environment)
        _, status, usage = os.wait4(pid, 0)
        self.wall.append((time.perf_counter_ns() - began) / 1e6)
        self.cpu.append((usage.ru_utime + usage.ru_stime) * 1e3)
        if status:
            raise SystemExit(f"{self.name}: {' '.join(self.command)} failed, status {status}")


def measure(cases: list[Case], rounds: int) -> None:
    for case in cases:  # fills the file cache, and checks that the command works
        done = subprocess.run(case.command, env=case.environment(), capture_output=True, check=True)
        if done.stderr:
            raise SystemExit(f"{case.name}: {done.stderr.decode()}")
        case.run()
        case.wall.clear()
        case.cpu.clear()
    for _ in range(rounds):
        for case in random.sample(cases, len(cases)):
            case.run()


def added(case: Case, other: Case, values: Callable[[Case], list[float]]) -> float:
    """Median over the rounds of the difference of two cases, in milliseconds."""
    return statistics.median(
        mine - theirs for mine, theirs in zip(values(case), values(other), strict=True)
    )


def report(cases: list[Case], what: str) -> None:
    base = cases[0]
    print(f"\n{what}, medians of {len(base.wall)} interleaved rounds")
    print(f"{'case':<34}{'wall ms':>9}{'x first':>9}{'+ ms':>8}{'cpu ms':>9}{'+ cpu':>8}")
    for case in cases:
        print(
            f"{case.name:<34}{statistics.median(case.wall):>9.2f}"
            f"{statistics.median(case.wall) / statistics.median(base.wall):>9.3f}"
            f"{added(case, base, lambda one: one.wall):>8.2f}"
            f"{statistics.median(case.cpu):>9.2f}{added(case, base, lambda one: one.cpu):>8.2f}"
        )


def environments(where: Path, python: str, *, peers: bool) -> tuple[list[Case], list[Case]]:
    """Make one environment per case; the cases of the second list have no bytecode."""
    run(("uv", "build", "--wheel", "--quiet", "--out-dir", str(where), str(ROOT)))
    wheel = str(next(where.glob("*.whl")))

    def environment(
        name: str, *packages: str, compiled: bool = True, shim: bool = False
    ) -> tuple[str, Path]:
        run(("uv", "venv", "--quiet", "--python", python, str(where / name)))
        interpreter = str(where / name / "bin" / "python")
        compile_it = ("--compile-bytecode",) if compiled else ()
        install = ("uv", "pip", "install", "--quiet", *compile_it, "--python")
        run((*install, interpreter, wheel, *packages))
        site = next((where / name).glob("lib/python*/site-packages"))
        if not shim:
            for file in site.glob("zz_precision_shim.*"):
                file.unlink()
        return interpreter, site

    bare, _ = environment("bare")
    line, site = environment("line")
    (site / "zz_line.pth").write_text("import os\n")
    ours, _ = environment("ours", shim=True)
    cases = [
        Case("bare", (bare, *PASS)),
        Case(".pth of one `import os` line", (line, *PASS)),
        Case("precision_shim, variable unset", (ours, *PASS)),
        Case("precision_shim, PRECISION_SHIM=0", (ours, *PASS), {"PRECISION_SHIM": "0"}),
        Case("precision_shim, PRECISION_SHIM=1", (ours, *PASS), {"PRECISION_SHIM": "1"}),
        Case("bare, a package", (bare, *IMPORT_PACKAGE)),
        Case("PRECISION_SHIM=1, a package", (ours, *IMPORT_PACKAGE), {"PRECISION_SHIM": "1"}),
    ]
    if peers:
        autowrapt, _ = environment("autowrapt", "autowrapt==2.0.0")
        otel, site = environment("opentelemetry", "opentelemetry-distro==0.66b1")
        run_otel = str(Path(otel).with_name("opentelemetry-instrument"))
        cases += [
            Case("autowrapt, variable unset", (autowrapt, *PASS)),
            Case("autowrapt, variable set", (autowrapt, *PASS), {"AUTOWRAPT_BOOTSTRAP": "none"}),
            Case("opentelemetry-instrument", (run_otel, otel, *PASS), NO_EXPORTER),
        ]
    bare, _ = environment("bare-source", compiled=False)
    ours, _ = environment("ours-source", compiled=False, shim=True)
    is_set = {"PRECISION_SHIM": "1"}
    without = [
        Case("bare", (bare, *PASS), NO_BYTECODE),
        Case("precision_shim, variable unset", (ours, *PASS), NO_BYTECODE),
        Case("precision_shim, PRECISION_SHIM=1", (ours, *PASS), {**NO_BYTECODE, **is_set}),
        Case("bare, a package", (bare, *IMPORT_PACKAGE), NO_BYTECODE),
        Case("PRECISION_SHIM=1, a package", (ours, *IMPORT_PACKAGE), {**NO_BYTECODE, **is_set}),
    ]
    return cases, without


def run(command: tuple[str, ...]) -> None:
    subprocess.run(command, check=True)


def goals(cases: list[Case], without: list[Case]) -> bool:
    """Print figures and goals; return whether the processor times meet the goals."""
    bare, line, unset, _, is_set = cases[:5]
    bare_source, _, set_source = without[:3]
    print()
    for name, values in (("wall", lambda one: one.wall), ("cpu", lambda one: one.cpu)):
        more = added(unset, line, values)
        ratio = statistics.median(values(is_set)) / statistics.median(values(bare))
        source = statistics.median(values(set_source)) / statistics.median(values(bare_source))
        print(
            f"{name:<5} unset: {more:+.2f} ms over the `import os` line (goal {UNSET_GOAL_MS}); "
            f"set: {ratio:.3f} x bare (goal {SET_GOAL_RATIO}); without bytecode "
            f"{source:.3f} x bare (goal {NO_BYTECODE_GOAL_RATIO})"
        )
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    met = more <= UNSET_GOAL_MS and ratio <= SET_GOAL_RATIO
    return met and source <= NO_BYTECODE_GOAL_RATIO


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    parser.add_argument("--no-peers", action="store_true", help="leave out the other packages")
    parser.add_argument("--torch", help="a Python that has torch and this package installed")
    parser.add_argument("--torch-rounds", type=int, default=15)
    parser.add_argument("--keep", type=Path, help="make the environments here, and keep them")
    options = parser.parse_args()
    where = options.keep or Path(tempfile.mkdtemp(prefix="startup-"))
    try:
        cases, without = environments(where, options.python, peers=not options.no_peers)
        measure(cases, options.rounds)
        report(cases, "python -c pass")
        measure(without, options.rounds)
        report(without, "python -c pass, without bytecode")
        met = goals(cases, without)
        if options.torch:
            cases = [
                Case("import torch, shim off", (options.torch, *IMPORT_TORCH)),
                Case("again (the noise)", (options.torch, *IMPORT_TORCH)),
                Case(
                    "import torch, shim on", (options.torch, *IMPORT_TORCH), {"PRECISION_SHIM": "1"}
                ),
            ]
            measure(cases, options.torch_rounds)
            report(cases, "import torch")
    finally:
        if options.keep is None:
            shutil.rmtree(where)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
