"""Save, turn the shim on or off, and resume.

verl's own functions write and read the checkpoints, in every sharding type of Megatron's
distributed optimizer; "off" is the unpatched Megatron.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file

import precision_shim
from precision_shim.errors import CheckpointLayoutError

from ..every_framework.checkpoint_doctor import ask
from ..every_framework.shim_warnings import ours
from ..processes.rank_server import Ranks
from ..stand_ins.optimizer_states import live_states, loss_of_step, reads_remainders
from .conftest import VERL

SHARDINGS = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter")
STEPS = 3

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
)


@dataclass
class Job:
    """A model and its optimizer, made by verl's functions."""

    chunks: list[Any]
    optimizer: Any

    def train(self, steps: int, first: int = 0) -> list[float]:
        """Train some steps on made-up tokens; returns their losses."""
        from megatron.core.distributed import finalize_model_grads

        losses = []
        for step in range(first, first + steps):
            loss = loss_of_step(self.chunks, self.optimizer, step)
            loss.backward()
            finalize_model_grads(self.chunks)
            self.optimizer.step()
            losses.append(float(loss))
        return losses

    def states(self) -> dict[str, list[torch.Tensor]]:
        """Copies of fp32 master, exp_avg and exp_avg_sq of every parameter, by name."""
        names = {p: n for chunk in self.chunks for n, p in chunk.named_parameters()}
        return {
            names[param]: [
                one.detach().float().clone()
                for one in (master, state["exp_avg"], state["exp_avg_sq"])
            ]
            for param, master, state in live_states(self.optimizer)
        }

    def sharded(self, sharding: str, loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        from megatron.core import mpu

        metadata: dict[str, Any] = {
            "distrib_optim_sharding_type": sharding,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        if sharding == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        state = {
            "model": self.chunks[0].module.sharded_state_dict(
                metadata={**metadata, "dp_cp_group": group}
            )
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=metadata
        )
        return state, metadata

    def save(self, folder: Path, sharding: str) -> None:
        from verl.utils.megatron.dist_checkpointing import save_dist_checkpointing

        folder.mkdir(exist_ok=True)  # every rank calls this
        state, metadata = self.sharded(sharding, loading=False)
        save_dist_checkpointing(state, str(folder), content_metadata=metadata)

    def load(self, folder: Path, sharding: str, *, model: bool = True) -> None:
        from verl.utils.megatron.dist_checkpointing import load_dist_checkpointing

        state, _ = self.sharded(sharding, loading=True)
        loaded = load_dist_checkpointing(state, str(folder))
        if model:
            self.chunks[0].load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


@contextlib.contextmanager
def shim(on: bool, policy: str = "follow-model", strict: bool = False) -> Iterator[None]:
    if on:
        precision_shim.install(settings={"optimizer_states": policy}, strict=strict)
    try:
        yield
    finally:
        precision_shim.uninstall()


def job(seed: int = 0, through: Callable[[Any], Any] = lambda made: made, **overrides: Any) -> Job:
    """A job in bf16; the function ``through`` may replace its OptimizerConfig before use."""
    from omegaconf import OmegaConf
    from verl.utils.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config
    from verl.utils.megatron_utils import get_model

    from precision_shim_tools.testing.megatron_cpu import tiny_gpt

    provider = tiny_gpt(torch.bfloat16)
    torch.manual_seed(seed)
    chunks = get_model(provider, transformer_config=provider.config)
    fields = {"optimizer": "adam", "lr": 1e-2, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.0}
    config = OmegaConf.create(
        {**fields, "override_optimizer_config": {"adam_beta2": 0.95} | overrides}
    )
    made = init_megatron_optim_config(config, fp16=False)
    return Job(chunks, get_megatron_optimizer(chunks, through(made)))


def same(one: Any, other: Any, which: slice = slice(None)) -> bool:
    return all(
        torch.equal(a, b)
        for name in one
        for a, b in zip(one[name][which], other[name][which], strict=True)
    )


@pytest.mark.parametrize(
    ("sharding", "remainders"), [*((one, True) for one in SHARDINGS), ("fully_reshardable", False)]
)
def test_on_to_on_and_off(fused_adam: str, tmp_path: Path, sharding: str, remainders: bool) -> None:
    """States and later losses are equal bit for bit; an unpatched Megatron reads exact states."""
    extra = {} if remainders else {"store_param_remainders": False}
    with shim(on=True):
        first = job(**extra)
        first.train(STEPS)
        first.save(tmp_path / "saved", sharding)
        saved = first.states()
        straight = first.train(STEPS, first=STEPS)
        second = job(seed=1, **extra)
        second.load(tmp_path / "saved", sharding)
        assert same(saved, second.states())
        assert second.train(STEPS, first=STEPS) == straight
        assert same(first.states(), second.states())
    third = job(seed=1)
    third.load(tmp_path / "saved", sharding)
    assert not third.optimizer.config.use_precision_aware_optimizer
    assert same(saved, third.states())
    third.train(1, first=STEPS)


def go_on(folder: Path, sharding: str, first_on: bool, second_on: bool) -> str:
    """The result of a resume: ``exact``, ``other weights``, or an error's name."""
    folder, own = folder / f"{first_on}-{second_on}", {"use_precision_aware_optimizer": True}
    with shim(first_on, "as-configured"):
        first = job(**own)
        first.train(STEPS)
        first.save(folder, sharding)
        saved = first.states()
        straight = first.train(STEPS, first=STEPS)
    with shim(second_on, "as-configured"):
        second = job(seed=1, **own)
        try:
            second.load(folder, sharding)
        except Exception as error:  # Megatron raises several kinds
            return type(error).__name__
        exact = same(saved, second.states())
        exact = exact and second.train(STEPS, first=STEPS) == straight
        return "exact" if exact else "other weights"


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ones_own_remainders(fused_adam: str, tmp_path: Path, sharding: str) -> None:
    """The user's own config is precision-aware, so an unpatched Megatron has remainders, too.

    A resume without the shim ends as if the shim had never been on.
    """
    by_itself = go_on(tmp_path, sharding, first_on=False, second_on=False)
    assert by_itself != "other weights"
    assert go_on(tmp_path, sharding, first_on=True, second_on=False) == by_itself
    assert go_on(tmp_path, sharding, first_on=True, second_on=True) == "exact"
    back = go_on(tmp_path, sharding, first_on=False, second_on=True)
    if sharding == "dp_reshardable":
        assert (by_itself == "exact") == reads_remainders()
        assert back == "exact"
    else:
        assert back == "CheckpointLayoutError"


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_off_to_on_is_refused_and_the_remedy_works(
    fused_adam: str, tmp_path: Path, sharding: str
) -> None:
    """bf16 would round fp32 moments, so the error names both layouts and a variable to set."""
    first = job()
    first.train(STEPS)
    first.save(tmp_path / "saved", sharding)
    saved = first.states()
    straight = first.train(STEPS, first=STEPS)
    with shim(on=True):
        second = job(seed=1)
        with pytest.raises(CheckpointLayoutError, match=r"fp32.*bf16") as caught:
            second.load(tmp_path / "saved", sharding)
    assert "PRECISION_SHIM_OPTIMIZER_STATES=as-configured" in str(caught.value)
    with shim(on=True, policy="as-configured"):
        third = job(seed=1)
        third.load(tmp_path / "saved", sharding)
        assert same(saved, third.states())
        assert third.train(STEPS, first=STEPS) == straight


@pytest.mark.parametrize(
    ("sharding", "policy"),
    [
        ("dp_reshardable", "follow-model"),
        ("dp_reshardable", "as-configured"),
        ("fully_reshardable", "follow-model"),
        ("dp_zero_gather_scatter", "as-configured"),
    ],
)
def test_remainders_of_an_unpatched_megatron(
    fused_adam: str, tmp_path: Path, sharding: str, policy: str
) -> None:
    """The shim reads remainders that the file identifies, and refuses a file that does not."""
    with shim(on=True):  # a user's own code could build it so; saved without the shim
        first = job()
    assert first.optimizer.config.exp_avg_dtype is torch.bfloat16
    first.train(STEPS)
    first.save(tmp_path / "saved", sharding)
    saved = first.states()
    with shim(on=True, policy=policy):
        second = job(seed=1)
        aware = second.optimizer.config.use_precision_aware_optimizer
        assert aware == (policy == "follow-model")
        if sharding == "dp_reshardable":
            second.load(tmp_path / "saved", sharding)
            assert same(saved, second.states())
        else:
            with pytest.raises(CheckpointLayoutError, match="remainders"):
                second.load(tmp_path / "saved", sharding)


@pytest.mark.skipif(Version("0.8") > VERL, reason="0.7's engine saves through the same functions")
@pytest.mark.parametrize("reshardable", [False, True])
def test_through_the_engine(
    fused_adam: str, checkpoint: Path, tmp_path: Path, reshardable: bool
) -> None:
    """MegatronEngine's own save and load, in verl's two sharding types."""
    from .support import engine, optim_config

    def build() -> Any:
        made = engine(
            checkpoint,
            "bfloat16",
            optim=optim_config(override_optimizer_config={"adam_beta2": 0.95}),
            dist_ckpt_optim_fully_reshardable=reshardable,
        )
        made.initialize()
        return made

    with shim(on=True):
        first = build()
        for chunk in first.module:
            for buffer in chunk.buffers:
                buffer.grad_data.normal_(std=1e-2)
        first.optimizer.step()
        saved = Job(first.module, first.optimizer).states()
        first.save_checkpoint(str(tmp_path / "saved"), global_step=1)
        second = build()
        # The harness loads no weights through the bridge, and the bridge saves none here.
        weights = {"w": next(first.module[0].parameters()).detach().clone()}
        for folder in (tmp_path / "saved").glob("**/huggingface"):
            save_file(weights, folder / "model.safetensors")
        assert ask(tmp_path / "saved", "verl").outcome.exact
        second.load_checkpoint(str(tmp_path / "saved"), del_local_after_load=False)
        assert same(saved, Job(second.module, second.optimizer).states())


@pytest.mark.parametrize("aware", [False, True], ids=["plain", "precision-aware"])
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_weights_that_are_loaded_alone(
    fused_adam: str, checkpoint: Path, tmp_path: Path, on: bool, aware: bool
) -> None:
    """Without the shim the next step restores the old weights."""
    from .support import engine, optim_config

    own = {"use_precision_aware_optimizer": True, "store_param_remainders": False} if aware else {}

    def build() -> Any:
        fields = optim_config(lr=0.0, weight_decay=0.0, override_optimizer_config=own)
        made = engine(checkpoint, "bfloat16", optim=fields)
        made.initialize()
        manager = made.checkpoint_mananager
        manager.use_dist_checkpointing = True  # The config's key would also load initial weights.
        manager.use_hf_checkpoint = False  # Needed in verl 0.7 and 0.8.
        manager.checkpoint_save_contents = manager.checkpoint_load_contents = ["model"]
        return made

    def step(one: Any) -> list[torch.Tensor]:
        for chunk in one.module:
            for buffer in chunk.buffers:
                buffer.grad_data.normal_(std=1e-2)
        one.optimizer.step()
        return [p.detach().clone() for chunk in one.module for p in chunk.parameters()]

    with shim(on, "as-configured"):
        first, second = build(), build()
        with torch.no_grad():
            for chunk in first.module:
                for parameter in chunk.parameters():
                    parameter.mul_(2.0)
        weights = [p.detach().clone() for chunk in first.module for p in chunk.parameters()]
        first.save_checkpoint(str(tmp_path / "saved"), global_step=1)
        step(second)
        second.load_checkpoint(str(tmp_path / "saved"), del_local_after_load=False)
        loaded = [p.detach().clone() for chunk in second.module for p in chunk.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(weights, loaded, strict=True))
        after = step(second)
        kept = all(torch.equal(a, b) for a, b in zip(after, loaded, strict=True))
        assert kept == on


@pytest.mark.slow
@pytest.mark.oldest
def test_two_ranks(megatron_ranks: Ranks) -> None:
    """Loading restores both ranks' parameters, and if one rank refuses, both raise."""
    one, other = megatron_ranks("checkpoints")
    assert set(one) == set(other) == {"dp_reshardable", "fully_reshardable"}


@pytest.mark.parametrize("strict", [False, True])
def test_weights_that_are_rounded_without_their_states_are_told(
    fused_adam: str, tmp_path: Path, strict: bool
) -> None:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from verl.utils.megatron.dist_checkpointing import (
        load_dist_checkpointing,
        save_dist_checkpointing,
    )

    first = job()
    first.train(1)
    state, metadata = first.sharded("fully_reshardable", loading=False)
    for tensor in nested_values(state["model"]):
        if getattr(tensor, "dtype", None) is torch.bfloat16:
            tensor.data, tensor.dtype = tensor.data.float(), torch.float32
    save_dist_checkpointing(state, str(tmp_path), content_metadata=metadata)
    with shim(True, "as-configured", strict), ours() as said:
        second = job(seed=1)
        second.load(tmp_path, "fully_reshardable")  # whole, with fp32 masters
        wanted = {"model": second.sharded("fully_reshardable", loading=True)[0]["model"]}
        told = "rounds its weights from fp32 to bf16.* Load the optimizer's states as well"
        if strict:
            with pytest.raises(CheckpointLayoutError, match=told):
                load_dist_checkpointing(wanted, str(tmp_path))
        else:
            load_dist_checkpointing(wanted, str(tmp_path))
    assert len([text for text in said if "rounds its weights" in text]) == (not strict)
