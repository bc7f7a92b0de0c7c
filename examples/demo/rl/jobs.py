"""The jobs of the RL demo: each starts verl's own GRPO by verl's command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from precision_shim.process.settings import PREFIX

from ...processes.keeper import WORKERS
from . import vllm_on_cpu
from .task import ANSWER, ANSWERS, PROMPTS

__all__ = ["ENVIRONMENT", "FORCED", "JOBS", "Job"]

ENVIRONMENT = "environment.json"
"""The name of the file with a job's environment."""

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]
_WORKER = "actor_rollout_ref"
_IN_VLLM = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
FIRST_SCALE, GROWS_AFTER = 2**19, 16
"""The loss scale of ``FORCED``: too high on purpose, so that steps overflow."""
FOLLOW = f"{PREFIX}_ROLLOUT=follow"


@dataclass(frozen=True)
class Job:
    """One job of the RL demo.

    Attributes:
        name: the job's name in file names and in the report.
        trainer: dtype that the trainer computes in, as verl names it.
        rollout: the rollout's dtype in the job's command.
        shim: whether the shim is on. It then writes the trainer's dtype into the rollout's key.
        overflows: whether the shim starts with a loss scale that makes steps overflow.
    """

    name: str
    trainer: str
    rollout: str
    shim: bool = False
    overflows: bool = False

    @property
    def title(self) -> str:
        """The job's name in the report."""
        if self.shim:
            set_by = f"rollout set from {self.rollout} to {self.trainer} by the shim"
            forced = ", loss scale too high on purpose" if self.overflows else ""
            return f"{self.trainer} trainer, {set_by}{forced}"
        return f"{self.trainer} trainer, {self.rollout} rollout, no shim"

    def environment(self, folder: Path) -> dict[str, str]:
        """The environment variables of the job's processes.

        Args:
            folder: contains the metadata of ``vllm``; the job writes its metrics into it.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        kept = {name: value for name, value in kept.items() if not name.startswith(PREFIX)}
        # Two processes import vLLM again, which takes a minute without cached bytecode.
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        paths = [str(folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {
            "PYTHONPATH": os.pathsep.join(paths),
            "VERL_FILE_LOGGER_PATH": str(self.metrics(folder)),
            "VERL_LOGGING_LEVEL": "WARN",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # otherwise Ray would use another session's token
            "RAY_DEDUP_LOGS": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",  # no idle process per CPU
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_worker_register_timeout_seconds": "300",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # runs the model in its engine's process
            "VLLM_NO_USAGE_STATS": "1",
        }
        shim = {PREFIX: "1", **dict([FOLLOW.split("=")])} if self.shim else {PREFIX: "0"}
        if self.overflows:
            shim[f"{PREFIX}_LOSS_SCALE_INIT"] = str(FIRST_SCALE)
            shim[f"{PREFIX}_GROWTH_INTERVAL"] = str(GROWS_AFTER)
        return {**kept, **vllm_on_cpu.ENVIRONMENT, **ours, **shim}

    def metrics(self, folder: Path) -> Path:
        """The file that verl's logger ``file`` writes."""
        return folder / f"{self.name}.jsonl"

    def command(self, folder: Path, steps: int) -> list[str]:
        """Arguments that make ``keeper`` run verl's entry point in a fork, with this job's keys.

        Args:
            folder: contains the model, the prompts and the file ``ENVIRONMENT``.
            steps: the number of training steps.
        """
        fork = ["--fork", str(folder / ENVIRONMENT)]
        return [*fork, "verl.trainer.main_ppo", *self._keys(folder, steps)]

    def engine_keys(self) -> dict[str, object]:
        """The keys of the trainer's engine: FSDP2."""
        actor = f"{_WORKER}.actor"
        return {
            f"+{actor}.fsdp_config.mixed_precision.param_dtype": self.trainer,
            f"{actor}.strategy": "fsdp2",
            f"{actor}.fsdp_config.use_torch_compile": False,
        }

    def _keys(self, folder: Path, steps: int) -> list[str]:
        actor, rollout = f"{_WORKER}.actor", f"{_WORKER}.rollout"
        ray = "ray_kwargs.ray_init"
        keys: dict[str, object] = {
            # The keys in which the jobs differ.
            **self.engine_keys(),
            f"{rollout}.dtype": _IN_VLLM[self.rollout],
            # The task, and the training.
            "algorithm.adv_estimator": "grpo",
            "data.train_files": folder / "prompts.parquet",
            "data.val_files": folder / "prompts.parquet",
            "data.train_batch_size": PROMPTS,
            "data.max_prompt_length": 8,
            "data.max_response_length": ANSWER,
            "data.dataloader_num_workers": 0,
            "data.shuffle": False,
            "reward.custom_reward_function.path": _HERE / "task.py",
            "reward.num_workers": 1,
            f"{_WORKER}.model.path": folder / "model",
            f"{_WORKER}.model.use_remove_padding": False,
            f"{_WORKER}.model.enable_gradient_checkpointing": False,
            f"+{_WORKER}.model.override_config.attn_implementation": "sdpa",
            f"{actor}.ppo_mini_batch_size": PROMPTS,
            f"{actor}.ppo_micro_batch_size_per_gpu": PROMPTS * ANSWERS,
            f"{actor}.use_kl_loss": False,
            f"{actor}.use_torch_compile": False,
            f"{actor}.optim.lr": 1e-3,
            f"{rollout}.name": "vllm",
            f"{rollout}.n": ANSWERS,
            f"{rollout}.tensor_model_parallel_size": 1,
            f"{rollout}.enforce_eager": True,
            f"{rollout}.free_cache_engine": False,  # a CPU job has no GPU memory to free
            f"+{rollout}.enable_sleep_mode": False,
            f"{rollout}.max_num_seqs": PROMPTS * ANSWERS,
            f"{rollout}.max_model_len": 32,
            f"{rollout}.max_num_batched_tokens": 2048,
            f"{rollout}.log_prob_micro_batch_size_per_gpu": PROMPTS * ANSWERS,
            f"{rollout}.agent.num_workers": 1,
            f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 16,
            f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": 32 << 20,
            f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend": "uni",
            # For one small machine.
            "trainer.device": "cpu",
            "trainer.n_gpus_per_node": 1,
            "trainer.nnodes": 1,
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": 1,
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
            "trainer.save_freq": -1,
            "trainer.balance_batch": False,
            "trainer.logger": "[console,file]",
            "trainer.v1.sampler.custom_sampler.path": _HERE / "sampler.py",
            "trainer.v1.sampler.custom_sampler.name": "Sampler",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            f"{ray}.num_cpus": 16,  # verl's actors need more than two CPUs, and wait for each other
            f"+{ray}.num_gpus": 1,
            f"+{ray}.include_dashboard": False,
            f"+{ray}.object_store_memory": 200_000_000,
            f"+{ray}._temp_dir": folder / "ray",
            f"+{ray}.runtime_env.py_executable": WORKERS,
            f"+{ray}.address": "local",
        }
        return [f"{name}={value}" for name, value in keys.items()]


JOBS = (
    Job("bf16-bf16", "bf16", "bf16"),
    Job("fp16-bf16", "fp16", "bf16"),
    Job("with-shim", "fp16", "bf16", shim=True),
    Job("fp16-fp16", "fp16", "fp16"),
)
"""The third has the second's command. The fourth is the control: what it shows needs no shim."""
FORCED = Job("overflows", "fp16", "bf16", shim=True, overflows=True)
"""The third with steps that overflow, in a run of its own: a skipped step teaches nothing."""
