"""Makes docs/proof.md and its plots from the JSON files of one or more runs.

    python -m benchmarks.gpu.report FOLDER/proof.json [...]      # writes docs/proof.md
    python -m benchmarks.gpu.report                              # the page without a run

Of several files with figures of the same part, the last file counts. A dry run is accepted only
for another page (``--page``), because its figures prove nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .plan import PARTS
from .plots import Line, bars, lines
from .store import FORMAT
from .table import verdict

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "proof.md"
NOT_RUN = (
    "Nobody has run `benchmarks.gpu` on a GPU yet. Every figure in these docs comes from a CPU, "
    "where a stand-in replaces TransformerEngine's FusedAdam."
)
ABOUT = """\
`python -m benchmarks.gpu` measures every claim of this project on one GPU, with the real
TransformerEngine, and without Ray or an RL framework. The command writes each result to
`proof.json` at once, so a run that is stopped early keeps the results that it has. At its end the
command prints a table. `python -m benchmarks.gpu.report` makes this page from `proof.json`."""
LISTED = "The proof has these parts:"
HOW = """\
## Run it

On a machine with one NVIDIA GPU, Python 3.12 and torch 2.11 for CUDA 13, in the root of the
repository:

    pip install --no-deps -r benchmarks/gpu/requirements.txt
    PYTHONPATH=shim:adapters:tools python -m benchmarks.gpu --minutes 25 --out build/gpu-proof
    PYTHONPATH=shim:adapters:tools python -m benchmarks.gpu.report build/gpu-proof/proof.json

PyPI has only the source of `transformer-engine-torch`. `tox run -e te` compiles a wheel, for
which it needs no GPU, and puts the wheel into `.tox/transformer-engine/`. To install this wheel,
add `--find-links .tox/transformer-engine` to the `pip` command above.

If the machine with the GPU has no network, pack everything that the proof needs into files on
another machine, copy these files into one folder, and unpack them there:

    python benchmarks/gpu/bundle.py build/gpu-bundle            # on the machine with a network
    sh build/gpu-bundle/unpack.sh build/gpu-bundle /tmp/proof   # on the machine with the GPU

`--parts memory,3` runs only the part named `memory` and part number 3. `--minutes` limits the time
of a run; parts for which no time is left are listed as not run. If you pass `proof.json` files of
several runs, the report takes each part's figures from the last file that has the part.

| exit status | |
|---|---|
| 0 | every part ran, and every check holds |
| 1 | a part failed, or a check does not hold |
| 2 | the arguments are wrong, or there is no GPU |
| 3 | nothing failed, but a part did not run |

`--dry-run` runs every part on a CPU, with tiny models and the stand-in for FusedAdam in
`precision_shim.testing`. The figures of a dry run say nothing about a GPU. On a CPU, the tests in
`tests/gpu/` make a dry run. On a machine with a GPU, these tests run each part of the proof, and
fail if a check of the part fails.
"""
COMPONENTS = ("params", "grad_buckets", "grad_copies", "master", "exp_avg", "exp_avg_sq")
_VERDICTS = {True: "holds", False: "**does not hold**", None: "not judged"}


# -- reading ---------------------------------------------------------------------------------


def read_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the runs in some files.

    Raises:
        ValueError: a file has another format.
    """
    runs = []
    for path in paths:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("format") != FORMAT:
            raise ValueError(f"{path}: format {values.get('format')!r}, allowed: {FORMAT}")
        runs.append(values)
    return runs


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each part, the latest record with state ``"ran"``, otherwise the latest record."""
    found: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        having = [
            {**values["parts"][part.name], "run": number}
            for number, values in enumerate(runs)
            if part.name in values["parts"]
        ]
        ran = [one for one in having if one["state"] == "ran"]
        if having:
            found[part.name] = (ran or having)[-1]
    return found


# -- the page --------------------------------------------------------------------------------


def page(runs: Sequence[dict[str, Any]], plots: Mapping[str, str], folder: str) -> str:
    """The page's text.

    Args:
        runs: the results of ``read_runs``; empty if no run exists yet.
        plots: the drawn plots, by name.
        folder: the plots' folder, relative to the page.
    """
    head = ["# The proof on a GPU", ""]
    if not runs:
        titles = [f"{part.number}. {part.title}" for part in PARTS]
        return "\n".join([*head, NOT_RUN, "", ABOUT, "", LISTED, "", *titles, "", HOW])
    parts = merged(runs)
    body = [line for number, values in enumerate(runs, 1) for line in about(values, number)]
    summary = verdict({"parts": parts})
    found = [line for name, part in parts.items() for line in section(name, part, plots, folder)]
    return "\n".join([*head, ABOUT, "", *body, f"In all {summary}.", "", *found, HOW])


def about(values: dict[str, Any], number: int) -> Iterator[str]:
    """Lines with a run's date, device and versions."""
    machine = values["machine"]
    if values["dry_run"]:
        yield "**This is a dry run on a CPU. Its figures say nothing about a GPU.**"
        yield ""
    memory = machine.get("memory_bytes")
    chip = machine.get("device", "no device")
    if memory:
        chip += f", {memory / 2**30:.1f} GiB"
    versions = [
        f"{name} {machine[key]}"
        for name, key in (
            ("driver", "driver"),
            ("CUDA", "cuda"),
            ("Python", "python"),
            ("torch", "torch"),
            ("megatron-core", "megatron_core"),
            ("TransformerEngine", "transformer_engine"),
            ("precision_shim", "precision_shim"),
            ("commit", "commit"),
        )
        if machine.get(key)
    ]
    yield f"Run {number}: {values['began'][:10]}, {chip}; {', '.join(versions)}."
    yield ""


def section(
    name: str, part: dict[str, Any], plots: Mapping[str, str], folder: str
) -> Iterator[str]:
    """Lines with a part's plots, results and checks."""
    spent = "" if part["seconds"] is None else f" in {part['seconds']:.0f} s"
    yield f"## {part['number']}. {part['title']}"
    yield ""
    yield f"{part['state'].capitalize()}{spent}, run {part['run'] + 1}."
    if part["reason"]:
        yield f"{cell(part['reason'])}"
    yield ""
    for plot in plots:
        if plot.startswith(f"{name}-") or plot == name:
            yield f"![{plot}]({folder}/{plot}.svg)"
            yield ""
    if part["results"]:
        yield "| what | found |"
        yield "|---|---|"
        for result in part["results"]:
            yield f"| {cell(result['what'])} | {cell(result['shows'])} |"
        yield ""
    for check in part["checks"]:
        why = f" ({cell(check['why'])})" if check["why"] else ""
        yield f"- {_VERDICTS[check['holds']]}: {cell(check['says'])}{why}"
    yield ""


def cell(words: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return " ".join(words.split()).replace("|", "\\|")


# -- the plots -------------------------------------------------------------------------------


def draw(parts: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Draw every plot whose results exist; return the plots by name."""
    drawn = {"memory": _memory, "step-time": _step_time, "parity": _parity, "why-fp16": _why_fp16}
    made = {}
    for name, function in drawn.items():
        figures = [one["figures"] for one in parts.get(name, {"results": []})["results"]]
        plot = function(figures)
        if plot:
            made[name] = plot
    return made


def _memory(figures: Sequence[dict[str, Any]]) -> str:
    rows: dict[str, dict[str, float]] = {}
    for one in figures:
        if "audit_per_parameter" not in one:
            continue
        what = f"{one['size']}, {one['variant']}"
        held = one["audit_per_parameter"]
        rows[what] = {name: held[name] for name in COMPONENTS if held[name]}
        if one["peak_in_step_per_parameter"] is not None:
            more = one["peak_in_step_per_parameter"] - sum(rows[what].values())
            rows[what]["more, at the step's peak"] = max(more, 0.0)
    return bars("Bytes per parameter", rows, "B") if rows else ""


def _step_time(figures: Sequence[dict[str, Any]]) -> str:
    rows = {
        one["variant"]: {
            "FusedAdam": one["adam_median_ms"],
            "the rest of Megatron's step": max(one["step_median_ms"] - one["adam_median_ms"], 0.0),
        }
        for one in figures
        if "adam_median_ms" in one
    }
    return bars("Time of the optimizer's step", rows, "ms") if rows else ""


def _parity(figures: Sequence[dict[str, Any]]) -> str:
    curves = [
        Line("with the shim" if one["shim"] else "without", one["losses"], int(one["shim"]))
        for one in figures
        if "losses" in one
    ]
    return lines("Loss on real text", curves, "nats per byte") if curves else ""


def _why_fp16(figures: Sequence[dict[str, Any]]) -> str:
    rows = {
        f"{layout}, {one['precision']}": {"KL": found["kl"]}
        for one in figures
        if "layouts" in one
        for layout, found in one["layouts"].items()
    }
    return bars("Divergence from the trainer's own layout", rows, "nats") if rows else ""


# -- the command -----------------------------------------------------------------------------


def write(paths: Sequence[Path], target: Path) -> None:
    """Write a page, and its plots into a folder with the page's name.

    Raises:
        ValueError: the page is docs/proof.md and a run is dry, or a file has another format.
    """
    runs = read_runs(paths)
    if target.resolve() == PAGE and any(values["dry_run"] for values in runs):
        raise ValueError("a dry run proves nothing about a GPU: name another page with --page")
    plots = draw(merged(runs))
    folder = target.with_suffix("")
    target.parent.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.svg").write_text(plot, encoding="utf-8")
    target.write_text(page(runs, plots, folder.name), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.report")
    parser.add_argument("runs", nargs="*", type=Path, metavar="proof.json")
    parser.add_argument("--page", type=Path, default=PAGE, help="(docs/proof.md)")
    options = parser.parse_args(argv)
    try:
        write(options.runs, options.page)
    except (OSError, ValueError) as error:
        print(f"python -m benchmarks.gpu.report: {error}", file=sys.stderr)
        return 1
    print(options.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
