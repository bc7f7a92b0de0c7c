"""A driver of ROLL's: ROLL's own start, pipelines and clusters in a Ray cluster; prints results.

Run as a script. Arguments: the strategy of the trained model, a folder for the job's files. The
pipeline is ROLL's DPO pipeline, because it needs no rollout engine. A pipeline with a rollout in
its config is started up to its first worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 5
WORKER = "tests.roll.workers.Worker"


def write_model(folder: Path) -> None:
    """Write a tiny Llama, and a tokenizer whose tokens are numbers."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *map(str, range(29))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **special)
    made.chat_template = "{% for one in messages %}{{ one['content'] + ' ' }}{% endfor %}"
    made.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def dpo(strategy: str, folder: Path) -> dict[str, Any]:
    """The config of a job that trains in fp16 beside a reference model in bf16."""
    rows = [
        {"instruction": "1 2 3", "chosen": f"{number} 4 5", "rejected": f"7 {number} 2"}
        for number in range(2 * STEPS)
    ]
    data = folder / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    sharded = strategy == "fsdp2_train"
    # The layers of TransformerEngine need a GPU.
    local = {"transformer_impl": "local", "use_cpu": True, "use_distributed_optimizer": True}

    def model(dtype: str, trains: bool) -> dict[str, Any]:
        name = strategy if trains else strategy.replace("train", "infer")
        return {
            "worker_cls": WORKER,
            "model_args": {
                "dtype": dtype,
                "attn_implementation": "sdpa",
                "disable_gradient_checkpointing": True,
            },
            "strategy_args": {
                "strategy_name": name,
                "strategy_config": {"param_dtype": dtype} if sharded else local,
            },
            "device_mapping": "[0]",
            "infer_batch_size": 2,
        }

    return {
        "exp_name": "tests",
        "track_with": "stdout",
        "output_dir": str(folder / "output"),
        "pretrain": str(folder / "model"),
        "rollout_batch_size": 2,
        "sequence_length": 8,
        "max_steps": STEPS,
        "actor_train": {
            **model("fp16", True),
            "training_args": {"per_device_train_batch_size": 2, "learning_rate": 0.01},
            "data_args": {"file_name": [str(data)], "preprocessing_num_workers": 1},
        },
        # This worker alone is left out.
        "reference": {**model("bf16", False), "system_envs": {"PRECISION_SHIM": "0"}},
    }


def decided() -> dict[str, str]:
    """What the shim has decided in this process, by subject and feature."""
    shim = sys.modules.get("precision_shim")
    decisions = shim.status().decisions if shim is not None else ()
    return {f"{one.subject}: {one.feature}": one.chosen for one in decisions}


def start_with_rollout(strategy: str) -> Any:
    """Start a pipeline whose rollout computes in bf16 beside an fp16 trainer.

    Returns:
        The handle of ROLL's storage actor, which has to outlive the next pipeline's start.
    """
    import ray
    from dacite import from_dict
    from roll.distributed.scheduler import transfer_backend
    from roll.pipeline.base_pipeline import BasePipeline
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    from tests.roll import jobs

    values = jobs.config(
        "fp16", strategy, **({} if "mega" in strategy else {"param_dtype": "fp16"})
    )
    values["track_with"] = "stdout"
    values["actor_infer"]["model_args"]["dtype"] = "bf16"
    for name in ("actor_train", "actor_infer"):
        values[name]["device_mapping"] = "[0]"
    pipeline = BasePipeline(from_dict(data_class=RLVRConfig, data=values))
    pipeline.resource_manager.destroy_placement_group()
    while not ray.available_resources().get("GPU"):
        time.sleep(0.1)
    return transfer_backend._shared_storage


def main(strategy: str, folder: Path) -> dict[str, Any]:
    """Train in ROLL's own pipeline, and ask its workers."""
    from dacite import from_dict
    from roll.distributed.scheduler.initialize import init

    from tests.every_framework.lacking import answers
    from tests.roll import workers  # noqa: F401  (the CPU in the place of the GPU)

    write_model(folder / "model")
    # In the order of ROLL's start scripts.
    from roll.pipeline.dpo.dpo_config import DPOConfig
    from roll.pipeline.dpo.dpo_pipeline import DPOPipeline

    config = from_dict(data_class=DPOConfig, data=dpo(strategy, folder))
    asked = answers()
    init()
    storage = start_with_rollout(strategy)
    found: dict[str, Any] = {"pid": os.getpid(), "driver": decided()}
    pipeline = DPOPipeline(config)
    found["driver"] |= decided()
    del storage
    for name in ("actor_train", "reference"):
        getattr(pipeline, name).execute_all_sync("started")
    pipeline.run()
    found["steps"] = pipeline.state.log_history
    for name in ("actor_train", "reference"):
        (found[name],) = getattr(pipeline, name).execute_all_sync("report")
    saved = folder / "output" / "actor_train-0-G0" / f"checkpoint-{STEPS - 1}"
    found["asked"] = sorted({*asked})
    found["saved"] = sorted(one.name for one in saved.iterdir())
    return found


if __name__ == "__main__":
    import ray

    from tests.processes.ray_cluster import older, tell

    strategy, place = sys.argv[1:]
    os.chdir(place)
    with older(4, num_gpus=1):
        tell(lambda: main(strategy, Path(place)))
        ray.shutdown()
