"""The names of vLLM and SGLang on which the shim relies; this module imports no torch."""

from __future__ import annotations

VLLM, SGLANG = "vllm.config.model", "sglang.srt.configs.model_config"
VERIFY, TEXT_PART = "_get_and_verify_dtype", "get_hf_text_config"
_FLAGS, _NAMES = "dtype quantization kv_cache_dtype", "float16 bfloat16 float32"
RELIED_ON = {
    "vllm": (
        f"vllm.engine.arg_utils: {_FLAGS} hf_overrides",
        f"{VLLM}: {_NAMES} {VERIFY} _check_valid_dtype",
        "vllm.model_executor.layers.logits_processor: head_dtype",
    ),
    "sglang": (
        f"sglang.srt.server_args sglang.srt.arg_groups.field_order: {_FLAGS} torchao_config",
        f"{SGLANG}: {_NAMES} {VERIFY} {TEXT_PART}",
        "sglang.srt.layers.logits_processor: enable_fp32_lm_head",
    ),
}
"""Of each rollout engine: modules, and the names that one of these modules has."""
