"""Whether a framework's probes, the assumptions of our rules, hold on the installed version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_DROPPED = "'--use-precision-aware-optimizer only supported with distributed optimizer'"


def hold(framework: str) -> None:
    """Each probe that can run here holds, takes a moment, and fails on a planted change.

    Args:
        framework: as users write it.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.planted", framework],
        cwd=ROOT,
        env={**os.environ, "PRECISION_SHIM": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes, planted = map(json.loads, done.stdout.splitlines()[-2:])
    wrong = [one for one in outcomes if one["state"] not in ("holds", "absent")]
    assert not wrong
    assert sum(one["state"] == "holds" for one in outcomes) > len(outcomes) / 2
    # Limit the sum of the times, because a pause of the machine may delay a single probe.
    assert sum(one["seconds"] for one in outcomes) < len(outcomes)
    # A probe without a plant in tests/planted.py would hold here too.
    unmoved = [one for one in planted.values() if one["state"] != "fails"]
    assert not unmoved


def hold_on_a_changed_megatron(folder: Path) -> None:
    """Megatron-LM main drops an assertion but keeps its words: one probe fails and names it.

    Args:
        folder: an empty folder for the changed copy of the installed source.
    """
    import importlib.util

    module = "megatron.core.optimizer.optimizer_config"
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(_DROPPED) == 1
    begin = source.rindex("            assert (", 0, source.index(_DROPPED))
    end = source.index("\n", source.index(_DROPPED))
    changed = folder / "changed.py"
    changed.write_text(source[:begin] + source[end + 1 :], encoding="utf-8")
    compile(changed.read_text(encoding="utf-8"), str(changed), "exec")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ON_CHANGED, module, str(changed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    failed = done.stdout.splitlines()[-1]
    assert failed == "precision-aware optimizer needs the distributed optimizer: accepted"


_ON_CHANGED = """
import sys
from importlib.machinery import SourceFileLoader

name, path = sys.argv[1:]

class Changed:
    def find_spec(self, wanted, where=None, target=None):
        if wanted != name:
            return None
        from importlib.util import spec_from_file_location
        return spec_from_file_location(name, path)

sys.meta_path.insert(0, Changed())
from precision_shim.upstream.probes import probes_in, run
outcomes = [run(one) for one in probes_in("precision_shim_adapters.megatron.reading.probes")]
print("; ".join(f"{one.name}: {one.found}" for one in outcomes if one.state == "fails"))
"""
