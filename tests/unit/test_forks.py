"""A fork while the shim patches: the child answers, and has all patches or none.

Each case is a separate process, whose framework, adapter and patching are slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

PLACES = ["adapter", "slowfw.ops:scale", "between two seams"]
"""Where the patching is slow: in loading an adapter, inspecting its seams, between two patches."""

TIMES = 3
LIMIT = 60
"""Seconds within which a child must answer."""

FILES = {
    "slowfw/__init__.py": "",
    "slowfw/ops.py": "def scale(value):\n    return 2 * value\n",
    "slowfw/more.py": "def scale(value):\n    return 3 * value\n",
    "slowfw/late.py": """
import slow

slow.pause("code of slowfw.late")


def scale(value):
    return 5 * value
""",
    "slowfw_adapter.py": """
import slow
from precision_shim.adapting import Adapter, collect, seam

slow.pause("adapter")


def look(symbol, settings):
    slow.pause(symbol.target)


@seam("slowfw.ops:scale", "audit", why="a test", native=look)
@seam("slowfw.late:scale", "audit", why="a test")
def negate(call):
    return -call.proceed()


@seam("slowfw.more:scale", "audit", why="a test", replaces=True)
def replaced(scale):
    slow.pause("between two seams")
    return lambda value: -scale(value)


ADAPTER = Adapter(
    framework="slowfw",
    distribution="slowfw",
    packages=("slowfw",),
    tested=("1.0",),
    seams=collect(negate, replaced),
)
""",
    # A module that forks during its import, while another thread waits for that import.
    "forking.py": """
import time
import ours
import slowfw.late, slowfw.more, slowfw.ops

running = ours.in_thread(ours.install, "adapter")
time.sleep(0.1)
answer = ours.fork(ours.seen)
""",
    "slow.py": """
import threading

at, act, reached = "", None, threading.Event()


def pause(place):
    if place == at:
        act()
""",
    "slowfw-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: slowfw\nVersion: 1.0\n",
    "slowfw-1.0.dist-info/entry_points.txt": (
        "[precision_shim.adapters]\nslowfw = slowfw_adapter:ADAPTER\n"
    ),
}

BEGIN = f"""
import json, os, signal, sys, threading, time, traceback
import precision_shim, slow


def install():
    return precision_shim.install(frameworks=["slowfw"], export=False)


def seen():
    # What a process that was forked has: what it says, and what calls find.
    import slowfw.late, slowfw.more, slowfw.ops

    said = precision_shim.status()
    framework = said.frameworks.get("slowfw")
    called = [slowfw.ops.scale(1), slowfw.more.scale(1), slowfw.late.scale(1)]
    return [said.enabled, [one.state for one in framework.seams] if framework else [], called]


def child():
    try:
        before = seen()
        install()
        return [before, seen(), list(precision_shim.status().notes)]
    except BaseException:
        return traceback.format_exc()


def fork(do=child):
    # What a fork answers; None where it does not.
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm({LIMIT})
        os.write(writing, json.dumps(do()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return json.loads(told or "null")


def in_thread(do, place):
    # Begin something, and go on once it has come to a place.
    slow.reached.clear()
    slow.at = place
    running = threading.Thread(target=do, daemon=True)
    running.start()
    assert slow.reached.wait({LIMIT})
    return running


def take_time():
    slow.at = ""
    slow.reached.set()
    time.sleep(0.1)


slow.act = take_time
"""

NOTHING = [False, [], [2, 3, 5]]
ALL = [True, ["wrapped"] * 3, [-2, -3, -5]]


@pytest.fixture
def found(tmp_path):
    """Return a function that runs a script after ``BEGIN``; returns its last line as JSON."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(script: str, **variables: str):
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + script],
            env={**os.environ, "PYTHONPATH": path, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=4 * LIMIT,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


def forks_and_parent(found, script):
    """Fork several times while another thread patches; returns the state of fork and parent."""
    return found(f"""
answers = []
for _ in range({TIMES}):
{textwrap.indent(script, "    ")}
    answers.append(fork())
    running.join()
    answers.append([seen(), seen(), []])
    precision_shim.uninstall()
    for name in [one for one in sys.modules if one.startswith("slowfw")]:
        del sys.modules[name]
print(json.dumps(answers))
""")


@pytest.mark.parametrize("place", PLACES)
def test_while_another_thread_is_in_install(found, place):
    script = f"""
import slowfw.late, slowfw.more, slowfw.ops
running = in_thread(install, {place!r})
"""
    answers, said = forks_and_parent(found, script)
    assert answers == [[ALL, ALL, []]] * (2 * TIMES)
    assert said == ""


@pytest.mark.parametrize("place", PLACES[1:])
def test_while_another_thread_imports_what_is_patched(found, place):
    script = f"""
install()
running = in_thread(lambda: __import__("slowfw.more"), {place!r})
"""
    answers, said = forks_and_parent(found, script)
    assert answers == [[ALL, ALL, []]] * (2 * TIMES)
    assert said == ""


def test_while_another_thread_starts_automatically(found):
    """The other thread is at the framework's first import, which a child must not touch."""
    script = """
from precision_shim.process import startup
startup.init()
running = in_thread(lambda: __import__("slowfw.ops"), "adapter")
answer = fork(lambda: [precision_shim.status().enabled, install().enabled])
running.join()
print(json.dumps([answer, seen()]))
"""
    variables = {"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "slowfw"}
    assert found(script, **variables) == ([[True, True], ALL], "")


@pytest.mark.parametrize("before", ["", "install()"], ids=["installed later", "installed before"])
def test_while_another_thread_runs_the_code_of_what_is_patched(found, before):
    """The child can never import the module; its ``install()`` must not wait for the import."""
    script = f"""
{before}
running = in_thread(lambda: __import__("slowfw.late"), "code of slowfw.late")
answer = fork(lambda: install().enabled)
running.join()
install()
print(json.dumps([answer, seen()]))
"""
    assert found(script) == ([True, ALL], "")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("goes_on", [False, True])
def test_by_the_thread_that_installs(found, place, goes_on):
    """The child may never finish the patching under way, so it gets none of the patches."""
    script = f"""
import slowfw.late, slowfw.more, slowfw.ops


def there():
    answer = [None]

    def ask():  # other threads must get an answer, too
        answer[0] = seen()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join({LIMIT})
    said = precision_shim.status().notes
    try:
        installed = None if slow.in_adapter else install().enabled
    except Exception:
        installed = traceback.format_exc()
    return [answer[0], list(said), installed]


def act():
    slow.at = ""
    if {goes_on}:
        slow.writing = os.pipe()
        slow.child = os.fork()
    else:
        slow.answer = fork(there)


slow.in_adapter = {place!r} == "adapter" and not {goes_on}
slow.at, slow.act, slow.child = {place!r}, act, -1
said = install()
if not slow.child:
    signal.alarm({LIMIT})
    os.write(slow.writing[1], json.dumps([said.enabled, *there()]).encode())
    os._exit(0)
if {goes_on}:
    os.close(slow.writing[1])
    slow.answer = json.loads(open(slow.writing[0], "rb").read())
print(json.dumps([slow.answer, seen()]))
"""
    (answer, parent), said = found(script)
    assert parent == ALL
    if goes_on:
        assert answer.pop(0) is False
    there, notes, installed = answer
    assert there == NOTHING
    assert len(notes) == 1
    assert "forked while the shim was being installed" in notes[0]
    assert said == f"[precision_shim] {notes[0]}\n"
    assert installed is (None if place == "adapter" and not goes_on else True)


def test_what_would_wait_for_ever_ends(found):
    """The other thread waits for this thread's import, and this thread waits for the lock."""
    script = """
from precision_shim.process import forks

forks.PATIENCE = 0.5
sys.modules["ours"] = ours = type(sys)("ours")
ours.fork, ours.seen, ours.in_thread, ours.install = fork, seen, in_thread, install
slow.act = lambda: (slow.reached.set(), setattr(slow, "at", ""), __import__("forking"))
import forking
forking.running.join()
print(json.dumps([forking.answer, seen()]))
"""
    (answer, parent), said = found(script)
    assert parent == ALL
    assert answer == NOTHING
    assert "forked while the shim was being installed" in said


def test_nothing_is_left_to_act_after_uninstall(found):
    script = """
import slowfw.late, slowfw.more, slowfw.ops

install()
precision_shim.uninstall()
before = list(sys.meta_path), dict(os.environ)
answer = fork(lambda: [before == (list(sys.meta_path), dict(os.environ)), *seen()])
print(json.dumps(answer))
"""
    assert found(script) == ([True, *NOTHING], "")
