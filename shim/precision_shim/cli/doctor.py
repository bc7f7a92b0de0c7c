"""``precision-shim doctor``: what is installed, what would be patched here, and why not.

Everything is read from metadata and source; no framework is imported. What needs an import (the
start-up file, wrapt's C extension, TransformerEngine, whose import fails without its CUDA
libraries) is tried in a child process, so that the doctor survives it.
"""

from __future__ import annotations

import json
import os
import platform
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__, _registry, _session, _settings, _startup
from .._settings import FEATURES, PREFIX, TABLE, Settings
from .._status import SeamStatus
from ..errors import PrecisionShimError, SettingsError

__all__ = ["doctor", "examine", "register"]

PACKAGES = (
    ("wrapt", ("wrapt",)),
    ("torch", ("torch",)),
    ("transformer-engine", ("transformer_engine",)),
    ("megatron-core", ("megatron",)),
    ("megatron-bridge", ("megatron.bridge",)),
    ("ray", ("ray",)),
)
_SHOWN = {"pending": "to wrap"}  # of a preview: what status() shows as waiting for the import
_WIDTH = 80
_PATIENCE = 120  # seconds for an import in a child process; TransformerEngine's takes its time

_START_UP = """
import json
from precision_shim import _startup
print(json.dumps(_startup.waiting()))
"""
_WRAPT = """
import json, wrapt
print(json.dumps(type(wrapt.FunctionWrapper.__init__).__name__ == "wrapper_descriptor"))
"""
_TRANSFORMER_ENGINE = """
import json
try:
    import transformer_engine.pytorch
    print(json.dumps(""))
except BaseException as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to ``app``."""
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what is installed, what would be patched here and why not.

    The exit status is 1 when a feature that the variables ask for could not be applied.
    """
    found = examine()
    typer.echo(json.dumps(found, indent=2) if as_json else _text(found))
    raise typer.Exit(0 if found["ok"] else 1)


def examine() -> dict[str, Any]:
    """Everything that the doctor knows, ready for JSON."""
    _startup.stop()  # this process looks; it should not be patched by what it imports
    problems: list[str] = []
    settings = _resolve(problems)
    switch = _switch()
    found: dict[str, Any] = {
        "ok": True,
        "precision_shim": {"version": __version__, "path": str(Path(__file__).parents[1])},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "switch": switch,
        "start_up": _start_up(switch, problems),
        "packages": {name: _package(name, packages) for name, packages in PACKAGES},
        "variables": dict(_variables(problems)),
        "features": list(settings.features),
        "settings": {
            name: {"value": settings[name], "from": settings.origin[name]} for name in TABLE
        },
        "strict": settings.strict,
        "frameworks": {
            name: _framework(entry, settings, problems)
            for name, entry in _registry.entries().items()
        },
    }
    if switch in ("on", "strict") and all(
        one["state"] in ("absent", "off") for one in found["frameworks"].values()
    ):
        problems.append(
            "nothing to patch here: none of these frameworks is installed or asked for: "
            + ", ".join(found["frameworks"])
        )
    # With the kill switch on nothing is asked for, so nothing can be missing.
    found["problems"] = problems
    found["ok"] = not problems or switch == "off"
    return found


def _resolve(problems: list[str]) -> Settings:
    try:
        return _settings.resolve(known_frameworks=_registry.entries())
    except SettingsError as error:
        problems.append(str(error))
        return _settings.resolve(environ={})


def _switch() -> str:
    try:
        return _settings.switch()
    except SettingsError:
        return "invalid"  # _resolve has said so


def _start_up(switch: str, problems: list[str]) -> dict[str, Any]:
    places = [*site.getsitepackages(), site.getusersitepackages()]
    files = [str(file) for one in places if (file := Path(one, "zz_precision_shim.pth")).is_file()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    active = _in_child(_START_UP, {**environment, PREFIX: "1"}) is True
    reason = ""
    if not active:
        reason = (
            "a child process did not execute it (an interpreter that reads no .pth files, such as "
            "python -S?)"
            if files
            else "zz_precision_shim.pth is not in this environment's site-packages; install the "
            "wheel, or install in editable mode again"
        )
        if switch in ("on", "strict"):
            problems.append(f"{PREFIX} is set, but the start-up file is not active: {reason}")
    return {"active": active, "files": files, "reason": reason}


def _package(name: str, packages: tuple[str, ...]) -> dict[str, Any]:
    version = _session.version_of(name, packages)
    found: dict[str, Any] = {"version": version}
    if version is not None and name == "wrapt":
        found["c_extension"] = _in_child(_WRAPT)
    if version is not None and name == "transformer-engine":
        error = _in_child(_TRANSFORMER_ENGINE)
        found["import_error"] = "the import did not end" if error is None else error
    return found


def _variables(problems: list[str]) -> Iterator[tuple[str, Any]]:
    known = {PREFIX, f"{PREFIX}_FEATURES", f"{PREFIX}_FRAMEWORKS"}
    known |= {row.variable for row in TABLE.values()}
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        yield name, os.environ[name]
        if name not in known:
            problems.append(
                f"{name} is no variable of precision_shim; allowed: {', '.join(sorted(known))}"
            )


def _framework(entry: _registry.Entry, settings: Settings, problems: list[str]) -> dict[str, Any]:
    name = entry.framework
    version = _session.version_of(entry.distribution, entry.packages)
    found: dict[str, Any] = {"version": version, "tested": None, "state": "absent", "reason": ""}
    found["seams"] = []
    asked_by_name = settings.frameworks is not None and name in settings.frameworks
    if settings.frameworks is not None and not asked_by_name:
        return {**found, "state": "off", "reason": "not among the frameworks asked for"}
    if version is None:
        if asked_by_name:
            problems.append(f"{PREFIX}_FRAMEWORKS names {name}, which is not installed here")
        return found
    try:
        adapter = entry.load()
        seams = _session.preview(adapter, settings)
    except PrecisionShimError as error:
        problems.append(str(error))
        return {**found, "state": "refused", "reason": str(error)}
    found["tested"] = _registry.is_tested(version, adapter.tested)
    if not found["tested"]:
        found["reason"] = f"not among the tested versions: {', '.join(adapter.tested)}"
    # A seam that is declared as a refusal says so where it is used; it is no fault of this machine.
    declared = {(one.target, one.feature) for one in adapter.seams if one.refusal}
    broken: dict[str, SeamStatus] = {}
    for seam in seams:
        if seam.state == "refused" and (seam.target, seam.feature) not in declared:
            if seam.target in seam.reason:  # the cause, not one that is refused with it
                broken[seam.feature] = seam
            broken.setdefault(seam.feature, seam)
    for feature, seam in broken.items():
        problems.append(f"{name} {version}: {feature} cannot be applied: {seam.reason}")
    states = {seam.state for seam in seams}
    order = ("refused", "pending", "native", "off") if broken else ("pending", "native", "off")
    found["state"] = next((state for state in order if state in states), "absent")
    found["seams"] = [
        {"target": s.target, "feature": s.feature, "state": s.state, "reason": s.reason}
        for s in seams
    ]
    return found


def _in_child(code: str, environment: Mapping[str, str] | None = None) -> Any:
    """What a child process prints as JSON, or ``None`` if it failed."""
    quiet = {**os.environ, PREFIX: "0"} if environment is None else environment
    try:
        done = subprocess.run(
            [sys.executable, *_flags(), "-c", code],
            env=quiet,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _flags() -> list[str]:
    """Flags of this interpreter that decide what a process reads at its start."""
    names = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}
    return [flag for name, flag in names.items() if getattr(sys.flags, name)]


# -- as text ----------------------------------------------------------------------------------


def _text(found: Mapping[str, Any]) -> str:
    lines = [f"precision_shim {found['precision_shim']['version']}"]
    lines += _row("", found["precision_shim"]["path"])
    lines += _row("Python", f"{found['python']['version']}  {found['python']['executable']}")
    start_up = found["start_up"]
    lines += _row("start-up file", "active" if start_up["active"] else "not active")
    lines += _row("", start_up["reason"])
    for name, package in found["packages"].items():
        lines += _row(name, _package_text(package))

    lines += ["", "variables in force"]
    for name, value in found["variables"].items():
        lines += _row(name, value, 36)
    if not found["variables"]:
        lines += _row("none", "", 36)
    said = {
        "unset": f"{PREFIX} is unset: only install() patches; below is what it would do",
        "off": f"{PREFIX} is off: nothing is patched; below is what would be",
        "invalid": f"{PREFIX} is not valid: nothing is patched; below is what would be",
    }.get(found["switch"], "")
    lines += _fold(said, 2)
    lines += ["", f"settings{' (strict)' if found['strict'] else ''}"]
    for name, setting in found["settings"].items():
        lines += _row(name, f"{setting['value']}  ({setting['from']})", 36)
    lines += _row("features", ", ".join(found["features"]) or "none", 36)

    for name, framework in found["frameworks"].items():
        lines += ["", *_framework_text(name, framework)]
    lines += ["", "problems" if found["problems"] else "no problems"]
    for problem in found["problems"]:
        lines += _fold(problem, 2)
    return "\n".join(lines)


def _package_text(package: Mapping[str, Any]) -> str:
    text = package["version"] or "not installed"
    if package.get("c_extension") is not None:
        text += ", C extension" if package["c_extension"] else ", pure Python (slower calls)"
    if package.get("import_error"):
        text += f", cannot be imported: {package['import_error']}"
    return str(text)


def _framework_text(name: str, framework: Mapping[str, Any]) -> Iterator[str]:
    tested = {True: ", tested", False: ", not tested", None: ""}[framework["tested"]]
    version = framework["version"] or "not installed"
    state = _SHOWN.get(framework["state"], framework["state"])
    yield f"{name} {version}{tested}" + ("" if framework["version"] is None else f": {state}")
    yield from _fold(framework["reason"], 2)
    for feature in FEATURES:
        seams = [seam for seam in framework["seams"] if seam["feature"] == feature]
        if seams:
            yield f"  {feature}"
        for seam in seams:
            module, _, attribute = seam["target"].partition(":")
            yield f"    {_SHOWN.get(seam['state'], seam['state']):<8} {attribute}"
            yield from _fold(f"in {module}", 13)
            yield from _fold(seam["reason"], 13)


def _row(label: str, text: str, width: int = 20) -> list[str]:
    if not text:
        return [f"  {label}"] if label else []
    first, *rest = _fold(text, width + 2)
    return [f"  {label:<{width}}{first.strip()}", *rest]


def _fold(text: str, indent: int) -> list[str]:
    import textwrap

    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
