"""NeMo-RL's own generation worker with the real vLLM: the engine has the worker's precision.

Stand-ins: a GPU in Ray, no NUMA node, and vLLM's sleep mode, which NeMo-RL always enables. The
tests leave out NeMo-RL's refit, which needs an older vLLM (``FusedMoE``) and CUDA's ipc.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ..tiny_models import make_checkpoint
from .engines import read, share_on_bf16s_grid, ways

DTYPES = ("float16", "bfloat16", "float32")
PROMPT, NEW = 6, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in fp32, whose weights are exact in no 16-bit dtype."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), width=64)


@pytest.fixture(scope="module")
def on_cpu(both_sides: ModuleType) -> Iterator[None]:
    """Replace GPU, NUMA node and sleep mode."""
    import ray
    from examples.demo.rl.vllm_on_cpu import keep_weights
    from nemo_rl.distributed import numa_utils
    from vllm.platforms.cpu import CpuPlatform

    keep_weights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get_gpu_ids", lambda: [0])
        patch.setattr(numa_utils, "bind_to_gpu_numa", lambda *args, **kwargs: False)
        for name in ("is_sleep_mode_available", "is_cumem_allocator_available"):
            patch.setattr(CpuPlatform, name, lambda self: True)
        yield


@pytest.fixture(scope="module", params=DTYPES)
def worker(request: pytest.FixtureRequest, on_cpu: None, model: Path) -> Any:
    """NeMo-RL's worker object in this process, without its Ray actor."""
    from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl

    config = {
        "model_name": str(model),
        "backend": "vllm",
        "max_new_tokens": NEW,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "_pad_token_id": 0,
        "vllm_cfg": {
            "precision": request.param,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "expert_parallel_size": 1,
            "gpu_memory_utilization": 0.1,
            "max_model_len": PROMPT + NEW,
            "skip_tokenizer_init": False,
            "async_engine": False,
            "load_format": "auto",
            "enforce_eager": True,
            "kv_cache_dtype": "auto",
            "enable_prefix_caching": False,
        },
        "vllm_kwargs": {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 4},
    }
    return request.param, VllmGenerationWorkerImpl(
        config, bundle_indices=[0], fraction_of_gpus=1.0, seed=0
    )


def test_its_engine_computes_in_the_precision_that_the_config_names(
    worker: Any, model: Path
) -> None:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from transformers import AutoModelForCausalLM

    dtype, one = worker
    assert one.llm.llm_engine.vllm_config.model_config.dtype == getattr(torch, dtype)
    (held,) = one.llm.collective_rpc(read)
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert "once" in ways(held, {n: p.detach() for n, p in trainer.state_dict().items()})
    assert (share_on_bf16s_grid(held) == 1.0) is (dtype == "bfloat16")
    tokens = torch.randint(3, 64, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    answers = one.generate(
        BatchedDataDict({"input_ids": tokens, "input_lengths": torch.tensor([PROMPT] * 2)})
    )
    end = PROMPT + int(answers["generation_lengths"][0])
    sampled = answers["logprobs"][0, PROMPT:end]
    assert sampled.dtype == torch.float32
    with torch.no_grad():
        logits = trainer(answers["output_ids"][:1, :end]).logits[0, PROMPT - 1 : -1]
    every = logits.log_softmax(-1)
    expected = every.gather(-1, answers["output_ids"][0, PROMPT:end, None])[:, 0]
    # A 16-bit engine differs by rounding; a shift by one token would make a far larger difference.
    assert (sampled - expected).abs().max() < every.std()
