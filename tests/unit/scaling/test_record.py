"""A scaler's state as JSON: which fields are kept, and which records are refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.errors import ScalerCheckpointError
from precision_shim.scaling import LossScaler, ScalerSettings, read_record, record_of, restore
from precision_shim.scaling import checkpoint as module
from precision_shim.scaling.record import FORMAT, digest_of, signed


def scaler(**settings):
    return LossScaler(ScalerSettings(**settings), device="cpu")


def through_json(record):
    return json.loads(json.dumps(record))


scales = st.floats(2.0**-100, 2.0**120, width=32)


@given(
    scale=scales,
    interval=st.integers(1, 10**6),
    data=st.data(),
    growth=st.floats(1.0, 1e6, exclude_min=True),
    backoff=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    steps=st.integers(0, 10**9),
)
def test_what_goes_in_comes_out(scale, interval, data, growth, backoff, steps):
    source = scaler(growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    tracker = data.draw(st.integers(0, interval - 1))
    source.load_state_dict({**source.state_dict(), "scale": scale, "_growth_tracker": tracker})
    source.counter.steps = steps
    source.counter.skipped = data.draw(st.integers(0, steps))
    source.counter.in_row = data.draw(st.integers(0, source.counter.skipped))
    target = scaler()
    assert restore(target, through_json(record_of(source)), "here") == ()
    assert target.state_dict() == source.state_dict()
    assert target.counter == source.counter
    assert record_of(target)["state"] == record_of(source)["state"]


def test_a_live_scaler_is_restored_in_place():
    """The scaler keeps its tensors, because a captured graph or a hook may refer to them."""
    target = scaler()
    target.attach(torch.ones((), requires_grad=True) * 1)
    held = target._scale
    source = scaler(init_scale=12.0)
    restore(target, record_of(source), "here")
    assert target._scale is held
    assert held.item() == 12.0


def test_a_frameworks_own_scaler_is_kept_and_restored_too():
    source = torch.amp.GradScaler(device="cpu", init_scale=256.0, growth_interval=7)
    target = torch.amp.GradScaler(device="cpu")
    assert restore(target, through_json(record_of(source)), "here") == ()
    assert target.state_dict() == source.state_dict()


def test_a_setting_of_this_process_wins_and_is_told():
    source = scaler(growth_interval=400, growth_factor=2.0)
    target = scaler(growth_interval=50, growth_factor=3.0, chosen=frozenset({"growth_interval"}))
    (line,) = restore(target, record_of(source), "file.json")
    assert "growth_interval 50" in line
    assert "400 of file.json" in line
    assert target.get_growth_interval() == 50
    assert target.get_growth_factor() == 2.0  # not chosen: the file's


def test_an_initial_scale_of_this_process_does_not_displace_the_saved_scale():
    target = scaler(init_scale=8.0, chosen=frozenset({"init_scale"}))
    restore(target, record_of(scaler(init_scale=1024.0)), "here")
    assert target.get_scale() == 1024.0


def test_a_tracker_beyond_a_shorter_interval_grows_at_the_next_step():
    """torch tests for equality: a tracker past the interval would never grow the scale again."""
    source = scaler(growth_interval=400)
    source.load_state_dict({**source.state_dict(), "_growth_tracker": 399})
    target = scaler(growth_interval=10, chosen=frozenset({"growth_interval"}))
    lines = restore(target, record_of(source), "here")
    assert any("growth tracker 9" in line for line in lines)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    loss = parameter.sum()
    target.attach(loss)
    loss.backward()
    target.step(optimizer)
    target.update()
    assert target.get_scale() == 2 * 65536.0


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("state", "scale", value)
        for value in (0.0, -1.0, float("inf"), float("nan"), 1e300, "65536", None, True)
    ]
    + [("state", "growth_tracker", value) for value in (-1, 1.5, True, None)]
    + [("settings", "growth_interval", value) for value in (0, 2.5, "400", None)]
    + [("settings", "growth_factor", value) for value in (1.0, 0.5, float("nan"))]
    + [("settings", "backoff_factor", value) for value in (0.0, 1.0, -0.5)]
    + [("settings", "min_scale", -1.0), ("settings", "init_scale", 0.0)]
    + [("counters", "steps", -1), ("counters", "skipped", 7), ("counters", "skipped_in_row", 7)],
)
def test_a_value_that_cannot_be_is_refused_by_name(part, name, value):
    record = record_of(scaler())
    record[part][name] = value
    allowed = r"(a (finite float32|whole number|number)\b|between 0 and 1)"
    with pytest.raises(ScalerCheckpointError, match=rf"here: {part}.{name} is .*: {allowed}"):
        read_record(signed(record), "here")


@pytest.mark.parametrize("record", [None, 3, [], {}, {"kind": "other"}, {"scale": 1.0}])
def test_what_is_no_record_is_refused(record):
    with pytest.raises(ScalerCheckpointError, match="here: it holds no loss scaler state"):
        read_record(record, "here")


def test_a_newer_format_is_refused_by_its_number():
    record = signed({**record_of(scaler()), "format": FORMAT + 1})
    with pytest.raises(ScalerCheckpointError, match=rf"here: written in format {FORMAT + 1}"):
        read_record(record, "here")


@pytest.mark.parametrize("version", [0, -1, "1", None, True, 1.0])
def test_a_format_that_cannot_be_is_refused(version):
    with pytest.raises(ScalerCheckpointError, match="its format is"):
        read_record(signed({**record_of(scaler()), "format": version}), "here")


def test_missing_parts_are_refused():
    for part in ("state", "settings", "counters", "world_size"):
        record = record_of(scaler())
        del record[part]
        with pytest.raises(ScalerCheckpointError, match="here"):
            read_record(signed(record), "here")


def test_a_record_that_was_touched_is_refused():
    record = record_of(scaler())
    record["state"]["scale"] = 32768.0
    with pytest.raises(ScalerCheckpointError, match="does not match its digest"):
        read_record(record, "here")


def test_a_record_that_is_no_json_has_no_digest_to_match():
    """The record may come from a pickle, in a framework's own file."""
    record = {**record_of(scaler()), "more": object(), "digest": ""}
    assert digest_of(record) == ""
    with pytest.raises(ScalerCheckpointError, match="does not match its digest"):
        read_record(record, "here")


def test_a_record_as_a_tensor():
    record = record_of(scaler(init_scale=12.0))
    tensor = module.to_tensor(record)
    assert module.from_tensor(tensor, "here") == record
    assert (tensor.dtype, tensor.shape) == (torch.uint8, module.to_tensor().shape)
    with pytest.raises(ScalerCheckpointError, match="here: it holds no loss scaler state"):
        module.from_tensor(module.to_tensor(), "here")
    with pytest.raises(ScalerCheckpointError, match=r"here: it holds torch.int8 where a record's"):
        module.from_tensor(tensor.view(torch.int8), "here")
    for damaged in (tensor[5:], torch.full_like(tensor, 0xFF)):
        with pytest.raises(ScalerCheckpointError, match="here: not whole JSON"):
            module.from_tensor(damaged, "here")


def test_a_record_that_is_larger_than_the_tensor():
    room = module.to_tensor().numel()
    whole = {"a": "b" * (room - len('{"a": ""}'))}
    assert module.from_tensor(module.to_tensor(whole), "here") == whole
    with pytest.raises(ScalerCheckpointError, match=rf"takes {room + 1} bytes; {room} are allowed"):
        module.to_tensor({"a": whole["a"] + "b"})


def test_a_refused_record_leaves_the_scaler():
    target = scaler(init_scale=4.0)
    record = record_of(scaler())
    record["state"]["growth_tracker"] = 3
    with pytest.raises(ScalerCheckpointError):
        restore(target, record, "here")
    assert target.get_scale() == 4.0
