"""The names of vLLM and SGLang on which the shim relies; this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

_FLAGS = ("dtype", "quantization", "kv_cache_dtype")
_NAMES = ("float16", "bfloat16", "float32")
_HEAD = "layers.logits_processor"
VLLM, SGLANG = "vllm.config.model", "sglang.srt.configs.model_config"
VERIFY = "_get_and_verify_dtype"

RELIED_ON: Mapping[str, Mapping[tuple[str, ...], tuple[str, ...]]] = {
    "vllm": {
        ("vllm.engine.arg_utils",): (*_FLAGS, "hf_overrides"),
        (VLLM,): (*_NAMES, "_resolve_auto_dtype", "_check_valid_dtype"),
        (f"vllm.model_executor.{_HEAD}",): ("head_dtype",),
    },
    "sglang": {
        ("sglang.srt.server_args", "sglang.srt.arg_groups.field_order"): (
            *_FLAGS,
            "torchao_config",
        ),
        (SGLANG,): (*_NAMES, VERIFY),
        (f"sglang.srt.{_HEAD}",): ("enable_fp32_lm_head",),
    },
}
"""The names of a rollout engine on which the shim relies, by modules, of which one has them."""
