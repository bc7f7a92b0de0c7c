"""Reload, threads, other processes, and where and when strict mode raises errors."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import sys
import threading

import pytest

from precision_shim.errors import SeamError

from ...processes.commands import python

cloudpickle = pytest.importorskip("cloudpickle")

OPS = "toy.ops:scale"
ADD = "toy.ops:Box.add"


# -- a module's code runs again -------------------------------------------------------------------


def test_a_reloaded_module_is_patched_again(lab):
    engine = lab.install(lab.seam(OPS), lab.seam(ADD))
    ops = importlib.reload(lab.ops)
    assert ops.scale(3) == -6
    assert ops.Box(1).add(1) == -2
    assert lab.states(engine) == ["wrapped", "wrapped"]


def test_uninstall_after_a_reload_leaves_the_new_code(lab):
    engine = lab.install(lab.seam(OPS), lab.seam(ADD))
    users = lab.load("toy.users")
    old = lab.ops.Box
    ops = importlib.reload(lab.ops)
    assert engine.remove() == []
    assert type(ops.scale).__name__ == "function"
    assert ops.Box(1).add(1) == old(1).add(1) == 2
    assert type(vars(old)["add"]).__name__ == type(vars(ops.Box)["add"]).__name__ == "function"
    assert type(users.scale).__name__ == "function"


def test_a_module_imported_anew_is_patched_too(lab):
    engine = lab.install(lab.seam(OPS))
    first = lab.ops
    del sys.modules["toy.ops"]
    second = lab.ops
    assert first is not second
    assert first.scale(3) == second.scale(3) == -6
    assert engine.remove() == []
    assert first.scale(3) == second.scale(3) == 6


def test_a_module_that_fails_at_import_and_then_succeeds_is_patched(lab):
    lab.write({"toy/flaky.py": "import toy\n\n\ndef f():\n    return 1\n\n\ntoy.READY\n"})
    engine = lab.install(lab.seam("toy.flaky:f"), lab.seam(OPS))
    with pytest.raises(AttributeError):
        lab.load("toy.flaky")
    assert lab.states(engine) == ["pending", "pending"]
    lab.load("toy").READY = True
    assert lab.load("toy.flaky").f() == -1
    assert lab.ops.scale(3) == -6
    assert lab.states(engine) == ["wrapped", "wrapped"]


def test_modules_that_import_each_other_are_both_patched(lab):
    lab.write(
        {
            "toy/left.py": "from toy import right\n\n\ndef f():\n    return 1\n",
            "toy/right.py": "import toy.left\n\n\ndef g():\n    return 2\n",
        }
    )
    engine = lab.install(lab.seam("toy.left:f"), lab.seam("toy.right:g"))
    assert lab.load("toy.left").f() == -1
    assert lab.load("toy.right").g() == -2
    assert lab.states(engine) == ["wrapped", "wrapped"]


def test_an_adapter_added_while_another_patches_is_taken_on(lab):
    # A probe or a replacement may import another framework, whose adapter is then added.
    engine = lab.engine()
    lab.load("toy_wrappers").wake = lambda: engine.add(
        lab.adapter(lab.seam("toy.ops:shift"), framework="two")
    )
    lab.write(
        {
            "toy_nested.py": "import toy_wrappers\n\n\n"
            "def probe(symbol, settings):\n    toy_wrappers.wake()\n"
        }
    )
    engine.add(lab.adapter(lab.seam(OPS, native="toy_nested:probe"), framework="one"))
    assert lab.ops.scale(3) == -6
    assert lab.ops.shift(3) == -4


def test_an_engine_that_was_removed_takes_nothing_on(lab):
    engine = lab.engine()
    engine.remove()
    before = list(sys.meta_path)
    engine.add(lab.adapter(lab.seam(OPS)))
    assert lab.ops.scale(3) == 6
    assert sys.meta_path == before


# -- threads --------------------------------------------------------------------------------------


def together(*jobs):
    """Run jobs in threads that start at once; raise an error that one of them raised."""
    barrier = threading.Barrier(len(jobs))
    errors = []

    def run(job):
        barrier.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not any(one.is_alive() for one in threads), "deadlock"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("attempt", range(5))
def test_many_threads_import_and_install_at_once(lab, attempt):
    names = [f"toy.part{number}" for number in range(8)]
    lab.write(
        {
            f"{name.replace('.', '/')}.py": f"from toy import ops\nimport time\n"
            f"time.sleep(0.001 * {attempt})\n\n\ndef f():\n    return {number}\n"
            for number, name in enumerate(names)
        }
    )
    engine = lab.engine()
    adapters = [
        lab.adapter(lab.seam(OPS), *(lab.seam(f"{name}:f") for name in names), framework=framework)
        for framework in ("one", "two")
    ]
    together(
        *(lambda name=name: lab.load(name) for name in names),
        *(lambda adapter=adapter: engine.add(adapter) for adapter in adapters * 2),
    )
    engine.catch_up()
    assert lab.ops.scale(3) == -6
    assert [lab.load(name).f() for name in names] == [-number for number in range(8)]
    assert engine.remove() == []
    assert [lab.load(name).f() for name in names] == list(range(8))


def test_a_module_whose_import_was_under_way_is_patched_when_it_is_there(lab):
    lab.write(
        {
            "toy/slow.py": "import toy\ntoy.began.set()\ntoy.go_on.wait(60)\n\n\n"
            "def f():\n    return 1\n"
        }
    )
    toy = lab.load("toy")
    toy.began, toy.go_on = threading.Event(), threading.Event()
    importing = threading.Thread(target=lab.load, args=("toy.slow",), daemon=True)
    importing.start()
    assert toy.began.wait(60)
    engine = lab.install(lab.seam("toy.slow:f"))
    assert lab.states(engine) == ["pending"]
    threading.Timer(0.05, toy.go_on.set).start()
    engine.catch_up()
    assert lab.load("toy.slow").f() == -1
    assert lab.states(engine) == ["wrapped"]
    importing.join(60)


def test_catching_up_within_the_modules_own_import_does_not_wait_for_itself(lab):
    lab.write(
        {
            "toy/selfish.py": "import toy\ntoy.engine.add(toy.adapter)\ntoy.engine.catch_up()\n\n\n"
            "def f():\n    return 1\n"
        }
    )
    toy = lab.load("toy")
    toy.engine, toy.adapter = lab.engine(), lab.adapter(lab.seam("toy.selfish:f"))
    assert lab.load("toy.selfish").f() == 1
    toy.engine.catch_up()
    assert lab.load("toy.selfish").f() == -1


# -- other processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_wrapped_symbols_survive_a_round_trip(lab, dumps):
    lab.install(
        *(lab.seam(f"toy.ops:{name}") for name in ("scale", "Box.add", "Box.double")),
        lab.seam("toy.ops:Box.make", "toy_wrappers:note", unbound=True),
    )
    ops = lab.ops

    def trip(value):
        return pickle.loads(dumps(value))

    assert trip(ops.scale) is ops.scale
    assert trip([ops.scale, ops.scale]) == [ops.scale, ops.scale]
    assert trip(ops.Box) is ops.Box
    assert trip(ops.Box(5).add)(1) == -6
    assert trip(ops.Box(7)).value == 7
    assert trip(ops.Box.add)(ops.Box(5), 1) == -6
    assert trip(ops.Box.double)(4) == -8
    assert trip(ops.Box.make)(2).value == 2


def test_a_wrapped_method_is_still_listed_as_a_method(lab):
    """Ray offers only those methods of an actor class that count as functions."""
    lab.install(*(lab.seam(f"toy.ops:{name}") for name in ("Box.add", "Box.double")))
    box = lab.ops.Box

    class Crate(box):
        def add(self, other):
            return super().add(other) + 100

    for one in (box, Crate):
        listed = dict(inspect.getmembers(one, inspect.isfunction))
        assert {"add", "double"} <= set(listed)
    assert box.add is box.add
    assert inspect.ismethod(box(5).add)
    assert (box(5).add(1), box.add(box(5), 1)) == (-6, -6)
    assert (Crate(5).add(1), Crate.double(4), Crate(5).double(4)) == (94, -8, -8)


@pytest.mark.parametrize("beneath", [[], ["toy_wrappers:add_hundred"]], ids=["", "two layers"])
def test_a_method_called_through_a_class_knows_its_instance(lab, beneath):
    """Ray calls ``Class.method(instance, ...)``, for any class that inherits the method."""
    lab.install(*(lab.seam(ADD, wrapper) for wrapper in (*beneath, "toy_wrappers:note")))
    box = lab.ops.Box

    class Crate(box):
        pass

    class Barrel(box):
        pass

    calls = lab.load("toy_wrappers").CALLS
    for asked_first in (Crate, Barrel, box):
        assert asked_first.add is box.add
        for one in (Barrel(1), Crate(2), box(3)):
            del calls[:]
            method = asked_first.add
            assert method(one, 10) == one.value + 10 + 100 * len(beneath)
            assert calls == [(one, {"amount": 10})]


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_a_subclasss_classmethod_survives_a_round_trip(lab, dumps):
    lab.write({"toy/crates.py": "from toy.ops import Box\n\n\nclass Crate(Box):\n    pass\n"})
    lab.install(lab.seam("toy.ops:Box.make", "toy_wrappers:note", unbound=True))
    crate = lab.load("toy.crates").Crate
    assert type(pickle.loads(dumps(crate.make))(1)) is crate
    assert type(pickle.loads(dumps(crate(1).make))(1)) is crate


CHILD = """
import json, pickle, sys
sys.path.insert(0, sys.argv[1])
values = pickle.loads(bytes.fromhex(sys.argv[2]))
import toy.ops
print(json.dumps([values[0](3), values[1](1), type(toy.ops.scale).__name__]))
"""


def test_another_process_sees_nothing_unless_it_is_patched_itself(lab, write_modules):
    root = write_modules({})
    lab.install(lab.seam(OPS), lab.seam(ADD))
    sent = pickle.dumps([lab.ops.scale, lab.ops.Box(5).add]).hex()
    done = python("-W", "error", "-c", CHILD, root, sent)
    assert json.loads(done.stdout) == [6, 6, "function"]


# -- strict ---------------------------------------------------------------------------------------

EFFECT = "toy.ops:Box.__init__"


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_strict_raises_where_a_feature_takes_effect_and_not_at_import(lab, late):
    if late:
        assert lab.ops
    engine = lab.install(
        lab.seam("toy.users:gone"), lab.seam(OPS), strict=True, effects=[EFFECT, "toy.ops:nothing"]
    )
    ops = lab.ops
    assert lab.load("toy.users").use(3) == 6
    with pytest.raises(SeamError, match=r"toy\.users:gone"):
        ops.Box(1)
    assert not issubclass(SeamError, ImportError)
    engine.remove()
    assert ops.Box(1).value == 1


def test_strict_raises_a_fault_that_comes_after_the_effects_module(lab):
    lab.install(lab.seam("toy.users:gone"), strict=True, effects=[EFFECT])
    assert lab.ops.Box(1).value == 1  # no target of the framework is imported yet
    assert lab.load("toy.users")
    with pytest.raises(SeamError):
        lab.ops.Box(1)


def test_one_frameworks_fault_does_not_stop_another(lab):
    engine = lab.install(
        lab.seam("toy.ops:gone"), framework="one", strict=True, effects=["toy.ops:shift"]
    )
    engine.add(lab.adapter(lab.seam(OPS), framework="two", effects=["toy.ops:Box.__init__"]))
    assert lab.ops.Box(1).value == 1
    with pytest.raises(SeamError):
        lab.ops.shift(1)
