"""The audit of torch optimizers in one process: its arguments, its readings, its cost."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import precision_shim
from precision_shim.errors import AuditError, DtypeError
from precision_shim_tools.testing import FusedAdam
from precision_shim_tools.testing.measure import measure_bytes


def trained(model: Any, optimizer: Any) -> tuple[Any, Any]:
    model(torch.ones(1, 4, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def adamw(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 4).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), **options)


def notes(audit: precision_shim.Audit) -> list[str]:
    return [one.code for one in audit.notes]


def test_it_works_in_a_process_without_the_shim() -> None:
    source = (
        "import sys, torch, precision_shim\n"
        "model = torch.nn.Linear(2, 2)\n"
        "audit = precision_shim.audit(model, torch.optim.AdamW(model.parameters()))\n"
        "assert audit.ok and not audit.complete\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not {'wrapt', 'megatron', 'verl'} & loaded\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_before_and_after_the_first_step() -> None:
    model, optimizer = adamw(torch.bfloat16)
    before = precision_shim.audit(model, optimizer)
    after = precision_shim.audit(*trained(model, optimizer))
    (early,), (late,) = before.parts, after.parts
    assert early.components["exp_avg"].state == "later"
    assert early.components["exp_avg"].dtypes == late.components["exp_avg"].dtypes == ("bf16",)
    assert late.components["exp_avg"].state == "live"
    assert notes(before) == notes(after) == ["no-master", "second-moment-stuck"]
    assert late.components["params"].bytes_per_parameter == 2.0
    assert precision_shim.Audit.from_dict(after.to_dict()) == after
    assert "no-master: " in str(after)


@pytest.mark.parametrize(("dtype", "last"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_a_step_count_that_stands_still(dtype: torch.dtype, last: int) -> None:
    model, optimizer = trained(*adamw())
    assert precision_shim.audit(model, optimizer).ok
    for state in optimizer.state.values():
        state["step"] = torch.tensor(float(last), dtype=dtype)
    trained(model, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {last}
    (problem,) = precision_shim.audit(model, optimizer).problems
    assert (problem.code, problem.expected) == ("step-count", "a step count in fp32")
    assert f"stands still at {last}" in problem.message


def test_the_keys_of_the_dict() -> None:
    found = precision_shim.audit(*trained(*adamw(torch.bfloat16)), expected={"master": "fp32"})
    values = found.to_dict()
    assert " ".join(values) == (
        "framework subject rank world_size parts totals problems notes ranks ok complete"
    )
    assert list(values["totals"]) == ["bytes", "allocated", "host", "cuda_allocated"]
    (part,) = values["parts"]
    assert " ".join(part) == (
        "name optimizer data_parallel_size parameters owned scaler components updates shards "
        "routers"
    )
    assert " ".join(part["components"]) == (
        "params frozen grad_buckets grad_copies master exp_avg exp_avg_sq other"
    )
    for component in part["components"].values():
        assert " ".join(component) == (
            "dtypes bytes allocated bytes_per_parameter sharded device state"
        )
    for finding in (*values["problems"], *values["notes"]):
        assert list(finding) == ["code", "part", "component", "expected", "found", "message"]
    assert values["problems"]
    assert values["notes"]


def frozen(_: Any) -> Any:
    """A bf16 layer that is not trained, beside fp32 factors that are, as with LoRA."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4))
    model[0].requires_grad_(requires_grad=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6)


def in_warmup(made: Any) -> Any:
    torch.optim.lr_scheduler.LambdaLR(made[1], lambda step: step / 10)
    assert made[1].param_groups[0]["lr"] == 0
    return made


def with_option(made: Any) -> Any:
    made[1].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    for group in made[1].param_groups:
        group["use_kahan_summation"] = True
    return made


def with_masters(made: Any) -> Any:
    return made[0], FusedAdam(made[0].parameters(), lr=1e-6, master_weights=True)


def with_masters_elsewhere(made: Any) -> Any:
    """As Apex's FusedAdam, which has no masters in its state."""
    made[1].master_weights = True
    return made


def with_sgd(made: Any) -> Any:
    return made[0], torch.optim.SGD(made[0].parameters(), lr=1e-6)


@pytest.mark.parametrize(
    ("change", "lr", "found"),
    [
        (lambda made: made, 1e-6, (["no-master"], [])),
        (lambda made: made, torch.tensor(1e-6), (["no-master"], [])),
        (in_warmup, 1e-6, (["no-master"], [])),
        (lambda made: made, 1e-3, ([], ["no-master"])),
        (with_sgd, 1e-6, ([], ["no-master"])),  # an update may have any size
        (frozen, 1e-6, ([], [])),
        (with_masters, 1e-6, ([], [])),
        (with_masters_elsewhere, 1e-6, ([], [])),
        (with_option, 1e-6, ([], [])),
    ],
    ids=["adam", "tensor", "warmup", "large", "sgd", "frozen", "masters", "apex", "kahan"],
)
def test_bf16_weights_without_masters(change: Any, lr: Any, found: Any) -> None:
    """A problem where rounding loses most of Adam's updates, and else a note."""
    model, optimizer = change(adamw(torch.bfloat16, lr=lr, betas=(0.9, 0.95), foreach=False))
    for audit in (precision_shim.audit(model, optimizer), precision_shim.audit(None, optimizer)):
        assert ([one.code for one in audit.problems], notes(audit)) == found
        assert audit.ok is not bool(found[0])


def test_the_second_moment_moves_at_a_smaller_beta() -> None:
    audit = precision_shim.audit(*trained(*adamw(torch.bfloat16, betas=(0.9, 0.95))))
    assert notes(audit) == ["no-master"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_fp32_copy_of_fp32_weights_is_named(dtype: torch.dtype) -> None:
    """As NeMo-RL's DTensor workers have it, which load weights in fp32."""
    model = torch.nn.Linear(4, 4).to(dtype)
    optimizer = FusedAdam(model.parameters(), master_weights=True, betas=(0.9, 0.95))
    before = precision_shim.audit(model, optimizer)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    after = precision_shim.audit(model, optimizer)
    (part,) = after.parts
    assert part.components["master"].bytes == 4 * 20
    expected = ["master-copied"] if dtype is torch.float32 else []
    assert notes(before) == notes(after) == expected


def test_masters_that_a_loop_keeps_itself() -> None:
    model = torch.nn.Linear(4, 4).bfloat16()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for one in masters:
        one.grad = torch.ones_like(one)
    optimizer.step()
    audit = precision_shim.audit(model, optimizer)
    (part,) = audit.parts
    assert part.components["master"].dtypes == ("fp32",)
    assert part.components["params"].dtypes == ("bf16",)
    assert (part.parameters, part.owned) == (20, 20)
    assert notes(audit) == []


@pytest.mark.parametrize("kept", ["stale", "view", torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tensors_of_an_optimizer_that_are_no_masters(dtype: torch.dtype, kept: Any) -> None:
    """Masters are fp32 copies of 16-bit parameters; other tensors than the model's are none."""
    model = torch.nn.Linear(4, 4).to(dtype)
    own = [p.detach() if kept == "view" else p.detach().clone() for p in model.parameters()]
    stepped = kept if isinstance(kept, torch.dtype) else dtype
    params = [torch.nn.Parameter(one.to(stepped)) for one in own]
    optimizer = torch.optim.AdamW(params, lr=1e-6, betas=(0.9, 0.95))
    for one in params:
        one.grad = torch.ones_like(one)
    optimizer.step()
    audit = precision_shim.audit(model, optimizer)
    (part,) = audit.parts
    masters = dtype is torch.bfloat16 and stepped is torch.float32
    assert part.components["master"].dtypes == (("fp32",) if masters else ())
    assert (part.parameters, part.owned) == (20, 20)
    assert [one.code for one in audit.problems] == ["no-master"] * (stepped is torch.bfloat16)


def test_a_state_in_16_bits_is_no_master_under_any_name() -> None:
    model, optimizer = trained(*adamw(torch.bfloat16, lr=1e-6, betas=(0.9, 0.95)))
    for parameter, state in optimizer.state.items():
        state["master_param"] = parameter.detach().clone()
    assert [one.code for one in precision_shim.audit(model, optimizer).problems] == ["no-master"]


def test_bytes_are_codes_unless_transformer_engine_says_that_they_are_fp8() -> None:
    """As ``state1`` of bitsandbytes, and its frozen weights in 4 bits."""
    model, optimizer = trained(*adamw(torch.bfloat16, betas=(0.9, 0.95)))
    codes = torch.zeros(8, dtype=torch.uint8)
    model.frozen = torch.nn.Parameter(codes.clone(), requires_grad=False)
    for state in optimizer.state.values():
        state.update(exp_avg=codes.clone(), state1=codes.clone())
    found = precision_shim.audit(model, optimizer, expected={"frozen": "uint8"})
    components = found.parts[0].components
    assert [components[name].dtypes for name in ("frozen", "exp_avg")] == [("uint8",)] * 2
    assert "uint8" in components["other"].dtypes
    assert found.problems == ()


def test_transformer_engines_adam_without_megatron() -> None:
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = FusedAdam(
        model.parameters(), master_weights=True, store_param_remainders=True, betas=(0.9, 0.95)
    )
    before = precision_shim.audit(model, optimizer)
    after = precision_shim.audit(*trained(model, optimizer))
    for audit in (before, after):
        assert audit.parts[0].components["master"].dtypes == ("int16",)
        assert notes(audit) == []


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_for_fp16(enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    audit = precision_shim.audit(*adamw(torch.float16), scaler=scaler)
    assert [one.code for one in audit.problems] == ([] if enabled else ["scaler-missing"])
    assert audit.parts[0].scaler == ("GradScaler" if enabled else None)


def test_several_optimizers_and_containers() -> None:
    one, other = adamw(), adamw()
    audit = precision_shim.audit([one[0], other[0]], [one[1], other[1]])
    assert [part.name for part in audit.parts] == ["model", "model 2"]
    assert sum(part.parameters for part in audit.parts) == 40
    assert precision_shim.audit(None, one[1]).parts[0].parameters == 20


def test_an_optimizer_that_is_passed_twice_is_one() -> None:
    model, optimizer = trained(*adamw())
    once = precision_shim.audit(model, optimizer)
    assert precision_shim.audit(model, [optimizer, optimizer]) == once


def test_a_storage_is_counted_once() -> None:
    whole = torch.zeros(64)
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(whole[:16]), torch.nn.Parameter(whole[16:32])]
    )
    audit = precision_shim.audit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    params = audit.parts[0].components["params"]
    assert (params.bytes, params.allocated) == (32 * 4, 64 * 4)
    assert audit.complete


@pytest.mark.parametrize(
    ("optimizer", "complete"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
        (torch.optim.RMSprop, False),
    ],
    ids=["no states", "momentum", "RMSprop"],
)
def test_states_that_nobody_foretells(optimizer: Any, complete: bool) -> None:
    model = torch.nn.Linear(4, 4)
    made = optimizer(model.parameters())
    before = precision_shim.audit(model, made)
    assert before.complete == complete
    after = precision_shim.audit(*trained(model, made))
    assert after.complete
    other = after.parts[0].components["other"]
    assert (other.bytes > 0) == (not complete)


@pytest.mark.parametrize("with_model", [True, False])
def test_frozen_parameters_that_the_optimizer_was_given(with_model: bool) -> None:
    """With LoRA verl passes frozen parameters to the optimizer, which gives them no states."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    audit = precision_shim.audit(model if with_model else None, optimizer)
    (part,) = audit.parts
    assert (part.parameters, part.owned, audit.complete) == (10, 10, True)
    assert part.components["frozen"].bytes == 20 * 4
    assert part.components["exp_avg"].bytes_per_parameter == 4.0


def test_meta_tensors_take_no_memory() -> None:
    model = torch.nn.Linear(4, 4, device="meta")
    audit = precision_shim.audit(model, torch.optim.AdamW(model.parameters()))
    params = audit.parts[0].components["params"]
    assert (params.bytes, params.allocated, params.device) == (80, 0, "meta")
    assert audit.totals["host"] == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"optimizer": "adam"}, AuditError, "builtins.str"),
        ({"optimizer": [object()]}, AuditError, "builtins.object"),
        ({"model": "gpt"}, AuditError, "builtins.str"),
        ({"model": None, "optimizer": None}, AuditError, "nothing to read"),
        ({"expected": {"moments": "bf16"}}, AuditError, "'moments'"),
        ({"expected": {"exp_avg": "bf8"}}, DtypeError, "exp_avg='bf8'"),
        ({"expected": {"exp_avg": 16}}, DtypeError, "exp_avg=16"),
    ],
)
def test_what_makes_no_sense_is_an_error_that_names_it(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    model, optimizer = adamw()
    with pytest.raises(error, match=text) as caught:
        precision_shim.audit(**{"model": model, "optimizer": optimizer, **arguments})
    assert isinstance(caught.value, precision_shim.PrecisionShimError)
    assert "allowed" in str(caught.value) or "Pass" in str(caught.value)


def test_what_is_expected() -> None:
    model, optimizer = trained(*adamw())
    right = {"exp_avg": "float32", "params": torch.float32}
    assert precision_shim.audit(model, optimizer, expected=right).ok
    audit = precision_shim.audit(model, optimizer, expected={"master": "int16", "exp_avg": "bf16"})
    assert [(one.component, one.expected, one.found) for one in audit.problems] == [
        ("master", "int16", "none"),
        ("exp_avg", "bf16", "fp32"),
    ]
    assert not audit.ok


class Counting(TorchDispatchMode):
    """Counts the operations that are started on any device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_nothing_is_started_on_a_device() -> None:
    model, optimizer = trained(*adamw(torch.bfloat16))
    with Counting() as counting:
        torch.ones(1).item()
        assert counting.count > 0
        counting.count = 0
        str(precision_shim.audit(model, optimizer))
        measure_bytes(model, optimizer)
    assert counting.count == 0


def test_twice_the_tensors_cost_at_most_twice_as_much() -> None:
    """The cost is the number of calls, in Python and from it."""

    def cost(parameters: int) -> int:
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2)) for _ in range(parameters))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for one in model:
            one.grad = torch.ones(2)
        optimizer.step()
        events: list[str] = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            precision_shim.audit(model, optimizer)
        finally:
            sys.setprofile(None)
        return events.count("call") + events.count("c_call")

    cost(1)  # imports what the audit imports
    assert cost(1000) <= 2 * cost(500)


def test_measure_bytes_is_a_view_of_it() -> None:
    model, optimizer = trained(*adamw(torch.bfloat16))
    audit, measured = precision_shim.audit(model, optimizer), measure_bytes(model, optimizer)
    (part,) = audit.parts
    assert {name: one.allocated for name, one in part.components.items()} == {
        name: one.allocated for name, one in measured.parts.items()
    }
    assert measured.total == audit.totals["allocated"]
    assert measured.data_parallel_sizes == {"model": 1}


def test_a_parameter_that_never_had_a_gradient_does_not_hide_the_steps_of_the_others() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    optimizer = torch.optim.AdamW(model.parameters())
    before = precision_shim.audit(model, optimizer)
    assert (before.complete, before.before_step) == (False, True)
    assert before.headline.endswith("ok, before the first step")
    for _ in range(3):
        model[0](torch.ones(1, 4)).sum().backward()
        optimizer.step()
    after = precision_shim.audit(model, optimizer)
    assert (after.complete, after.before_step) == (False, False)
    assert after.headline.endswith("ok, without the states of parameters that had no gradient")


def test_a_subclass_of_adam_with_a_step_of_its_own_declares_no_dtypes() -> None:
    class Wide(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)

    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = Wide(model.parameters())
    before = precision_shim.audit(model, optimizer)
    assert not before.complete
    assert before.parts[0].components["exp_avg_sq"].dtypes == ()
    assert notes(before) == ["no-master"]
    optimizer.step()
    after = precision_shim.audit(model, optimizer)
    assert after.parts[0].components["exp_avg_sq"].dtypes == ("fp32",)
    assert notes(after) == ["no-master"]


def test_what_is_expected_of_frozen_parameters_is_asked_once() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
    model[2].requires_grad_(False).bfloat16()
    optimizers = [torch.optim.AdamW(model[place].parameters()) for place in range(2)]
    for dtype, codes in (("bf16", []), ("fp32", ["unexpected-dtype"])):
        audit = precision_shim.audit(model, optimizers, expected={"frozen": dtype})
        assert [problem.code for problem in audit.problems] == codes
    model[2].requires_grad_(True)
    audit = precision_shim.audit(model, optimizers, expected={"frozen": "bf16"})
    assert [(one.part, one.found) for one in audit.problems] == [("model", "none")]
