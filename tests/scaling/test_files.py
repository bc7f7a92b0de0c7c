"""The scaler's file is whole or absent, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from precision_shim.errors import ScalerCheckpointError
from precision_shim.scaling import FILE_NAME, LossScaler, ScalerSettings, load, save

from ..processes.rank_server import rank_server


def scaler(**settings):
    return LossScaler(ScalerSettings(**settings), device="cpu")


def restored(directory):
    target = scaler(init_scale=1.5)
    assert load(directory, target) is not None
    return target.get_scale()


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """Return a function that executes code in its own process and returns its error, if any.

    If ``dies`` is a signal, it must end the process.
    """
    folder = tmp_path_factory.mktemp("children")
    with rank_server("tests.scaling.saving", folder) as processes:

        def run(code, *arguments, dies=None):
            told = processes(code, world=1, dies=dies, arguments=[*map(str, arguments)])
            return "" if dies else told[0]

        yield run


def test_a_round_trip_and_nothing_else_in_the_directory(tmp_path):
    path = save(tmp_path / "step_1" / "actor", scaler(init_scale=64.0))
    assert [one.name for one in path.parent.iterdir()] == [FILE_NAME]
    assert restored(path.parent) == 64.0
    assert b"\x80" not in path.read_bytes()  # JSON, no pickle
    json.loads(path.read_text(encoding="utf-8"))


def test_it_is_readable_as_the_umask_says(tmp_path):
    """Other accounts read checkpoints; a library's temporary file would be unreadable for them."""
    before = os.umask(0o022)
    try:
        path = save(tmp_path, scaler())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_missing_file_is_no_error(tmp_path):
    assert load(tmp_path, scaler()) is None
    assert load(tmp_path / "nowhere", scaler()) is None


def test_every_truncation_is_refused(tmp_path):
    path = save(tmp_path, scaler())
    whole = path.read_bytes()
    for length in range(len(whole) - 2):  # the last two bytes are a brace and the line's end
        path.write_bytes(whole[:length])
        with pytest.raises(ScalerCheckpointError, match=FILE_NAME):
            load(tmp_path, scaler())


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    path = save(tmp_path, scaler(init_scale=1024.0, growth_interval=7))
    whole = path.read_bytes()
    harmless = 0
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            target = scaler(init_scale=3.0)
            try:
                load(tmp_path, target)
            except ScalerCheckpointError:
                assert target.get_scale() == 3.0
            else:  # a space between two values became another white space
                harmless += 1
                assert (target.get_scale(), target.get_growth_interval()) == (1024.0, 7)
    assert harmless < len(whole) / 4


# The points of a save, named by the call at which the process is killed.
POINTS = {
    "before the temporary file": ("Path.open", "before"),
    "after it was made": ("Path.open", "after"),
    "before it is flushed to the disk": ("os.fsync", "before"),
    "after it was flushed": ("os.fsync", "after"),
    "before it gets its name": ("Path.replace", "before"),
    "after it got its name": ("Path.replace", "after"),
}

KILL = """
from pathlib import Path
place, owner, name, when = arguments
owner = {"Path": Path, "os": os}[owner]
called = getattr(owner, name)
def killed(*args, **kwargs):
    if when == "after":
        called(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, killed)
checkpoint.save(place, scaler)
"""


@pytest.mark.parametrize(
    ("point", "earlier"), [*((one, True) for one in POINTS), ("before it gets its name", False)]
)
def test_a_process_killed_during_a_save_leaves_the_old_file_or_the_new(
    child, tmp_path, point, earlier
):
    where, when = POINTS[point]
    if earlier:
        save(tmp_path, scaler(init_scale=32.0))
    child(KILL, tmp_path, *where.split("."), when, dies=signal.SIGKILL)
    if point == "after it got its name":
        assert restored(tmp_path) == 64.0
    elif earlier:
        assert restored(tmp_path) == 32.0
    else:
        assert load(tmp_path, scaler()) is None
    # The files that were left do not prevent the next save.
    save(tmp_path, scaler(init_scale=128.0))
    assert restored(tmp_path) == 128.0


def test_a_kill_in_the_middle_of_the_text_leaves_the_old_file(child, tmp_path):
    save(tmp_path, scaler(init_scale=32.0))
    code = """
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends the process in its write
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
checkpoint.save(arguments[0], scaler)
"""
    child(code, tmp_path, dies=signal.SIGXFSZ)
    assert restored(tmp_path) == 32.0


def test_a_full_disk_is_told_and_leaves_the_old_file(child, tmp_path):
    """The kernel refuses the write half way, as it does at a quota."""
    save(tmp_path, scaler(init_scale=32.0))
    code = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
checkpoint.save(arguments[0], scaler)
"""
    told = child(code, tmp_path)
    assert "ScalerCheckpointError" in told
    assert str(tmp_path / FILE_NAME) in told
    assert [one.name for one in tmp_path.iterdir()] == [FILE_NAME]
    assert restored(tmp_path) == 32.0


@pytest.mark.parametrize("call", ["os.fsync", "os.open"])
def test_a_disk_that_fills_at_the_flush_is_told(tmp_path, monkeypatch, call):
    """Network disks may report ENOSPC at the flush; an unflushable folder is no error."""

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(call, full)
    if call == "os.open":
        save(tmp_path, scaler(init_scale=16.0))
        monkeypatch.undo()
        assert restored(tmp_path) == 16.0
        return
    with pytest.raises(ScalerCheckpointError, match="No space left on device"):
        save(tmp_path, scaler())
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_write_access_is_told(child):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        save(directory, scaler(init_scale=32.0))
        directory.chmod(0o555)
        # Root may write anywhere, so the child becomes another user.
        code = "if os.geteuid() == 0: os.setegid(65534); os.seteuid(65534)\n"
        code += "checkpoint.save(arguments[0], scaler)\n"
        told = child(code, directory)
        directory.chmod(0o755)
        assert "ScalerCheckpointError" in told, told
        assert "Permission denied" in told
        assert restored(directory) == 32.0


def test_two_saves_at_once_leave_one_whole_file(tmp_path):
    """If a job was started twice, the last rename wins, and no reader sees a mixture."""
    scales = [2.0**exponent for exponent in range(8)]
    stop, seen, wrong = threading.Event(), set(), []
    save(tmp_path, scaler(init_scale=1.0))

    def read():
        try:
            while not stop.is_set():
                seen.add(restored(tmp_path))
        except ScalerCheckpointError as error:
            wrong.append(error)

    def write(scale):
        for _ in range(20):
            save(tmp_path, scaler(init_scale=scale))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(scale,)) for scale in scales]
    reader.start()
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    stop.set()
    reader.join()
    assert wrong == []
    assert seen <= set(scales)
    assert [one.name for one in tmp_path.iterdir()] == [FILE_NAME]
    assert restored(tmp_path) in scales


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"\x80\x04\x95")  # a pickle
    with pytest.raises(ScalerCheckpointError, match="cannot read"):
        load(tmp_path, scaler())
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ScalerCheckpointError, match="cannot read"):
        load(tmp_path, scaler())


def test_deeply_nested_json_is_refused(tmp_path):
    (tmp_path / FILE_NAME).write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ScalerCheckpointError, match=FILE_NAME):
        load(tmp_path, scaler())
