"""The ranks of the tests of expert parallelism on verl's Automodel and torchtitan engines.

``engine_ranks.py`` has the ranks' cases for all engines, which these ranks have, too. One rank
without expert parallelism trains on the sequences that two ranks share between them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from precision_shim_adapters.verl import metrics

from ..rank_server import Launch
from . import engine_ranks
from . import fsdp_support as support
from .engine_ranks import Job, batch, case, engine, install, parts
from .support import batch as supervised_batch

STEPS, OVERFLOWS = 8, (2, 5)


def prepare() -> None:
    """See ``engine_ranks.prepare``."""
    engine_ranks.prepare()


def run(launch: Launch) -> Any:
    """See ``engine_ranks.run``."""
    return engine_ranks.run(launch)


def _of_both_ranks(step: int) -> Any:
    """The sequences of two ranks in one batch, in the ranks' order."""
    both = [supervised_batch(seed=1000 * step + rank) for rank in range(2)]
    whole = supervised_batch(sequences=4)
    for name in ("input_ids", "position_ids", "loss_mask", "returns"):
        rows = [row for one in both for row in one[name].unbind()]
        whole[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return whole


@case
def compared(
    job: Job, name: str, model: str, dtype: str = "float16", **fields: Any
) -> dict[str, Any]:
    """Train eight steps, and return figures that do not depend on the number of ranks.

    In the steps of ``OVERFLOWS`` the last sequence overflows in float16. In another dtype nothing
    would overflow, so that training leaves these steps out.
    """
    install()
    with _in_fp32(name):
        one = engine(name, model, dtype, **fields)
    if name == "automodel":
        _detach_routers(one)
    before = _weights(one)
    world, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    found: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "skipped": []}
    for step in range(STEPS):
        if dtype != "float16" and step in OVERFLOWS:
            one.lr_scheduler_step()
            continue
        rows = batch(one, step) if world == 2 else _padded(one, _of_both_ranks(step))
        weights = [1.0] * (4 // world)
        if last and step in OVERFLOWS:
            weights[-1] = support.HUGE
        with one.train_mode():
            said = one.train_batch(rows, support.loss_function(weights))
            one.lr_scheduler_step()
        loss = torch.tensor(sum(said["loss"]) / world, dtype=torch.float64)
        dist.all_reduce(loss)
        if step not in OVERFLOWS:
            found["losses"].append(loss.item())
            found["norms"].append(said["metrics"]["grad_norm"])
        else:
            found["skipped"].append(math.isnan(said["metrics"]["grad_norm"]))
        found["scales"].append(metrics.of_engine(one).get("loss_scale"))
    after = _weights(one)
    found["weights"] = {key: value.double().flatten().tolist() for key, value in after.items()}
    found["still"] = sorted(key for key, value in after.items() if torch.equal(value, before[key]))
    found["split"] = _split(one)
    return found


@contextlib.contextmanager
def _in_fp32(name: str) -> Iterator[None]:
    """Let Automodel's own model hold fp32 weights, which it otherwise rounds to bfloat16."""
    if name != "automodel":
        yield
        return
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM

    own = Qwen3MoeForCausalLM.initialize_weights
    told = functools.partialmethod(own, dtype=torch.float32)
    with mock.patch.object(Qwen3MoeForCausalLM, "initialize_weights", told):
        yield


def _detach_routers(one: Any) -> None:
    """Give transformers' routers no gradient; Automodel 0.4.0 gives its own none on two ranks.

    ``GroupedExperts.forward`` gathers the routers' weights of all ranks without a gradient.
    """

    def hook(module: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(each.detach() for each in output)

    for module in one.module.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.register_forward_hook(hook)


def _padded(one: Any, rows: Any) -> Any:
    import verl.utils.tensordict_utils as tu

    tu.assign_non_tensor(rows, use_remove_padding=one.model_config.use_remove_padding)
    return rows


def _split(one: Any) -> list[str]:
    """The names of the parameters of which this rank has only half of the experts."""
    return [
        name
        for part in parts(one)
        for name, parameter in part.named_parameters()
        if "experts" in name and 2 * support.local(parameter).shape[0] == parameter.shape[0]
    ]


def _weights(one: Any) -> dict[str, torch.Tensor]:
    """All weights of an engine's model by the names of Hugging Face, or by torchtitan's."""
    (module,) = parts(one)
    found = {
        name.removeprefix("module."): (
            value.full_tensor() if hasattr(value, "full_tensor") else value
        ).clone()
        for name, value in module.state_dict().items()
    }
    adapter = getattr(module, "state_dict_adapter", None)
    if adapter is not None:  # Automodel's own model
        return {name: value.clone() for name, value in adapter.to_hf(found).items()}
    return dict(_one_expert_each(found))


def _one_expert_each(weights: dict[str, torch.Tensor]) -> Sequence[tuple[str, torch.Tensor]]:
    """Split transformers' stacks of experts, as Automodel's adapter splits its own."""
    found = []
    for name, value in weights.items():
        stack = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)", name)
        if stack is None:
            found.append((name, value))
            continue
        for number, expert in enumerate(value):
            parts_of_it = [("down_proj", expert)]
            if stack[2] == "gate_up_proj":
                parts_of_it = list(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            found += [(f"{stack[1]}.{number}.{key}.weight", one) for key, one in parts_of_it]
    return found
