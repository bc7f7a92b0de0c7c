"""slime's and miles' actors on a CPU, in the processes that the trainers start."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from typing import Any

_open = contextlib.ExitStack()


def stay_on_cpu(name: str) -> None:
    """Map CUDA to the CPU in this process until it ends, and let the actor start.

    Args:
        name: the trainer, whose actor is just being imported.
    """
    import torch

    from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu

    _open.enter_context(megatron_on_cpu())
    torch.cuda.mem_get_info = lambda *args: (1, 1)  # miles divides one by the other
    if name == "slime":  # which refuses numpy 2
        start = importlib.import_module("slime.backends.megatron_utils.initialize")
        start.np = types.SimpleNamespace(__version__="1.26", random=start.np.random)
    # The model keeps its first weights: what converts them needs Megatron-Bridge or another model.
    reading = importlib.import_module(f"{name}.backends.megatron_utils.checkpoint")
    reading._load_checkpoint_hf = lambda **kwargs: (0, 0)
    if name == "miles":
        dumper = importlib.import_module("miles.utils.dumper_utils")  # which reads SGLang's class
        dumper.DumperConfig = types.SimpleNamespace(_kv_pairs_to_dict=lambda pairs: {})


def make_model(pre_process: bool = True, post_process: bool = True) -> Any:
    """Megatron's tiny GPT, with plain causal attention over a micro-batch of packed sequences.

    Both trainers call the function that ``--custom-model-provider-path`` names.
    """
    from megatron.training.global_vars import get_args

    from precision_shim_tools.testing import tiny_gpt

    args = get_args()
    provider = tiny_gpt(
        args.params_dtype,
        fp16=args.fp16,
        bf16=args.bf16,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
    )
    model = provider(pre_process, post_process)
    own = model.forward

    @functools.wraps(own)
    def forward(*inputs: Any, packed_seq_params: Any, loss_mask: Any, **more: Any) -> Any:
        return own(*inputs, **more)

    model.forward = forward
    return model
