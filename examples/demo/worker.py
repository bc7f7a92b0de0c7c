"""One rank of one of the demo's runs: ``python -m examples.demo.worker SPEC RANK FD``.

Each rank is a new process, so that the shim is never installed in the run without the shim. The
rank builds a tiny GPT with verl's own ``get_model``, ``init_megatron_optim_config`` and
``get_megatron_optimizer``, trains it, and measures dtypes and bytes of the live objects.

``SPEC`` is a JSON file (:class:`Spec`). Rank 0 writes progress as JSON lines to the file
descriptor ``FD``, and the result to ``Spec.result``. verl and Megatron print to standard output
and standard error, which the demo redirects to a log file.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Spec", "main", "precision_keys", "read_text", "without_precision"]


@dataclass(frozen=True)
class Spec:
    """The settings of one run.

    Attributes:
        name: ``"without"`` or ``"with"``.
        shim: whether to call ``install()``.
        settings: the settings for ``install()``.
        optim: verl's ``optim`` section.
        text: path of the text to train on; ``None`` for the help texts that Python contains.
        seeds: seeds of data order and initial weights, one for each training.
        seconds: a seed after the first is left out if it would probably end later than this.
        steps: number of optimizer steps of each training.
        world_size: number of ranks.
        global_batch: sequences per step, over all ranks.
        sequence: bytes per sequence.
        hidden_size: width of the model.
        num_layers: number of the model's layers.
        rendezvous: a path that does not exist yet, for the ranks' rendezvous.
        result: path of the file into which rank 0 writes the result.
    """

    name: str
    shim: bool
    settings: dict[str, Any]
    optim: dict[str, Any]
    text: str | None
    seeds: tuple[int, ...]
    seconds: float
    steps: int
    world_size: int
    global_batch: int
    sequence: int
    hidden_size: int
    num_layers: int
    rendezvous: str
    result: str

    def write(self, path: Path) -> None:
        """Write the spec to a file, for the ranks."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Read a spec that :meth:`write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "seeds": tuple(values["seeds"])})


def main(argv: list[str]) -> None:
    """Run one rank."""
    spec, rank = Spec.read(Path(argv[0])), int(argv[1])
    progress = os.fdopen(int(argv[2]), "w", buffering=1) if rank == 0 else None

    def tell(**event: Any) -> None:
        if progress is not None:
            print(json.dumps(event), file=progress)

    until = time.monotonic() + spec.seconds
    import torch

    import precision_shim

    if spec.shim:
        precision_shim.install(settings=spec.settings)
    from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu, model_parallel
    from precision_shim_tools.testing.transformer_engine import stand_in_transformer_engine

    with (
        stand_in_transformer_engine() as transformer_engine,
        megatron_on_cpu(),
        model_parallel(spec.world_size, rank, spec.rendezvous),
    ):
        result: dict[str, Any] = {
            "name": spec.name,
            "transformer_engine": {
                "version": transformer_engine.version,
                "checked_by": transformer_engine.checked_by,
            },
        }
        if not spec.shim:
            result["as_written"] = _as_written(spec)
        else:
            result["asked"] = _asked(spec.optim)
            result["switch"] = os.environ.get("PRECISION_SHIM")
        result["runs"] = runs = []
        for seed in spec.seeds:
            began = time.monotonic()
            runs.append(_train(spec, rank, seed, tell))
            if _mean_over_ranks(torch.tensor(until + began - 2 * time.monotonic())) < 0:
                break
        result["shim"] = precision_shim.status().to_dict()
    if rank == 0:
        Path(spec.result).write_text(json.dumps(result, indent=1), encoding="utf-8")


def _as_written(spec: Spec) -> str | None:
    """The installed verl's error for the unchanged settings; ``None`` if verl accepts them."""
    from verl.utils.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config

    config = _config(spec.optim)
    try:
        get_megatron_optimizer(_model(spec), init_megatron_optim_config(config))
    except Exception as error:  # any error: the demo shows what a user would see
        return f"{type(error).__name__}: {str(error).strip() or '(no message)'}"
    return None


def precision_keys(optim: dict[str, Any]) -> list[str]:
    """The keys of ``override_optimizer_config`` that choose a precision."""
    chooses = ("use_precision_aware_optimizer", "store_param_remainders")
    overrides = optim.get("override_optimizer_config") or {}
    return [key for key in overrides if key.endswith("_dtype") or key in chooses]


def without_precision(optim: dict[str, Any]) -> dict[str, Any]:
    """``optim`` without the keys that choose a precision, which verl without the shim refuses."""
    overrides = dict(optim.get("override_optimizer_config") or {})
    for key in precision_keys(optim):
        del overrides[key]
    return {**optim, "override_optimizer_config": overrides}


def _asked(optim: dict[str, Any]) -> dict[str, str | None]:
    """The dtypes in ``optim`` by key, as torch names them."""
    from precision_shim.precision.dtypes import parse_dtype

    overrides = optim.get("override_optimizer_config") or {}
    return {
        key: str(parse_dtype(overrides[key])).removeprefix("torch.")
        for key in precision_keys(optim)
        if key.endswith("_dtype") and isinstance(overrides[key], str)
    }


def _config(optim: dict[str, Any]) -> Any:
    return importlib.import_module("omegaconf").OmegaConf.create(optim)


def _model(spec: Spec) -> Any:
    import torch
    from verl.utils.megatron_utils import get_model

    from precision_shim_tools.testing.megatron_cpu import tiny_gpt

    provider = tiny_gpt(
        torch.bfloat16,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=4,
        vocab_size=256,
        max_sequence_length=spec.sequence,
    )
    config = provider.config  # type: ignore[attr-defined]
    return get_model(provider, use_distributed_optimizer=True, transformer_config=config)


def _train(spec: Spec, rank: int, seed: int, tell: Any) -> dict[str, Any]:
    import torch
    from megatron.core import tensor_parallel
    from verl.utils.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config

    import precision_shim
    from precision_shim_tools.testing.measure import measure_bytes

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    model = _model(spec)
    shim = precision_shim.status().enabled
    optim = spec.optim if shim else without_precision(spec.optim)
    optimizer_config = init_megatron_optim_config(_config(optim))
    optimizer = get_megatron_optimizer(model, optimizer_config)
    corpus = read_text(spec.text)
    cut = len(corpus) * 9 // 10
    batches = _Batches(corpus[:cut], spec, rank, seed)
    held_out = _Batches(corpus[cut:], spec, rank, seed=0)

    losses = []
    measured = None
    for step in range(spec.steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = _loss(model[0], batches.next())
        torch.autograd.backward(loss)
        for chunk in model:
            chunk.finish_grad_sync()
        done, _, _ = optimizer.step()
        if not done:
            raise RuntimeError(f"the optimizer skipped step {step + 1}")
        if step == spec.steps - 1:
            measured = _measured(measure_bytes(model, optimizer), optimizer)
        losses.append(_mean_over_ranks(loss.detach()))
        tell(seed=seed, step=step + 1, loss=losses[-1])
    with torch.no_grad():
        final = torch.stack([_loss(model[0], held_out.next()) for _ in range(16)]).mean()
    everywhere: list[Any] = [None] * spec.world_size
    torch.distributed.all_gather_object(everywhere, measured)
    return {
        "seed": seed,
        "losses": losses,
        "held_out": _mean_over_ranks(final),
        "ranks": everywhere,
        "optimizer": type(optimizer).__name__,
        "store_param_remainders": bool(getattr(optimizer_config, "store_param_remainders", False)),
        "adam_beta2": float(optimizer_config.adam_beta2),
    }


def _measured(found: Any, optimizer: Any) -> dict[str, Any]:
    """The measured bytes, and the dtypes of the gradients that the optimizer reads, for JSON."""
    from precision_shim.precision.dtypes import name_of

    read: set[str] = set()
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        for group in one.optimizer.param_groups:
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None)
                grad = param.grad if grad is None else grad
                if grad is not None:
                    read.add(name_of(grad.dtype))
    return {
        "parts": {name: asdict(part) for name, part in found.parts.items()},
        "main_grads": sorted(read),
        "per_parameter": found.per_parameter,
        "total": found.total,
        "trainable": found.trainable,
        "owned": found.owned,
    }


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-byte loss in nats."""
    import torch

    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.shape[1]
    positions = torch.arange(length).expand_as(inputs)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    result: torch.Tensor = model(inputs, positions, hidden, labels=labels).float().mean()
    return result


def _mean_over_ranks(value: torch.Tensor) -> float:
    import torch

    value = value.detach().clone().float()
    torch.distributed.all_reduce(value)
    return float(value) / torch.distributed.get_world_size()


class _Batches:
    """Random windows of the text, the same for any number of ranks; each rank reads its share."""

    def __init__(self, corpus: bytes, spec: Spec, rank: int, seed: int) -> None:
        import torch

        self._corpus = torch.frombuffer(bytearray(corpus), dtype=torch.uint8).long()
        self._generator = torch.Generator().manual_seed(seed)
        self._spec = spec
        self._rank = rank

    def next(self) -> torch.Tensor:
        """This rank's sequences, one byte longer than the model's input."""
        import torch

        window = self._spec.sequence + 1
        starts = torch.randint(
            len(self._corpus) - window, (self._spec.global_batch,), generator=self._generator
        )
        mine = starts[self._rank :: self._spec.world_size]
        return torch.stack([self._corpus[start : start + window] for start in mine.tolist()])


def read_text(path: str | None) -> bytes:
    """The text to train on: a file, or the texts of Python's ``help()`` topics.

    Every Python has these topics: about 700 kB of English prose and some code.
    """
    if path is not None:
        return Path(path).read_bytes()
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


if __name__ == "__main__":
    main(sys.argv[1:])
