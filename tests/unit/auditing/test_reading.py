"""How tensors that wrap others, models without an optimizer, and meshes are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import readers, torch_reader
from precision_shim.auditing.reading import DeclaredStates, Owned, Reading, plain, unique

BF16, FP32 = torch.bfloat16, torch.float32


class Wrapper(torch.Tensor):
    """A tensor without numbers of its own, as quantized ones are: a nominal dtype and shape."""

    @staticmethod
    def __new__(cls, shape: Any, **inner: torch.Tensor | None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=BF16)

    def __init__(self, shape: Any, **inner: torch.Tensor | None) -> None:
        self._fp8_dtype = "e4m3"
        self.names = [name for name, one in inner.items() if one is not None]
        for name, one in inner.items():
            setattr(self, name, one)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was started")


class Flattening(Wrapper):
    """A wrapper that names its inner tensors, as torch's own subclasses do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return self.names, None


def fp8(**more: torch.Tensor | None) -> dict[str, Any]:
    """The inner tensors of TransformerEngine's MXFP8: bytes, scales, and a transpose or none."""
    data, scales = torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    return {"_rowwise_data": data, "_rowwise_scale_inv": scales, "_columnwise_data": None, **more}


def test_quantized_tensors_are_what_they_hold() -> None:
    held = fp8()
    one = Wrapper((4, 4), **held)
    assert [id(inner) for inner in plain(one)] == [
        id(held["_rowwise_data"]),
        id(held["_rowwise_scale_inv"]),
    ]


def test_a_wrapper_that_says_what_it_holds_may_hold_another() -> None:
    held = fp8()
    inside = Wrapper((4, 4), **held)
    assert [id(one) for one in plain(Flattening((4, 4), inside=inside))] == [
        id(held["_rowwise_data"]),
        id(held["_rowwise_scale_inv"]),
    ]


def test_a_tensor_of_another_class_that_wraps_nothing() -> None:
    class Named(torch.Tensor):
        pass

    one = torch.zeros(2).as_subclass(Named)
    assert [id(inner) for inner in plain(one)] == [id(one)]


def test_the_shares_of_a_dtensor_are_looked_into() -> None:
    held = fp8()
    one = SimpleNamespace(_local_tensor=Wrapper((4, 4), **held))
    assert len(list(plain(one))) == 2  # type: ignore[arg-type]


def test_an_audit_counts_the_bytes_of_quantized_parameters() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(4))
    model.table = Wrapper((4, 4), **fp8())
    audit = precision_shim.audit(model, None)
    other = audit.parts[0].components["other"]
    assert (other.bytes, other.dtypes) == (4 * 4 + 2, ("fp8",))


def test_a_model_alone() -> None:
    model = torch.nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    model(torch.ones(1, 4)).sum().backward()
    audit = precision_shim.audit(model, None)
    (part,) = audit.parts
    assert (part.name, part.optimizer, audit.framework) == ("model", "none", "torch")
    assert (part.parameters, part.owned) == (16, 0)
    assert part.components["params"].bytes_per_parameter == 4.0
    assert part.components["frozen"].bytes == 4 * 4
    assert part.components["grad_copies"].bytes == 16 * 4
    assert audit.complete
    assert audit.ok


def test_what_other_optimizers_train_is_left_to_their_audits() -> None:
    """The automatic audit sees one of several optimizers; it must not count the others' tensors."""
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    other.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(one.parameters())
    (whole,) = readers.read_optimizers([one, other], optimizer)
    (part,) = readers.read_optimizers([one, other], optimizer, whole=False)
    assert (whole.parameters, part.parameters) == (20 + 8, 20)
    assert len(whole.frozen) == len(part.frozen) == 1


def test_tensors_that_belong_to_no_parameter() -> None:
    class Helper:
        def __init__(self) -> None:
            self.scale, self.number = torch.ones(3), 5

    model = torch.nn.BatchNorm1d(2)
    model.helper, model.kept = Helper(), torch.ones(7)
    scaler = Helper()
    (found,) = readers.read_optimizers(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    # The modules' tensors may be found more than once, but each storage is counted once.
    sizes = sorted(one.numel() for one in unique(found.other))
    assert sizes == sorted([2, 2, 1, 3, 7, 3])


def test_a_state_goes_where_it_belongs() -> None:
    moment, second, master, extra = (torch.zeros(1) for _ in range(4))
    state = {
        "step": 3,
        "exp_avg": moment,
        "exp_avg_sq": second,
        "master_param": master,
        "momentum": extra,
    }
    one = Owned(BF16, torch.zeros(1))
    assert not one.has_state
    one.take(state)
    one.take(state)
    assert one.exp_avg is moment
    assert one.exp_avg_sq is second
    assert [id(each) for each in one.masters] == [id(master)]
    assert [id(each) for each in one.other] == [id(extra), id(extra)]
    for name in ("exp_avg", "exp_avg_sq", "momentum"):
        alone = Owned(BF16, torch.zeros(1))
        alone.take({name: moment})
        assert alone.has_state
    alone = Owned(BF16, torch.zeros(1), (moment,))
    alone.take({"master_weight": master})
    assert [id(each) for each in alone.masters] == [id(moment), id(master)]
    assert not alone.has_state


@pytest.mark.parametrize(
    ("fields", "masters"),
    [
        ({}, {BF16: None, FP32: None}),
        ({"master_weights": True}, {BF16: FP32, FP32: FP32}),
        (
            {"master_weights": True, "master_weight_dtype": torch.float16},
            {BF16: torch.float16, FP32: torch.float16},
        ),
        ({"master_weights": True, "store_param_remainders": True}, {BF16: torch.int16, FP32: FP32}),
    ],
)
def test_what_transformer_engines_adam_says_of_its_states(fields: Any, masters: Any) -> None:
    optimizer: Any = SimpleNamespace(exp_avg_dtype=BF16, exp_avg_sq_dtype=torch.uint8, **fields)
    told = torch_reader.declared_states(optimizer)
    assert told.exp_avg is not None
    assert told.exp_avg_sq is not None
    assert told.exp_avg(torch.zeros(1)) is BF16
    assert told.exp_avg_sq(torch.zeros(1)) is torch.uint8
    assert {one: told.master(one) if told.master else None for one in (BF16, FP32)} == masters


def test_what_the_first_step_makes() -> None:
    waiting, done = Owned(BF16, torch.zeros(1)), Owned(FP32, torch.zeros(1), exp_avg=torch.zeros(1))
    own = Owned(torch.float16, torch.zeros(1), (torch.zeros(1),))
    tell = DeclaredStates(
        exp_avg=lambda tensor: tensor.dtype, master={BF16: torch.int16, FP32: FP32}.get
    )
    found = Reading("core", "model", "Adam", owned=[waiting, done, own], declared_states=tell)
    assert found.later("exp_avg") == {FP32}
    assert found.later("exp_avg_sq") == set()
    assert found.later("master") == {torch.int16}
    assert Reading("core", "model", "Adam", owned=[waiting]).later("master") == set()


class Mesh:
    def __init__(self, names: tuple[str, ...] | None, *sizes: int) -> None:
        self.mesh_dim_names, self.sizes, self.ndim = names, sizes, len(sizes)

    def size(self, dimension: int) -> int:
        return self.sizes[dimension]


@pytest.mark.parametrize(
    ("mesh", "size"),
    [
        (Mesh(None, 8), 8),
        (Mesh(("dp_replicate", "dp_shard"), 2, 4), 8),
        (Mesh(("dp_shard", "tp"), 4, 2), 4),
        (Mesh(("pp", "dp", "cp"), 2, 3, 5), 3),
    ],
)
def test_a_model_is_divided_along_some_dimensions_and_data_along_others(
    mesh: Mesh, size: int
) -> None:
    one: Any = SimpleNamespace(device_mesh=mesh)
    assert torch_reader._data_parallel_size([], [torch.zeros(1), one]) == size


def test_the_group_of_a_wrapped_module() -> None:
    group = SimpleNamespace(size=lambda: 4)
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert torch_reader._data_parallel_size([first, second], []) == 1
    second.process_group = group
    assert torch_reader._data_parallel_size([first, second], [torch.zeros(1)]) == 4
