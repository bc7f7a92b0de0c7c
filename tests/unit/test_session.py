"""``install()``, ``uninstall()`` and ``status()`` on a toy framework of a third party."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest

import precision_shim
from precision_shim import PrecisionShimWarning, SeamError, SettingsError
from precision_shim.process import session as _session
from precision_shim.process.settings import FEATURES, TABLE

FRAMEWORK = {
    "toyfw/__init__.py": "",
    "toyfw/ops.py": """
def scale(value):
    return 2 * value


class Optimizer:
    def __init__(self):
        self.built = True
""",
    "toyfw/trainer.py": "from toyfw.ops import scale\n\n\ndef train():\n    return scale(3)\n",
    "toyfw_adapter.py": """
from precision_shim.adapting import Adapter, collect, current_settings, decide, seam


@seam("toyfw.ops:scale", "dtype-coercion", why="a test", aliases=("toyfw.trainer:scale",))
def negate(call):
    decide("toyfw", "actor", "dtype-coercion", "negated", current_settings()["grad_bucket"])
    return -call.proceed()


@seam("toyfw.ops:Optimizer.__init__", "bf16-dispatch", why="a test")
def watch(call):
    return call.proceed()


ADAPTER = Adapter(
    framework="toyfw",
    distribution="toyfw",
    packages=("toyfw",),
    tested=("1.0",),
    effects=("toyfw.ops:Optimizer.__init__",),
    seams=collect(negate, watch),
)
""",
    "toyfw-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toyfw\nVersion: 1.0\n",
    "toyfw_adapter-1.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: toyfw-adapter\nVersion: 1.0\n"
    ),
    "toyfw_adapter-1.0.dist-info/entry_points.txt": (
        "[precision_shim.adapters]\ntoyfw = toyfw_adapter:ADAPTER\n"
    ),
}


@pytest.fixture
def toyfw(write_modules):
    """A toy framework with an adapter; afterwards ``sys.meta_path`` must be as it was before."""
    before = list(sys.meta_path)
    root = write_modules(FRAMEWORK)
    yield root
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionShimWarning)
        precision_shim.uninstall()
    assert sys.meta_path == before


def install(**options):
    return precision_shim.install(frameworks=["toyfw"], **options)


def ops():
    import toyfw.ops

    return toyfw.ops


def exported():
    return {k: v for k, v in os.environ.items() if k.startswith("PRECISION_SHIM")}


# -- importing ------------------------------------------------------------------------------------


def fresh(code, **environ):
    """Run code in a fresh interpreter and return what it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_import_loads_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import precision_shim\n"
        "import json; print(json.dumps(sorted(set(sys.modules) - before - {'json'})))"
    )
    code = code.replace("import json; ", "after = set(sys.modules); import json; ")
    code = code.replace("set(sys.modules) - before - {'json'}", "after - before")
    assert set(fresh(code)) <= {"precision_shim", "precision_shim._lazy"}


def test_installing_where_no_framework_is_imports_neither_torch_nor_an_adapter():
    code = (
        "import sys, json, precision_shim; precision_shim.install(); precision_shim.status()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    modules = fresh(code)
    for name in ("torch", "verl", "megatron", "precision_shim_adapters.verl.adapter", "ray"):
        assert name not in modules


def test_every_public_name_resolves_and_unknown_ones_do_not():
    for name in precision_shim.__all__:
        assert getattr(precision_shim, name) is not None
        assert name in dir(precision_shim)
    with pytest.raises(AttributeError, match="no attribute 'instal'"):
        precision_shim.instal  # noqa: B018


# -- install --------------------------------------------------------------------------------------


def test_what_was_built_before_is_told(toyfw, capsys):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert ops().scale(3) == 6
    with pytest.warns(PrecisionShimWarning, match=r"AdamW.*\) was built before install") as told:
        status = install()
    assert str(told[0].message) in status.notes
    assert "stay as they were built" in " ".join(str(status).split())
    precision_shim.uninstall()
    del optimizer


def test_other_threads_do_not_notice_an_install(toyfw):
    """A search of all objects would hand out the tuples that they are building."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert ops().scale(3) == 6
    errors, stop = [], threading.Event()

    def slow():
        for number in range(40):
            time.sleep(0)
            yield number

    def build_tuples():
        try:
            while not stop.is_set():
                tuple(slow())
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=build_tuples, daemon=True) for _ in range(2)]
    for one in threads:
        one.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionShimWarning)
        for number in range(1, 21):
            install(settings={"growth_interval": number, "log": "quiet"})
    stop.set()
    for one in threads:
        one.join(60)
    assert errors == []
    del optimizer


def test_an_adapter_may_wait_for_an_import_that_waits_for_another_adapter(toyfw, write_modules):
    """One thread installs; another imports a framework, whose code imports a second one."""
    write_modules(
        {
            "slowfw/__init__.py": """
import threading

started, go_on = threading.Event(), threading.Event()
started.set()
assert go_on.wait(60)
import toyfw.ops
""",
            "slowfw_adapter.py": """
import sys

sys.modules["slowfw"].go_on.set()
import slowfw
from toyfw_adapter import ADAPTER as toys

ADAPTER = toys.replace(framework="slowfw", distribution="slowfw", packages=("slowfw",), seams=())
""",
            "slowfw-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: slowfw\nVersion: 1.0\n",
            "slowfw-1.0.dist-info/entry_points.txt": (
                "[precision_shim.adapters]\nslowfw = slowfw_adapter:ADAPTER\n"
            ),
        }
    )
    code = f"""
import json, os, sys, threading, time
sys.path.insert(0, {str(toyfw)!r})
import precision_shim

def install():
    precision_shim.install(frameworks=["slowfw", "toyfw"], export=False)

threads = [threading.Thread(target=one, daemon=True) for one in (
    lambda: __import__("slowfw"), install)]
threads[0].start()
while not hasattr(sys.modules.get("slowfw"), "started"):
    time.sleep(0.001)
threads[1].start()
for one in threads:
    one.join(20)
stuck = any(one.is_alive() for one in threads)
states = None if stuck else [
    precision_shim.status().frameworks[name].state for name in ("slowfw", "toyfw")]
print(json.dumps([stuck, states]), flush=True)
os._exit(0)
"""
    assert fresh(code) == [False, ["absent", "wrapped"]]


def test_a_relative_directory_is_the_same_in_a_child_that_starts_elsewhere(tmp_path):
    code = """
import json, os, subprocess, sys, precision_shim
before = os.environ["PRECISION_SHIM_AUDIT_DIR"]
child = "import precision_shim; print(precision_shim.install().settings['audit_dir'])"
ours = precision_shim.install().settings["audit_dir"]
os.chdir("elsewhere")
theirs = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
again = precision_shim.install(settings={"growth_interval": 7}).settings["audit_dir"]
precision_shim.uninstall()
after = os.environ["PRECISION_SHIM_AUDIT_DIR"]
print(json.dumps([ours, theirs.stdout.strip(), again, after == before]))
"""
    (tmp_path / "elsewhere").mkdir()
    code = f"import os; os.chdir({str(tmp_path)!r})\n{code}"
    audits = str(tmp_path / "audits")
    found = fresh(code, PRECISION_SHIM_AUDIT_DIR="audits")
    assert found == [audits, audits, audits, True]


def test_installing_twice_is_one_installation(toyfw):
    install()
    scale = ops().scale
    finders = list(sys.meta_path)
    install()
    precision_shim.install()
    assert ops().scale is scale
    assert sys.meta_path == finders
    precision_shim.uninstall()
    assert ops().scale(3) == 6


def test_other_arguments_replace_what_the_first_asked_for(toyfw):
    install(features=["dtype-coercion"], settings={"grad_bucket": "align", "log": "quiet"})
    assert ops().scale(3) == -6
    status = install(features=["bf16-dispatch"], settings={"log": "quiet"})
    assert ops().scale(3) == 6
    assert status.features == ("bf16-dispatch",)
    assert status.settings["grad_bucket"] == "unless-set"


def test_a_second_install_does_not_inherit_what_the_first_exported(toyfw):
    install(features=["bf16-dispatch"], settings={"log": "quiet"})
    status = install(settings={"grad_bucket": "align"})
    assert status.features == FEATURES
    assert status.settings["log"] == "info"
    assert exported() == {
        "PRECISION_SHIM": "1",
        "PRECISION_SHIM_FRAMEWORKS": "toyfw",
        "PRECISION_SHIM_GRAD_BUCKET": "align",
    }


def test_giving_a_default_by_name_is_another_request(toyfw):
    install()
    assert not _session.current_settings().is_set("growth_interval")
    install(settings={"growth_interval": 400})
    assert _session.current_settings().is_set("growth_interval")


def test_a_bad_second_install_leaves_the_first(toyfw):
    install(settings={"log": "quiet"})
    before = exported()
    with pytest.raises(SettingsError):
        install(settings={"grad_bucket": "never"})
    assert ops().scale(3) == -6
    assert exported() == before


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("optimizer_states", "optimizer_states is a setting: install(settings={'optimizer_st"),
        ("optimiser_states", "optimizer_states is a setting: install(settings={'optimizer_st"),
        ("feature", "Did you mean features?"),
        ("nothing", "Correct the name or leave it out."),
    ],
)
def test_an_unknown_argument_is_an_error_that_names_the_known(toyfw, name, how):
    with pytest.raises(SettingsError) as caught:
        precision_shim.install(**{name: "follow-model"})
    told = f"install(): unknown argument {name!r}; allowed: features, frameworks, settings, strict"
    assert str(caught.value).startswith(f"{told}, export. {how}")
    assert precision_shim.status().enabled is False


def test_an_unknown_framework_is_an_error_that_names_the_known(toyfw):
    with pytest.raises(SettingsError, match=r"'openrlhf'.*toyfw, verl"):
        precision_shim.install(frameworks=["openrlhf"])
    assert precision_shim.status().enabled is False


@pytest.mark.parametrize("value", ["0", "false", " OFF "])
def test_the_operators_kill_switch_wins_over_arguments(toyfw, monkeypatch, capsys, value):
    monkeypatch.setenv("PRECISION_SHIM", value)
    status = install(strict=True)
    assert ops().scale(3) == 6
    assert status.enabled is False
    assert "PRECISION_SHIM" in str(status)
    assert "does nothing" in capsys.readouterr().err
    assert exported() == {"PRECISION_SHIM": value}


def test_features_that_are_off_leave_their_seams_untouched(toyfw):
    original = ops().scale
    status = install(features="-dtype-coercion")
    assert ops().scale is original
    seams = {seam.feature: seam.state for seam in status.frameworks["toyfw"].seams}
    assert seams == {"dtype-coercion": "off", "bf16-dispatch": "wrapped"}


def test_many_threads_install_uninstall_and_import_at_once(toyfw):
    barrier = threading.Barrier(8)
    errors = []

    def work(number):
        barrier.wait()
        try:
            for _ in range(5):
                install()
                assert ops().scale(3) in (6, -6)
                if number % 2:
                    precision_shim.uninstall()
                precision_shim.status().to_dict()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not any(one.is_alive() for one in threads), "deadlock"
    assert errors == []
    install()
    assert ops().scale(3) == -6
    precision_shim.uninstall()
    assert ops().scale(3) == 6


# -- a process without stderr ---------------------------------------------------------------------


@contextlib.contextmanager
def no_stderr(kind, monkeypatch):
    """Set a stderr that accepts no line, within the test, because pytest sets its own before."""
    with open("/dev/full" if kind == "full" else os.devnull, "w", encoding="utf-8") as stream:
        if kind == "closed":
            stream.close()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", None if kind == "none" else stream)
            yield
        with contextlib.suppress(OSError):
            stream.close()


STREAMS = ["closed", "none"] + ["full"] * os.path.exists("/dev/full")


@pytest.mark.parametrize("kind", STREAMS)
def test_what_is_decided_without_stderr_is_kept_and_said_nowhere(toyfw, kind, monkeypatch, capsys):
    install()
    with no_stderr(kind, monkeypatch):
        assert ops().scale(3) == -6
    assert [one.chosen for one in precision_shim.status().decisions] == ["negated"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("without", ["sys.stderr.close()", "sys.stderr = None"])
def test_a_warning_without_stderr_ends_nothing(without):
    code = f"""
import json, sys, warnings
from precision_shim import adapting
warnings.simplefilter("always")
{without}
adapting.warn("a test")
print(json.dumps("went on"))
"""
    assert fresh(code) == "went on"


# -- the environment ------------------------------------------------------------------------------


def test_what_was_asked_is_exported_and_taken_back(toyfw, monkeypatch):
    monkeypatch.setenv("PRECISION_SHIM_LOG", "quiet")
    install(features=["dtype-coercion"], settings={"log": "debug", "growth_interval": 7})
    assert exported() == {
        "PRECISION_SHIM": "1",
        "PRECISION_SHIM_FEATURES": "dtype-coercion",
        "PRECISION_SHIM_FRAMEWORKS": "toyfw",
        "PRECISION_SHIM_LOG": "debug",
        "PRECISION_SHIM_GROWTH_INTERVAL": "7",
    }
    precision_shim.uninstall()
    assert exported() == {"PRECISION_SHIM_LOG": "quiet"}


def test_nothing_is_exported_if_not_asked(toyfw):
    install(settings={"log": "quiet"}, export=False)
    assert exported() == {}


def test_strict_is_never_exported(toyfw):
    install(strict=True)
    assert exported() == {"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "toyfw"}


def test_a_strict_variable_stays_what_it_is(toyfw, monkeypatch):
    monkeypatch.setenv("PRECISION_SHIM", "strict")
    assert install().settings["strict"] is True
    assert exported()["PRECISION_SHIM"] == "strict"


def test_a_variable_that_someone_set_since_is_theirs(toyfw):
    install(settings={"log": "quiet"})
    os.environ["PRECISION_SHIM_LOG"] = "debug"
    try:
        precision_shim.uninstall()
        assert exported() == {"PRECISION_SHIM_LOG": "debug"}
    finally:
        del os.environ["PRECISION_SHIM_LOG"]


# -- status ---------------------------------------------------------------------------------------


def test_to_dict_has_the_contracts_keys_and_is_ready_for_json(toyfw):
    install(settings={"log": "quiet"})
    ops().scale(3)
    found = json.loads(json.dumps(precision_shim.status().to_dict()))
    assert found["enabled"] is True
    assert found["features"] == list(FEATURES)
    assert set(found["settings"]) >= {*TABLE, "strict"}
    framework = found["frameworks"]["toyfw"]
    assert (framework["version"], framework["state"]) == ("1.0", "wrapped")
    assert framework["seams"][0] == {
        "target": "toyfw.ops:scale",
        "feature": "dtype-coercion",
        "state": "wrapped",
        "reason": "",
    }
    assert found["frameworks"]["verl"]["state"] == "off"
    assert found["decisions"] == [
        {
            "framework": "toyfw",
            "subject": "actor",
            "feature": "dtype-coercion",
            "chosen": "negated",
            "because": "unless-set",
        }
    ]


def test_a_framework_waits_then_is_patched(toyfw):
    assert install().frameworks["toyfw"].state == "pending"
    assert "toyfw_adapter" not in sys.modules
    assert ops()
    assert precision_shim.status().frameworks["toyfw"].state == "wrapped"


def test_a_framework_that_is_not_installed_is_absent(toyfw):
    import shutil

    shutil.rmtree(toyfw / "toyfw")
    shutil.rmtree(toyfw / "toyfw-1.0.dist-info")
    framework = install().frameworks["toyfw"]
    assert (framework.state, framework.version) == ("absent", None)


def test_an_untested_version_says_so(toyfw, write_modules):
    metadata = FRAMEWORK["toyfw-1.0.dist-info/METADATA"].replace("1.0", "7.3")
    write_modules({"toyfw-1.0.dist-info/METADATA": metadata})
    install()
    assert ops().scale(3) == -6
    framework = precision_shim.status().frameworks["toyfw"]
    assert (framework.state, framework.version) == ("wrapped", "7.3")
    assert "tested" in framework.reason
    assert "1.0" in framework.reason


def test_install_raises_for_a_variable_that_there_is_not(toyfw, monkeypatch):
    monkeypatch.setenv("PRECISION_SHIM_OPTIMISER_STATES", "auto")
    with pytest.raises(SettingsError, match="did you mean PRECISION_SHIM_OPTIMIZER_STATES"):
        install()
    assert ops().scale(3) == 6
    monkeypatch.setenv("PRECISION_SHIM", "0")  # nothing is asked for then
    assert not install().enabled


def test_a_feature_is_in_force_only_for_frameworks_that_are_asked_for(toyfw):
    install()
    assert _session.in_force("toyfw", "fp16-scaling", "")
    assert not _session.in_force("nemo-rl", "fp16-scaling", "dtensor v1")


def test_a_bare_checkout_has_an_unknown_version(toyfw):
    import shutil

    shutil.rmtree(toyfw / "toyfw-1.0.dist-info")
    install()
    assert ops().scale(3) == -6
    assert precision_shim.status().frameworks["toyfw"].version == "unknown"


def test_asking_for_status_wakes_nothing(toyfw):
    import shutil

    shutil.rmtree(toyfw / "toyfw-1.0.dist-info")  # the version must then be searched on sys.path
    install()
    str(precision_shim.status())
    assert "toyfw_adapter" not in sys.modules
    assert "toyfw" not in sys.modules


def test_a_decision_is_said_once_and_kept_once(toyfw, capsys):
    install()
    for _ in range(3):
        ops().scale(3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "negated" in line]
    assert len(lines) == 1
    assert lines[0].startswith("[precision_shim]")
    assert len(precision_shim.status().decisions) == 1


@pytest.mark.parametrize(
    ("log", "rank", "said"),
    [("info", "0", 1), ("info", "1", 0), ("quiet", "0", 0), ("debug", "1", 1)],
)
def test_decisions_are_said_on_rank_0_unless_asked_otherwise(
    toyfw, capsys, monkeypatch, log, rank, said
):
    monkeypatch.setenv("RANK", rank)
    install(settings={"log": log})
    ops().scale(3)
    assert capsys.readouterr().err.count("negated") == said
    assert len(precision_shim.status().decisions) == 1


# -- adapters of third parties, and their faults --------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "raise ZeroDivisionError('broken')\n",
        "OTHER = 1\n",
        "ADAPTER = 'a string'\n",
        "import nowhere\n",
    ],
    ids=["raises", "lacks it", "something else", "import error"],
)
def test_a_broken_adapter_is_refused_with_one_warning(toyfw, write_modules, source):
    write_modules({"toyfw_adapter.py": source})
    install()
    with pytest.warns(PrecisionShimWarning, match=r"toyfw.*toyfw_adapter:ADAPTER") as caught:
        assert ops().scale(3) == 6
    assert len(caught) == 1
    framework = precision_shim.status().frameworks["toyfw"]
    assert framework.state == "refused"
    assert "toyfw_adapter:ADAPTER" in framework.reason


@pytest.mark.parametrize("top_level", ["import toyfw.ops", "from toyfw import ops"])
@pytest.mark.parametrize("how", ["install", "start-up"])
def test_an_adapter_that_imports_its_framework_runs_it_once(toyfw, write_modules, how, top_level):
    adapter = FRAMEWORK["toyfw_adapter.py"]
    write_modules(
        {
            "toyfw/__init__.py": "import runs; runs.COUNT += 1; CONSTANT = 3\n",
            "runs.py": "COUNT = 0\n",
            "toyfw_adapter.py": f"{top_level}\n{adapter}",
        }
    )
    begin = {
        "install": "import precision_shim; precision_shim.install(frameworks=['toyfw'])",
        "start-up": "from precision_shim.process import startup; startup.init()",
    }
    environ = {"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "toyfw"}
    code = f"""
import sys, json; sys.path.insert(0, {str(toyfw)!r})
{begin[how]}
import toyfw, runs
import toyfw.ops
assert sys.modules["toyfw"] is toyfw and toyfw.ops is sys.modules["toyfw.ops"]
assert type(toyfw.__spec__.loader).__name__ == "SourceFileLoader", toyfw.__spec__
assert toyfw.__loader__ is toyfw.__spec__.loader
assert not toyfw.__spec__._initializing
print(json.dumps([runs.COUNT, toyfw.CONSTANT, toyfw.ops.scale(3)]))
"""
    assert fresh(code, **environ) == [1, 3, -6]


def test_a_warning_filter_of_error_does_not_break_the_frameworks_import(
    toyfw, write_modules, capsys
):
    write_modules({"toyfw/ops.py": "class Optimizer:\n    def __init__(self):\n        pass\n"})
    install()
    assert ops().Optimizer()  # in this test run a warning would be an error
    assert "toyfw.ops:scale" in capsys.readouterr().err
    assert precision_shim.status().frameworks["toyfw"].state == "wrapped"


def test_strict_raises_a_broken_adapters_fault_where_megatron_builds_something(
    toyfw, write_modules
):
    write_modules(
        {
            "toyfw_adapter.py": "raise ZeroDivisionError('broken')\n",
            "megatron/core/optimizer/optimizer_config.py": (
                "class OptimizerConfig:\n    def __post_init__(self):\n        self.built = True\n"
            ),
        }
    )
    install(strict=True)
    with pytest.warns(PrecisionShimWarning):
        assert ops().Optimizer().built
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    with pytest.raises(SeamError, match="toyfw_adapter:ADAPTER"):
        OptimizerConfig().__post_init__()
    precision_shim.uninstall()
    OptimizerConfig().__post_init__()


UNREAD = (
    r"toyfw 1.0: PRECISION_SHIM_HEAD=fp32 has no effect, because the shim has no rollout-agreement "
    r"for it. Unset PRECISION_SHIM_HEAD."
)


def test_a_setting_that_the_framework_has_no_feature_for(toyfw):
    install(settings={"head": "fp32"}, features="rollout-agreement,dtype-coercion")
    with pytest.warns(PrecisionShimWarning, match=UNREAD):
        scale = ops().scale
    assert scale(3) == -6
    precision_shim.uninstall()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install(settings={"head": "as-configured", "rollout": "tell"})


def test_a_setting_whose_feature_is_off(toyfw):
    off = "toyfw 1.0: PRECISION_SHIM_HEAD=fp32 has no effect"
    install(settings={"head": "fp32"}, features="dtype-coercion")
    with pytest.warns(PrecisionShimWarning, match=off):
        scale = ops().scale
    assert scale(3) == -6


def test_strict_raises_where_a_setting_has_no_effect(toyfw):
    install(settings={"head": "fp32"}, strict=True)
    with pytest.warns(PrecisionShimWarning, match=UNREAD):
        scale = ops().scale
    assert scale(3) == -6
    with pytest.raises(SettingsError, match=UNREAD):
        ops().Optimizer()


def test_our_own_adapters_cannot_be_displaced(toyfw, write_modules):
    entry = "[precision_shim.adapters]\nverl = toyfw_adapter:ADAPTER\n"
    write_modules({"toyfw_adapter-1.0.dist-info/entry_points.txt": entry})
    from precision_shim.process.registry import entries

    assert entries()["verl"].place == "precision_shim_adapters.verl.adapter:SEAMS"


@pytest.fixture
def lacking(toyfw, write_modules):
    """The toy framework without the symbol that one of its two features needs."""
    source = FRAMEWORK["toyfw/ops.py"].replace("def scale", "def rescale")
    write_modules({"toyfw/ops.py": source})


@pytest.mark.usefixtures("lacking")
def test_a_refusal_is_a_warning_and_the_framework_runs():
    install()
    with pytest.warns(PrecisionShimWarning, match=r"toyfw 1\.0.*toyfw\.ops:scale") as caught:
        assert ops().Optimizer().built
    assert len(caught) == 1


@pytest.mark.usefixtures("lacking")
def test_strict_raises_where_the_optimizer_is_built():
    install(strict=True)
    with pytest.warns(PrecisionShimWarning):
        assert ops()
    with pytest.raises(SeamError, match=r"toyfw\.ops:scale"):
        ops().Optimizer()
    precision_shim.uninstall()
    assert ops().Optimizer().built


@pytest.mark.usefixtures("lacking")
def test_strict_raises_at_once_where_the_framework_is_imported_already():
    assert ops()
    with pytest.warns(PrecisionShimWarning), pytest.raises(SeamError, match=r"toyfw\.ops:scale"):
        install(strict=True)


def test_uninstall_reports_another_tools_wrapper_and_goes_through(toyfw, capsys):
    install(settings={"log": "quiet"})
    ours = ops().scale
    ops().scale = foreign = lambda value: ("theirs", ours(value))
    precision_shim.uninstall()  # in this test run a warning would be an error
    assert ops().scale is foreign
    assert foreign(3) == ("theirs", 6)
    assert "toyfw.ops:scale" in capsys.readouterr().err
    assert "toyfw.ops:scale" in str(precision_shim.status())
    assert exported() == {}
