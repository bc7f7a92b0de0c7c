"""Train with the real Megatron-core on a CPU, for tests and demonstrations.

With the name ``"cuda"`` mapped to the CPU, Megatron's real DDP and DistributedOptimizer (0.15.3 to
0.19.0) train a small GPT, in one process or several over gloo. Speed, memory, overlap, and CUDA
kernels with their rounding are not reproduced. TransformerEngine's layers are absent.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CPU_TRANSFORMER", "cuda_means_cpu", "megatron_on_cpu", "model_parallel", "tiny_gpt"]

CPU_TRANSFORMER = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}
"""Fields of Megatron's TransformerConfig that are needed on a CPU, which has no fused kernels."""

_CPU = torch.device("cpu")

_CUDA_TYPE_NAMES = {
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.FloatTensor": "torch.cuda.FloatTensor",
}


def _names_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    # On a CPU, verl's get_model names the device "cpu:cpu"; torch.cpu.current_device() is "cpu".
    return isinstance(value, str) and (value.startswith("cuda") or value == "cpu:cpu")


_ANSWERED = (torch.Tensor.pin_memory, torch.Tensor.type)
"""Functions of one tensor for which the CPU answers."""


class _CudaMeansCpu(TorchFunctionMode):
    """Runs every torch function as if ``"cuda"`` was another name for the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        one = len(args) == 1 and isinstance(args[0], torch.Tensor)
        if one and not kwargs and func not in _ANSWERED:  # most calls read a property
            return func(*args)
        kwargs = dict(kwargs or {})
        if func is torch.device:
            named = args[0] if args else kwargs.get("type", kwargs.get("device"))
            return _CPU if _names_cuda(named) else func(*args, **kwargs)
        device = kwargs.get("device")
        # A bare number that is passed as a device means a GPU.
        if _names_cuda(device) or (isinstance(device, int) and not isinstance(device, bool)):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.pin_memory:
            return args[0]
        args = tuple(_CPU if _names_cuda(arg) else arg for arg in args)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return _CUDA_TYPE_NAMES.get(result, result)
        return result


class _Stream:
    """Stands in for ``torch.cuda.Stream`` and ``Event``, and does nothing: a CPU works in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait = wait_stream = wait_event = synchronize = record = _nothing

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Stream) -> float:
        return 0.0


def _nothing() -> Callable[..., None]:
    # Give each patched name its own function, because torch.compile uses functions as dict keys.
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def _torch_cuda_answers() -> dict[str, Any]:
    stream = _Stream()
    silent = (
        "set_device",
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "set_rng_state",
        "set_stream",
    )
    return {
        **{name: _nothing() for name in silent},
        "current_device": lambda: 0,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "current_stream": lambda *args, **kwargs: stream,
        "default_stream": lambda *args, **kwargs: stream,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *args, **kwargs: (0, 0),
    }


@contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Map CUDA device names to the CPU in torch, inside the context, which can be nested.

    A device such as ``"cuda"``, ``"cuda:0"`` or a bare number means the CPU in every torch function
    and in ``Tensor.to``, in the calling thread only. In the whole process, streams, events,
    ``synchronize`` and seed functions do nothing. ``Tensor.type()`` returns a GPU's names, which
    Megatron's optimizers compare. ``torch.cuda.is_available()`` is unchanged.
    """
    answers = _torch_cuda_answers()
    nvtx = {"range_push": _nothing(), "range_pop": _nothing()}
    with _patch(torch.cuda, answers), _patch(torch.cuda.nvtx, nvtx), _CudaMeansCpu():
        yield


def _patch(owner: Any, values: dict[str, Any]) -> Any:
    return mock.patch.multiple(owner, create=True, **values)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let the real Megatron-core build and train models on a CPU, inside the context.

    Includes :func:`cuda_means_cpu`. Megatron's ``CudaRNGStatesTracker.fork`` does nothing, so set
    ``use_cpu_initialization`` and use no dropout, as :func:`tiny_gpt` does. ``torch.compile`` has
    no effect.

    Raises:
        ImportError: megatron-core is not installed.
    """
    # Import Megatron before patching: functions that Megatron compiles need the real torch.cuda.
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    def remember(self: Any, name: str, seed: int) -> None:
        self.seeds_.add(seed)
        self.states_[name] = torch.get_rng_state()

    def fork(self: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    tracker = megatron_random.CudaRNGStatesTracker
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_means_cpu())
        stack.enter_context(_patch(tracker, {"add": remember, "fork": fork}))
        if not hasattr(moe_utils, "te_general_gemm"):
            # The router compares te_general_gemm with None, but without TransformerEngine the
            # name may not exist at all (megatron-core 0.16.1).
            stack.enter_context(_patch(moe_utils, {"te_general_gemm": None}))
        # Compiling Megatron's small functions for a CPU takes longer than training.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def model_parallel(
    world_size: int = 1,
    rank: int = 0,
    init_file: str | None = None,
    *,
    seed: int = 1234,
    **parallel: Any,
) -> Iterator[None]:
    """Set up a gloo process group and Megatron's parallel state, and destroy them on exit.

    Each of the ``world_size`` processes passes its own ``rank`` and the same ``init_file``, a path
    that does not exist yet (one process may pass None). ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``
    are set inside the context. ``seed`` is for torch and Megatron's tracker of random states;
    ``parallel`` are arguments of ``initialize_model_parallel``, such as
    ``tensor_model_parallel_size=2``.
    """
    from megatron.core import parallel_state, tensor_parallel

    if world_size > 1 and init_file is None:
        raise ValueError("several processes need an init_file to meet at")
    with contextlib.ExitStack() as stack:
        if init_file is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            init_file = os.path.join(folder, "rendezvous")
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
        stack.enter_context(environment({name: str(n) for name, n in numbers.items()}))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{init_file}", world_size=world_size, rank=rank
        )
        stack.callback(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel(**parallel)
        stack.callback(parallel_state.destroy_model_parallel)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables inside the context; restore these alone, as install() sets others meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def tiny_gpt(
    dtype: torch.dtype = torch.bfloat16,
    *,
    hidden_size: int = 16,
    vocab_size: int = 32,
    max_sequence_length: int = 8,
    num_moe_experts: int | None = None,
    **config: Any,
) -> Callable[..., Any]:
    """Return a provider of small GPT models that run on a CPU.

    The models have Megatron's local layer spec, no dropout, no fused kernels, and untied embeddings
    and output, and are initialized on the CPU. The provider's attribute ``config`` is the models'
    ``TransformerConfig``, which verl's ``get_model`` accepts as ``transformer_config``.

    Args:
        dtype: dtype of the parameters: bf16, fp16 or fp32. The caller or ``get_model`` wraps a
            16-bit model in Megatron's ``Float16Module``, which converts the parameters.
        hidden_size: width of the model.
        vocab_size: number of tokens.
        max_sequence_length: number of positions.
        num_moe_experts: number of experts; None for a dense model.
        config: further fields of ``TransformerConfig``, such as ``num_layers`` (default 2).

    Returns:
        ``provider(pre_process=True, post_process=True, vp_stage=None, **ignored)``, which returns a
        ``GPTModel``. Parameters of Megatron's layers that read ``params_dtype`` are in ``dtype``,
        all other parameters are in fp32.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"tiny_gpt: dtype must be bf16, fp16 or fp32, got {dtype}")
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": hidden_size,
        "num_attention_heads": 2,
        "ffn_hidden_size": 4 * hidden_size,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **CPU_TRANSFORMER,
    }
    if num_moe_experts is not None:
        values |= {
            "num_moe_experts": num_moe_experts,
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        }
    values |= config
    transformer_config = TransformerConfig(**values)

    def provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        **ignored: Any,
    ) -> Any:
        spec = get_gpt_layer_local_spec(num_experts=num_moe_experts, moe_grouped_gemm=False)
        return GPTModel(
            config=transformer_config,
            transformer_layer_spec=spec,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )

    provider.config = transformer_config  # type: ignore[attr-defined]
    return provider
