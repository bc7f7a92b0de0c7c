"""Tools for testing precision without a GPU: for this project, its contributors and users.

Frameworks and Megatron-core are real, and so is the optimizers' arithmetic. Only code that needs a
GPU is replaced, and the docstring of each replacement lists its differences from the original. A
passing test has run the framework's code, but no CUDA kernel.

This example trains a tiny GPT with Megatron's DDP and precision-aware DistributedOptimizer, on
any laptop with torch and megatron-core::

    from precision_shim.testing import (
        measure_bytes, megatron_on_cpu, model_parallel, stand_in_transformer_engine, tiny_gpt,
    )

    with stand_in_transformer_engine(), megatron_on_cpu(), model_parallel():
        provider = tiny_gpt(torch.bfloat16)
        chunks = verl_get_model(provider, transformer_config=provider.config)
        optimizer = get_megatron_optimizer(optimizer_config, chunks)
        ...                                       # forward, backward, optimizer.step()
        print(measure_bytes(chunks, optimizer))   # bytes per parameter, from live tensors

Enter the three context managers in the order of the example. Each context manager undoes its
changes on exit. After the exit, models and optimizers still work as plain torch objects, but can be
trained only inside :func:`megatron_on_cpu`.

* :func:`stand_in_transformer_engine` lets Megatron import a stand-in for the ``FusedAdam`` of any
  TransformerEngine version from 1.13 on, to test each version's rules.
* :class:`FusedAdam` is the stand-in; it can also be used as a plain optimizer.
* :func:`split_master` and :func:`join_master` convert between fp32 masters and bf16 parameters with
  int16 remainders, bit for bit.
* :func:`megatron_on_cpu`, :func:`cuda_means_cpu`, :func:`model_parallel` and
  :func:`tiny_gpt` are the harness for Megatron.
* :func:`measure_bytes` counts the bytes that are really allocated.

Importing this package imports neither torch nor Megatron; each name in ``__all__`` is loaded on
first use.
"""

from precision_shim._lazy import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .fused_adam import *  # noqa: F403
    from .measure import *  # noqa: F403
    from .megatron_cpu import *  # noqa: F403
    from .transformer_engine import *  # noqa: F403

_NAMES = {
    ".fused_adam": ("FusedAdam", "FusedSGD", "fused_adam_for", "join_master", "split_master"),
    ".measure": ("MeasuredBytes", "measure_bytes"),
    ".megatron_cpu": ("cuda_means_cpu", "megatron_on_cpu", "model_parallel", "tiny_gpt"),
    ".transformer_engine": ("StandIn", "real_transformer_engine", "stand_in_transformer_engine"),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_WHERE)
__getattr__, __dir__ = lazily(__name__, _WHERE)
