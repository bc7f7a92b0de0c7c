"""A config of a ROLL job, as ROLL's own example has it."""

from __future__ import annotations

from typing import Any

WHERE = ("--config_path", "qwen2.5-7B-rlvr_megatron", "--config_name", "rlvr_config")
"""The config of ROLL's own example; ROLL's wheel lacks the example."""


def config(dtype: str = "bf16", strategy: str = "megatron_train", **written: Any) -> dict[str, Any]:
    """The keys of ROLL's example that matter here.

    Args:
        dtype: ``model_args.dtype`` of the actor, the rollout and the reference model.
        strategy: the actor's strategy.
        written: more keys of the actor's ``strategy_config``.
    """
    there = {"use_distributed_optimizer": True, **written}
    actor = {"strategy_name": strategy, "strategy_config": there}
    infer = {"strategy_name": "vllm", "strategy_config": {}}
    eight = "list(range(0,8))"
    return {
        "exp_name": "tests",
        "rollout_batch_size": 64,
        "prompt_length": 8,
        "response_length": 8,
        "adv_estimator": "reinforce",
        "pretrain": "none",
        "reward_pretrain": "none",
        "actor_train": {
            "model_args": {"dtype": dtype},
            "strategy_args": actor,
            "device_mapping": eight,
        },
        "actor_infer": {
            "model_args": {"dtype": dtype},
            "strategy_args": infer,
            "device_mapping": eight,
            "generating_args": {"num_return_sequences": 1},
        },
        "reference": {"model_args": {"dtype": dtype}},
    }
