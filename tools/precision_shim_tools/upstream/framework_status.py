"""Predict the shim's effect on a framework by reading its source, even if it is not installed."""

from __future__ import annotations

from typing import Any

from precision_shim.errors import PrecisionShimError
from precision_shim.process.framework import Adapter
from precision_shim.process.in_force import asked_for
from precision_shim.process.registry import load
from precision_shim.process.settings import PREFIX, Settings
from precision_shim.process.symbols import judge_version
from precision_shim.process.versions import Versions
from precision_shim.reporting.record import FrameworkStatus, SeamStatus

from ..predicted import predict_seams

__all__ = ["as_dict", "inapplicable", "predict_status"]


def inapplicable(name: str, seam: SeamStatus) -> str:
    """Return a message about a refused seam, whose feature cannot be applied."""
    where = f" ({seam.path})" if seam.path else ""
    return f"{name}: {seam.feature}{where} cannot be applied: {seam.reason}"


def as_dict(status: FrameworkStatus) -> dict[str, Any]:
    """Return a framework's status as dicts, lists and strings, for JSON."""
    return {**status.to_dict(), "tested": status.tested}


def predict_status(
    entry: Adapter, settings: Settings, versions: Versions
) -> tuple[FrameworkStatus, list[str]]:
    """Predict a framework's status from the current ``Source``; also return messages on problems.

    ``versions`` returns a distribution's version in the ``Source``, as ``versions.version_of`` does
    for the installed packages.
    """
    name, version = entry.framework, versions(entry.distribution, entry.packages)
    asked_by_name = settings.frameworks is not None and asked_for(settings, name)
    if not asked_for(settings, name):
        return FrameworkStatus(version, "off", reason="not among the frameworks asked for"), []
    if version is None:
        problem = f"{PREFIX}_FRAMEWORKS names {name}, which is not installed here"
        return FrameworkStatus(None, "absent"), [problem] if asked_by_name else []
    try:
        adapter = load(entry)
        seams = predict_seams(adapter, settings, versions)
    except PrecisionShimError as error:
        return FrameworkStatus(version, "refused", reason=str(error)), [str(error)]
    tested, reason = judge_version(adapter, version, versions, closely=True)
    # Skip each seam that has a ``refusal``: it only reports why a feature is impossible.
    broken: dict[tuple[str, str], SeamStatus] = {}
    for seam in seams:
        if seam.state == "refused" and not seam.refusal:
            place = seam.feature, seam.group
            if seam.target in seam.reason:  # the group of seams is refused because of this seam
                broken[place] = seam
            broken.setdefault(place, seam)
    problems = [inapplicable(f"{name} {version}", seam) for seam in broken.values()]
    states = {seam.state for seam in seams}
    order = ("refused", "pending", "native", "off") if broken else ("pending", "native", "off")
    state = next((state for state in order if state in states), "absent")
    return FrameworkStatus(version, state, seams, reason, tested), problems
