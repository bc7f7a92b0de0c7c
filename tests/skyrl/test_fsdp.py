"""fp16 on FSDP, with SkyRL's own workers in one process."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import PrecisionShimWarning, SeamError

from ..every_framework.checkpoint_doctor import FP16 as FP16_JOB
from ..every_framework.checkpoint_doctor import ask, verdict
from ..every_framework.shim_warnings import ours
from ..every_framework.walks import walking
from ..processes.commands import command
from ..processes.kill_points import beside_another_job, kill_points
from ..stand_ins.tiny_models import VOCABULARY
from .conftest import SKYRL
from .support import batch, fsdp_worker, metrics_of, scaler_of

ROLES = ("policy", "critic")


@pytest.fixture
def make(cpu: None, checkpoints: dict[str, Path]) -> Callable[..., Any]:
    """Build a worker whose FSDP model stores parameters in fp32 and computes in ``dtype``."""

    def worker(role: str = "policy", dtype: str | None = "fp16", *overrides: str) -> Any:
        return fsdp_worker(role, checkpoints["float32"], dtype, *overrides)

    return worker


def module_of(worker: Any) -> Any:
    return getattr(worker.model, "model", worker.model)


def train(worker: Any, seed: int, advantage: float = 1.0) -> tuple[dict[str, float], float]:
    found = metrics_of(worker.forward_backward(batch(seed, advantage=advantage)))
    return found, worker.optim_step()


def settle(worker: Any) -> int:
    """Train until the scale fits; returns the next seed."""
    for seed in range(20):
        if math.isfinite(train(worker, seed)[1]):
            return seed + 1
    raise AssertionError("the scale never fitted")


def parameters(worker: Any) -> torch.Tensor:
    return torch.cat(
        [one.detach().to_local().flatten().clone() for one in module_of(worker).parameters()]
    )


def test_fp16_reductions_beside_bf16_are_told(make: Any, shim: Any) -> None:
    shim()
    key = "fsdp_config.mixed_precision.reduce_dtype"
    with pytest.warns(PrecisionShimWarning, match=f"{key}=float16 is no fp16 training"):
        make("policy", None, f"trainer.policy.{key}=fp16")
    with ours() as told:
        make("policy", None, f"trainer.policy.{key}=bf16")
        make("policy", "fp16", f"trainer.policy.{key}=fp16")
    assert told == []


@pytest.fixture
def products() -> Callable[[Any], set[torch.dtype]]:
    """The dtypes in which a model's linear layers compute."""

    def of(worker: Any) -> set[torch.dtype]:
        found: set[torch.dtype] = set()
        layers = [one for one in module_of(worker).modules() if isinstance(one, torch.nn.Linear)]
        hooks = [
            one.register_forward_hook(lambda layer, args, output: found.add(output.dtype))
            for one in layers
        ]
        try:
            worker.forward_backward(batch(0))
        finally:
            for hook in hooks:
                hook.remove()
        return found

    return of


def test_bf16_is_left_alone(make: Any, shim: Any, products: Any) -> None:
    plain = make("policy", None)
    expected = [train(plain, seed) for seed in range(2)]
    shim()
    worker = make("policy", None)
    assert [train(worker, seed) for seed in range(2)] == expected
    assert torch.equal(parameters(plain), parameters(worker))
    assert products(worker) == {torch.bfloat16}
    assert not [d for d in precision_shim.status().decisions if d.feature == "fp16-scaling"]


def test_bf16_weights_without_masters(
    make: Any, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyRL itself loads what it trains in fp32; a worker of the user's own may not."""
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker as module

    own, loader = module.get_llm_for_sequence_regression, "get_llm_for_sequence_regression"
    monkeypatch.setattr(module, loader, lambda *args, **more: own(*args, **{**more, "bf16": True}))
    shim(strict=True)
    told = r"no-master \(.* 0 of the 8 bits .*bf16=False of SkyRL's model"
    with pytest.warns(PrecisionShimWarning, match=told):
        worker = make("critic", None, "trainer.critic.optimizer_config.lr=1e-6")
    train(worker, 0)
    (audit,) = precision_shim.status().audit
    assert [one.code for one in audit.problems] == ["no-master"]


@pytest.mark.parametrize("role", ROLES)
def test_an_overflow_is_skipped_and_shown(make: Any, shim: Any, products: Any, role: str) -> None:
    shim(settings={"loss_scale_init": 256})
    worker = make(role)
    seed = settle(worker)
    found, _ = train(worker, seed)
    scale, skipped = found["loss_scale"], found["skipped_steps"]
    before, rate = parameters(worker), worker.scheduler.last_epoch
    _, norm = train(worker, seed + 1, advantage=1e9)
    assert not math.isfinite(norm)
    assert torch.equal(before, parameters(worker))
    assert worker.scheduler.last_epoch == rate, "as SkyRL has it on a step that it skips"
    found, norm = train(worker, seed + 2)
    assert (found["skipped_steps"], found["loss_scale"]) == (skipped + 1, scale / 2)
    assert math.isfinite(norm)
    assert not torch.equal(before, parameters(worker))
    assert products(worker) == {torch.float16}


@pytest.mark.skipif(Version("0.4") > SKYRL, reason="the walk is that of SkyRL 0.4")
def test_the_walk_of_an_overflow(make: Any, shim: Any) -> None:
    shim(settings={"loss_scale_init": 256})
    worker = make()
    seed = settle(worker)
    with walking("An overflow"):
        _, norm = train(worker, seed, advantage=1e9)
    assert not math.isfinite(norm)


def test_a_step_without_clipping(make: Any, shim: Any) -> None:
    """Without clipping SkyRL does not check the norm, so the scaler has to skip the step."""
    shim()
    worker = make("policy", "fp16", "trainer.policy.optimizer_config.max_grad_norm=0")
    before = parameters(worker)
    norm = train(worker, 0, advantage=1e9)[1]
    assert isinstance(norm, float)
    assert math.isnan(norm)
    assert torch.equal(before, parameters(worker))
    assert any(train(worker, 1)[1] is None for _ in range(20)), "the scale never fitted"
    assert not torch.equal(before, parameters(worker))
    assert torch.isfinite(parameters(worker)).all()


def test_what_the_trainer_makes_of_its_mini_batches(make: Any, shim: Any) -> None:
    """SkyRL averages metrics over mini-batches, but scale and skip count are the last values."""
    from skyrl.train.trainer import RayPPOTrainer

    shim(settings={"loss_scale_init": 256})
    worker = make("critic")
    # The trainer's own loop over mini-batches calls the worker without Ray.
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg = SimpleNamespace(trainer=SimpleNamespace(update_epochs_per_batch=1))
    trainer.dispatch = SimpleNamespace(
        stage_data=lambda model, data, boundaries: [1.0, 1e9, 1.0, 1.0],
        forward_backward_from_staged=lambda model, advantage: worker.forward_backward(
            batch(0, advantage=advantage)
        ),
        optim_step=lambda model: worker.optim_step(),
    )
    data = SimpleNamespace(metadata={"critic_mini_batch_boundaries": []})
    settle(worker)
    scaler = scaler_of(worker.strategy)
    assert scaler is not None
    scale, skipped = scaler.get_scale(), scaler.counter.skipped
    found = trainer._execute_training_step("critic", data)
    assert (found["loss_scale"], found["skipped_steps"]) == (scale / 2, skipped + 1)
    assert math.isnan(found["grad_norm"]), "a mean, as SkyRL has it"


def test_a_batch_after_a_step_that_failed(
    make: Any, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Tinker server answers a failed request, and its client sends the batch anew."""
    shim(settings={"loss_scale_init": 1024.0})

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    straight = make()
    norm = train(straight, 0)[1]
    anew = make()
    anew.forward_backward(batch(0))
    with monkeypatch.context() as patch:
        patch.setattr(anew.optimizer, "step", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            anew.optim_step()
    anew.optimizer.zero_grad()
    assert train(anew, 0)[1] == norm
    assert torch.equal(parameters(anew), parameters(straight))


def own_step(self: Any, optimizer: Any, model: Any, scheduler: Any, **kwargs: Any) -> Any:
    """SkyRL's step, as a user writes it anew: clips, checks, steps."""
    norm = torch.nn.utils.clip_grad_norm_(model.model.parameters(), self.max_norm).full_tensor()
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


@pytest.mark.parametrize("scale", [1024.0, 2.0**40])
@pytest.mark.parametrize("patched", [False, True], ids=["subclass", "monkey patch"])
def test_a_step_of_the_users_own_is_an_error(
    make: Any, shim: Any, monkeypatch: pytest.MonkeyPatch, patched: bool, scale: float
) -> None:
    """At 2**40 the user's check lets no step through."""
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker as module

    shim(settings={"loss_scale_init": scale})
    if patched:
        monkeypatch.setattr(FSDPStrategy, "optimizer_step", own_step)
    else:
        mine = type("Mine", (FSDPStrategy,), {"optimizer_step": own_step})
        monkeypatch.setattr(module, "FSDPStrategy", mine)
    worker = make()
    before = parameters(worker)
    with pytest.raises(SeamError, match=r"policy: .*optimizer_step, which is not the framework's"):
        [train(worker, seed) for seed in range(2)]
    assert torch.equal(before, parameters(worker))


# -- checkpoints -----------------------------------------------------------------------------


def save(worker: Any, folder: Path) -> str:
    path = str(folder / "checkpoint")
    worker.save_checkpoint(path)
    return path


def test_resume_is_exact_over_an_overflow(make: Any, shim: Any, tmp_path: Path) -> None:
    shim(settings={"growth_interval": 3})
    worker = make()
    seed = settle(worker)
    train(worker, seed)
    path = save(worker, tmp_path)
    plan = [1.0, 1e9, 1.0, 1.0, 1.0, 1.0]
    straight = [train(worker, 50 + i, advantage) for i, advantage in enumerate(plan)]
    assert verdict(path, "skyrl") == "exact"
    again = make()
    again.load_checkpoint(path)
    resumed = [train(again, 50 + i, advantage) for i, advantage in enumerate(plan)]
    assert str(resumed) == str(straight)  # NaN is NaN
    assert torch.equal(parameters(worker), parameters(again))


def test_resume_after_steps_that_were_all_skipped(make: Any, shim: Any, tmp_path: Path) -> None:
    """The optimizer has no states yet, and the scale is no longer the first."""
    shim(settings={"loss_scale_init": 1024})
    worker = make()
    train(worker, 0, advantage=1e9)
    path = save(worker, tmp_path)
    straight = [train(worker, seed) for seed in range(1, 4)]
    assert verdict(path, "skyrl") == "exact"
    again = make()
    again.load_checkpoint(path)
    assert scaler_of(again.strategy).get_scale() == 512.0
    assert str([train(again, seed) for seed in range(1, 4)]) == str(straight)
    assert torch.equal(parameters(worker), parameters(again))


@pytest.mark.parametrize("scale", [32.0, 512.0])
def test_a_load_between_a_backward_pass_and_its_step(
    make: Any, shim: Any, tmp_path: Path, scale: float
) -> None:
    """SkyRL keeps the gradients over a load, which replaces the scale that is in them."""
    shim(settings={"loss_scale_init": 128})
    worker = make()
    path = save(worker, tmp_path)
    norms = []
    for load in (False, True):
        scaler = scaler_of(worker.strategy)
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
        worker.forward_backward(batch(0))
        if load:
            worker.load_checkpoint(path)
            assert scaler.get_scale() == 128.0
        norms.append(worker.optim_step())
        worker.load_checkpoint(path)
    assert norms[0] == norms[1]


def test_the_state_is_one_record_in_client_state(make: Any, shim: Any, tmp_path: Path) -> None:
    import json

    from precision_shim.scaling import read_record

    shim()
    worker = make()
    seed = settle(worker)
    path = save(worker, tmp_path)
    _, states = worker.strategy.load_checkpoint(
        model=worker.model, optimizer=worker.optimizer, scheduler=worker.scheduler, ckpt_dir=path
    )
    record = json.loads(json.dumps(states["client_state"]["precision_shim_scaler"]))
    assert read_record(record, "here").steps == seed
    assert sorted(one.name for one in Path(path).iterdir() if one.name.endswith(".json")) == [
        "fsdp_config.json"
    ], "no file beside SkyRL's"


def test_the_callers_client_state_stays(make: Any, shim: Any, tmp_path: Path) -> None:
    shim()
    worker = make()
    mine = {"epoch": 3}
    worker.strategy.save_checkpoint(
        model=worker.model,
        ckpt_dir=str(tmp_path / "c"),
        node_local_rank=0,
        optimizer=worker.optimizer,
        scheduler=worker.scheduler,
        client_state=mine,
    )
    assert mine == {"epoch": 3}
    _, states = worker.strategy.load_checkpoint(
        model=worker.model, optimizer=worker.optimizer, ckpt_dir=str(tmp_path / "c")
    )
    assert states["client_state"]["epoch"] == 3


def test_a_checkpoint_of_unpatched_skyrl_loads(make: Any, shim: Any, tmp_path: Path) -> None:
    plain = make()
    train(plain, 0)
    path = save(plain, tmp_path)
    shim()
    assert verdict(path, "skyrl", FP16_JOB) == "starts anew"
    worker = make()
    with pytest.warns(PrecisionShimWarning, match="no loss scaler state at .*extra_state"):
        worker.load_checkpoint(path)
    assert torch.equal(parameters(plain), parameters(worker))
    settle(worker)


def test_unpatched_skyrl_loads_ours(make: Any, shim: Any, tmp_path: Path) -> None:
    shim()
    worker = make()
    settle(worker)
    path = save(worker, tmp_path)
    precision_shim.uninstall()
    told = ask(path, "skyrl")
    assert (told.outcome.verdict, told.remedy) == ("starts anew", "PRECISION_SHIM=1")
    plain = make()
    plain.load_checkpoint(path)
    assert torch.equal(parameters(plain), parameters(worker))


@pytest.mark.slow
def test_killed_between_two_files_of_a_save_over_an_old_one(
    make: Any, shim: Any, tmp_path: Path
) -> None:
    """SkyRL overwrites parameters, moments and the extra state, one file after the other."""
    shim()
    worker = make()
    seed = settle(worker)
    path = Path(save(worker, tmp_path))

    def state(one: Any) -> tuple[Any, ...]:
        scaler = scaler_of(one.strategy)
        return scaler.get_scale(), scaler.counter.steps, parameters(one).tolist()

    states = [state(worker)]
    train(worker, seed)
    states.append(state(worker))
    with kill_points(path, tmp_path / "copies") as points:
        save(worker, tmp_path)
    again = make()
    outcomes = []
    for place in points:
        told = verdict(place, "skyrl")
        with ours() as said:
            again.load_checkpoint(str(place))
        assert told == ("starts anew" if said else "exact")
        assert all("is of another save than the files beside it" in line for line in said)
        outcomes.append("told" if said else ["old", "new"][states.index(state(again))])
    assert set(outcomes) == {"old", "told", "new"}
    assert outcomes[-1] == "new"


@pytest.mark.slow
def test_another_job_saves_into_the_directory_meanwhile(
    make: Any, shim: Any, tmp_path: Path
) -> None:
    shim()
    worker, again = make(), make()
    seed = settle(worker)
    other = Path(save(worker, tmp_path / "other"))
    states = [parameters(worker).tolist()]
    train(worker, seed)
    path = Path(save(worker, tmp_path / "own"))
    states.append(parameters(worker).tolist())
    ends = set()
    for place in beside_another_job(path, other, lambda: save(worker, tmp_path / "own")):
        told = verdict(place, "skyrl")
        with ours() as said:
            again.load_checkpoint(str(place))
        assert told == ("starts anew" if said else "exact")
        ends.add("told" if said else states.index(parameters(again).tolist()))
    assert {1, "told"} <= ends <= {0, 1, "told"}


def test_weights_alone_leave_the_scaler_fresh(make: Any, shim: Any, tmp_path: Path) -> None:
    shim()
    worker = make()
    settle(worker)
    path = save(worker, tmp_path)
    fresh = make()
    fresh.load_checkpoint(path, load_optimizer_states=False)
    assert train(fresh, 0)[0]["loss_scale"] == 65536


@pytest.mark.parametrize(("own", "expected"), [(True, torch.float16), (False, torch.bfloat16)])
def test_the_reference_model(make: Any, shim: Any, own: bool, expected: torch.dtype) -> None:
    """The reference model has its own dtype key, which alone decides its compute dtype."""
    policys = "trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16"
    shim()
    worker = make("ref", "fp16" if own else None, policys)
    found: set[torch.dtype] = set()
    for one in module_of(worker).modules():
        if isinstance(one, torch.nn.Linear):
            one.register_forward_hook(lambda layer, args, output: found.add(output.dtype))
    worker.forward(batch(0))
    assert found == {expected}
    assert not [d for d in precision_shim.status().decisions if d.feature == "fp16-scaling"]


def test_a_model_with_parameters_in_fp32_is_refused_as_the_plan_says(
    cpu: None, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Of Ernie 4.5, transformers loads the routers in fp32 into a bf16 model."""
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    shutil.copytree(checkpoints["bfloat16"], tmp_path / "model")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    config = Ernie4_5_MoeConfig(
        vocab_size=VOCABULARY,
        **sizes,
        **heads,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
    )
    Ernie4_5_MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    worker = fsdp_worker("ref", tmp_path / "model", None)
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        worker.forward(batch(0))
    line = ["python", "-m", "skyrl.train.entrypoints.main_base", "trainer.strategy=fsdp"]
    line += [f"trainer.{role}.model.path={tmp_path}/model" for role in ("policy", "ref")]
    found = [planned(*line, *more) for more in ([], ["trainer.bf16=false"])]
    assert [len(problems) for problems in found] == [1, 0]
    (problem,) = found[0]
    assert (problem["code"], problem["subject"]) == ("mixed-dtypes", "ref")
    assert "transformers keeps its gate.weight" in problem["message"]
    assert problem["remedy"] == "Write trainer.bf16=false."
    fsdp_worker("ref", tmp_path / "model", None, "trainer.bf16=false").forward(batch(0))


def planned(*line: str) -> list[dict[str, Any]]:
    """The problems that the plan finds in a job, whose model is on this machine."""
    ended = command("plan", "--json", "--", *line)
    assert ended.code in (0, 1), ended.err
    problems: list[dict[str, Any]] = json.loads(ended.out)["problems"]
    return problems
