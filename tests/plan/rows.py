"""Jobs of verl, SkyRL, NeMo-RL and torchtitan, and what the plan tells of each, as a table."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

import pytest
from packaging.version import Version

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FSDP, OPTIM = f"{ACTOR}.fsdp_config", f"{ACTOR}.optim"
MIXED, OVERRIDE = f"{FSDP}.mixed_precision", f"{OPTIM}.override_optimizer_config"
CRITICS = "critic.optim.override_optimizer_config"
VERLS_LAYERS = f"{ACTOR}.megatron.override_transformer_config"
OVERRIDES = "actor_rollout_ref.model.override_config"
VERL = ("python3", "-m", "verl.trainer.main_ppo", "trainer.nnodes=8", "trainer.n_gpus_per_node=8")
GRPO = (*VERL, "algorithm.adv_estimator=grpo")
# Hydra takes overrides in one row.
GRPO_ON_MEGATRON = (*VERL[:3], "--config-name=ppo_megatron_trainer", *GRPO[3:])

SKYRL = ("uv", "run", "-m", "skyrl.train.entrypoints.main_base")
SKYRL_ON_FSDP = (*SKYRL, "trainer.strategy=fsdp2")
SKYRL_ON_MEGATRON = (*SKYRL, "trainer.strategy=megatron")
SKYRLS_MEGATRON = "trainer.policy.megatron_config"
KWARGS = f"{SKYRLS_MEGATRON}.optimizer_config_kwargs"
LAYERS = f"{SKYRLS_MEGATRON}.transformer_config_kwargs"
SKYRLS_MIXED = "trainer.policy.fsdp_config.mixed_precision"

NEMO_RL = """
policy:
  model_name: {model}
  precision: bfloat16
  dtensor_cfg: {{enabled: false, tensor_parallel_size: 2}}
  optimizer: {{name: torch.optim.AdamW, kwargs: {{}}}}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    expert_model_parallel_size: 8
    expert_tensor_parallel_size: 2
    sequence_parallel: true
    optimizer: {{optimizer: adam, bf16: true, fp16: false, params_dtype: float32,
                adam_beta2: 0.999, use_distributed_optimizer: true,
                use_precision_aware_optimizer: true}}
    distributed_data_parallel_config: {{grad_reduce_in_fp32: false}}
cluster: {{gpus_per_node: 8, num_nodes: 8}}
"""
"""The file ``job.yaml`` of the jobs below, which train this model on Megatron."""
NEMO_RL_ON_MEGATRON = ("python3", "nemo_rl/run_grpo.py", "--config", "job.yaml")
DTENSOR = (
    *NEMO_RL_ON_MEGATRON,
    *("++policy.megatron_cfg.enabled=false", "++policy.dtensor_cfg.enabled=true"),
)

LLAMA = ("-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel")
"""The config has 16 attention heads, and 16 heads for keys and values."""
TITAN = ("torchrun", "--nproc-per-node=8", *LLAMA)

UNCOERCED = "PRECISION_SHIM_FEATURES=-dtype-coercion"


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")


def since(release: str, package: str = "verl") -> pytest.MarkDecorator:
    here = Version(version(package)) if importlib.util.find_spec(package) else Version("0")
    reason = f"{package} has this from {release}"
    return pytest.mark.skipif(here < Version(release), reason=reason)


Problems = Mapping[str, str | Sequence[str]]


def row(
    package: str,
    line: Sequence[str],
    *words: str,
    problems: Problems | None = None,
    notes: Sequence[str | Sequence[str]] = (),
    silent: Sequence[str] = (),
    built: Sequence[str] = (),
    marks: Sequence[pytest.MarkDecorator] = (),
) -> object:
    """A job that is planned.

    Args:
        package: the framework's.
        line: the launch line, in front of ``words``.
        words: the overrides of which the row is about.
        problems: by key, texts in ``"CODE SUBJECT: MESSAGE. REMEDY"`` of the only problem there.
        notes: whole notes of the plan's, or texts that are all in one of its notes; each is there
            once. A model's note begins with the model's name here.
        silent: texts that are in no other note.
        built: the names of the planned models.
        marks: further marks of pytest's.
    """
    texts = {key: (one,) if isinstance(one, str) else one for key, one in (problems or {}).items()}
    return pytest.param(
        *((*line, *words), texts, notes, silent, list(built)),
        marks=(needs(package), *marks),
        id=" ".join(words[:1]),
    )


def _verls() -> Iterator[object]:
    on_megatron, native = GRPO_ON_MEGATRON, (since("0.9"),)
    # verl's own defaults are not written.
    silent, gae = ["without effect"], "algorithm.adv_estimator=gae"
    yield row("verl", GRPO, f"{ACTOR}.use_kl_loss=True", gae, silent=silent)
    yield row("verl", on_megatron, gae, silent=silent)
    yield row("verl", GRPO, "model_engine=torchtitan", silent=silent, marks=[since("0.8")])
    # LoRA that the engine refuses, or does not read; the actor is its own reference model.
    rank, kl = "actor_rollout_ref.model.lora_rank", f"{ACTOR}.use_kl_loss=True"
    bridge, whole = f"{ACTOR}.megatron.vanilla_mbridge", "does not read it, and trains the whole"
    yield row("verl", GRPO, f"{rank}=8", kl, built=["actor"], notes=[("not counted: the LoRA",)])
    yield row("verl", on_megatron, f"{rank}=8", built=["actor"], notes=[(rank, whole)])
    yield row(
        "verl",
        on_megatron,
        *("actor_rollout_ref.model.lora.rank=8", f"++{bridge}=True"),
        problems={bridge: ("lora actor: ", f"{bridge}=False")},
        marks=[since("0.8")],
    )
    # Keys without effect, and what is in force.
    aware = (f"++{OPTIM}.exp_avg_dtype=bf16", f"++{OPTIM}.use_precision_aware_optimizer=true")
    key, other = f"{OPTIM}.exp_avg_dtype", f"{OVERRIDE}.exp_avg_dtype"
    told = {key: "no-effect actor: "}
    yield row("verl", on_megatron, aware[0], problems=told, marks=native)
    words = (*aware, f"++{other}=fp32")
    told = {key: ("no-effect actor: ", other)}
    yield row("verl", on_megatron, *words, problems=told, marks=native)
    off = f"+{OVERRIDE}.use_precision_aware_optimizer=false"
    yield row("verl", on_megatron, f"+{other}=bf16", off, problems={other: ""})
    told = {f"{OVERRIDES}.torch_dtype": "no-effect actor: "}
    yield row("verl", GRPO, f"++{OVERRIDES}.torch_dtype=float16", problems=told)
    keys = [f"{FSDP}.wrap_policy.param_dtype", f"{FSDP}.wrap_policy.in.reduce_dtype"]
    keys += [f"{MIXED}.parm_dtype", f"{OVERRIDES}.model_config.dtype"]
    words = [f"++{key}=float16" for key in keys]
    told = dict.fromkeys(keys, "no-effect actor: ")
    yield row("verl", GRPO, *words, problems=told)
    key = f"{FSDP}.dtype"
    told = {key: "no-effect actor: "}
    yield row("verl", GRPO, f"++{key}=float16", problems=told, marks=native)
    words = (f"{OPTIM}.betas=[0.9,0.95]",)
    unread = f"{OPTIM}.betas=[0.9, 0.95]: verl does not pass it"
    yield row("verl", on_megatron, *words, notes=[("actor: ", unread)], silent=["actor: "])
    # A key in a wrong section is told where it belongs.
    remedies = {
        "mixed_precision": f"Write ++{MIXED}.param_dtype=fp16, or",
        "fsdp_config.param_dtype": f"Write {MIXED}.param_dtype, or",
        "param_dtype": f"Write {MIXED}.param_dtype, or",
        "fsdp_config.lr": f"Write {OPTIM}.lr, or",
        "optim.lrr": f"Did you mean {OPTIM}.lr? Correct",
        "optim.override_optimizer_config.exp_avg_dtype": f"Leave {OVERRIDE}",
    }
    words = [f"+{ACTOR}.{key}=fp16" for key in remedies]
    words[0] = f"+{ACTOR}.mixed_precision.param_dtype=fp16"
    told = {f"{ACTOR}.{key}": ("key ", f". {remedy}") for key, remedy in remedies.items()}
    yield row("verl", GRPO, *words, problems=told, silent=["verl's config has no such key"])
    right = (
        f"{VERLS_LAYERS}.moe_router_dtype",
        f"{VERLS_LAYERS}.vocab_size",
    )  # of Megatron-Bridge's models
    remedies = {
        f"{VERLS_LAYERS}.grad_reduce_in_fp32": f"Write {ACTOR}.megatron.override_ddp_config.grad_",
        f"{VERLS_LAYERS}.main_grads_dtype": f"Write {OVERRIDE}.main_grads_dtype",
        f"{VERLS_LAYERS}.moe_router_dtpye": "Did you mean moe_router_dtype?",
    }
    words = [f"++{key}=fp32" for key in (*remedies, *right)]
    told = {key: ("key ", remedy) for key, remedy in remedies.items()}
    yield row("verl", on_megatron, *words, problems=told)
    told = {FSDP: ("key ", f"Write {ACTOR}.megatron.dtype")}
    yield row("verl", on_megatron, f"++{MIXED}.param_dtype=fp32", problems=told, marks=native)
    key = "critic.fsdp_config"
    told = {key: ("key critic: ", ". Write critic.fsdp, or leave it out.")}
    line = (*VERL, gae)
    words = (f"++{key}.mixed_precision.param_dtype=fp16",)
    yield row("verl", line, *words, problems=told, marks=native)
    told = {f"{VERLS_LAYERS}.fp16": ("flags ", f"{ACTOR}.megatron.dtype=float16")}
    yield row("verl", on_megatron, f"+{VERLS_LAYERS}.fp16=true", problems=told)
    # What quantized layers compute in.
    blocks = (f"+{VERLS_LAYERS}.fp8=e4m3", f"+{VERLS_LAYERS}.fp8_recipe=blockwise")
    alone = "bf16 beside the actor's bf16 with weights in fp8 e4m3 (blocks of 128x128)"
    same = "activations in fp8 e4m3 (blocks of 1x128), as the actor"
    for words, told, other in (
        (blocks, alone, same),
        ((*blocks, f"{ROLLOUT}.quantization=fp8"), same, "beside the actor"),
    ):
        yield row(
            "verl", on_megatron, *words, notes=[(told,)], silent=[other, "bf16, as the actor"]
        )
    word = f"+{ROLLOUT}.engine_kwargs.vllm.quantization_config.linear=fp8"
    told = "bf16 with weights in fp8 e4m3 (per tensor)"
    line = (*GRPO, f"{ROLLOUT}.name=vllm")
    yield row("verl", line, word, notes=[(told,)], silent=["bf16, as the actor"])
    # QAT rounds as the rollout, which reads the actor's section.
    qat, ours = f"{ACTOR}.fsdp_config.qat", "in fp4 e2m1 (nvfp4, 1x16)"
    for mode, what in (("w4a16", "weights"), ("w4a4", "weights and activations")):
        words, told = (f"{qat}.mode={mode}", f"{qat}.enable=true"), (f": {what} {ours}", "as the")
        yield row("verl", GRPO, *words, notes=[told], silent=["bf16, as the"], marks=native)
    # A precision at a key that verl lacks.
    keys = ("exp_avg_dtype", "trainer.precision", "data.dtype", "actor_rollout_ref.param_dtype")
    known = (f"++{ROLLOUT}.dtype=bfloat16", f"++{FSDP}.model_dtype=fp32")
    yield row(
        "verl",
        GRPO,
        *(f"+{key}=bf16" for key in keys),
        *known,
        notes=[(f"{key}=bf16: verl's config has no such key",) for key in keys],
        silent=["rollout.dtype=bfloat16: ", "model_dtype=fp32: "],
    )
    # Dtypes of models that verl does not build.
    ref = "actor_rollout_ref.ref.fsdp_config.model_dtype=bf16"
    off = "algorithm.use_kl_in_reward and actor.use_kl_loss are off"
    told = f"ref: not built, as {off}; without effect: {ref}"
    yield row("verl", GRPO, ref, notes=[told], silent=silent)
    yield row("verl", GRPO, ref, f"{ACTOR}.use_kl_loss=true", silent=silent)
    words = ["critic.megatron.dtype=float16", f"{CRITICS}.exp_avg_dtype=bf16"]
    for more, why in (
        ((), "algorithm.adv_estimator=grpo"),
        (("critic.enable=false", gae), "critic.enable=false"),
    ):
        told = f"critic: not built, as {why}; without effect: {', '.join(words)}"
        line = (*on_megatron, words[0], f"++{words[1]}", *more)
        yield row("verl", line, notes=[told], silent=silent)


def _skyrls() -> Iterator[object]:
    low = (f"{KWARGS}.main_grads_dtype=bf16", f"{KWARGS}.use_precision_aware_optimizer=true")
    bucket = f"{SKYRLS_MEGATRON}.ddp_config.grad_reduce_in_fp32"
    told = {f"{KWARGS}.main_grads_dtype": ("no-effect policy: ", bucket)}
    yield row("skyrl", SKYRL_ON_MEGATRON, *low, f"{bucket}=true", problems=told)
    # Keys of the other strategy, or of a model that has no optimizer.
    words = [f"{KWARGS}.exp_avg_dtype=bf16", f"{bucket}=false", f"{SKYRLS_MIXED}.buffer_dtype=bf16"]
    others = [f"{LAYERS}.params_dtype=fp32", f"{LAYERS}.exp_avg_dtype=bf16"]
    others += [f"{SKYRLS_MIXED}.param_dtype=fp16"]
    for one in ("optimizer", "transformer"):
        others.append(f"trainer.ref.megatron_config.{one}_config_kwargs.exp_avg_dtype=bf16")
    for line, written in ((SKYRL_ON_FSDP, words), (SKYRL_ON_MEGATRON, others)):
        told = {
            word.partition("=")[0]: f"no-effect {'ref' if '.ref.' in word else 'policy'}: "
            for word in written
        }
        built = (*line, "trainer.algorithm.use_kl_loss=true")
        yield row("skyrl", built, *written, problems=told)
    for loss, told in (("true", {}), ("false", {"trainer.bf16": " policy: "})):
        words = (f"trainer.algorithm.use_kl_loss={loss}", "trainer.bf16=false")
        yield row("skyrl", SKYRL_ON_FSDP, *words, problems=told)
    reduce = f"{SKYRLS_MIXED}.reduce_dtype"
    told = ("policy: ", f"{reduce}=float16 is no fp16")
    yield row("skyrl", SKYRL_ON_FSDP, f"{reduce}=fp16", notes=[told])
    yield row("skyrl", SKYRL_ON_FSDP, f"{reduce}=bf16", silent=["policy: "])
    told = {f"{LAYERS}.fp8_param": "fp8-parameters "}
    yield row("skyrl", SKYRL_ON_MEGATRON, f"{LAYERS}.fp8_param=true", problems=told)
    words = (f"{LAYERS}.fp8=e4m3", f"{LAYERS}.fp8_recipe=blockwise")
    told = "bf16 beside the policy's bf16 with weights in fp8 e4m3 (blocks of 128x128)"
    notes = [(f"{one}: rollout-agreement: {told}",) for one in ("ref", "rollout")]
    yield row("skyrl", SKYRL_ON_MEGATRON, *words, notes=notes, silent=["bf16, as the policy"])
    words = (f"{LAYERS}.fp8=hybrid", f"{LAYERS}.fp8_recipe=mxfp8")
    told = "weights and activations in fp8 e4m3 (mx, 1x32), gradients in fp8 e5m2 (mx, 1x32)"
    notes = [(f"{one}: rollout-agreement: ", told) for one in ("ref", "rollout")]
    yield row("skyrl", SKYRL_ON_MEGATRON, *words, notes=notes)
    # Dtypes of models that SkyRL does not build.
    half = "fsdp_config.mixed_precision.param_dtype"
    default = f"trainer.ref.{half}=bf16"
    words = [f"trainer.critic.{half}=fp16"]
    words += ["trainer.ref.megatron_config.optimizer_config_kwargs.exp_avg_dtype=bf16"]
    words += ["trainer.ref.megatron_config.transformer_config_kwargs.params_dtype=bf16"]
    for line in (SKYRL_ON_FSDP, SKYRL_ON_MEGATRON):
        alone = (*line, "trainer.algorithm.use_kl_loss=false")
        notes = [("use_kl_loss", *words[1:]), ("model.path is null", words[0])]
        told = {"notes": notes, "silent": ["not built", default], "built": ["policy"]}
        yield row("skyrl", alone, *words, default, **told)
        yield row("skyrl", alone, silent=["not built"])


def _nemo_rls() -> Iterator[object]:
    on_megatron = NEMO_RL_ON_MEGATRON
    optimizer = "policy.megatron_cfg.optimizer"
    adapts = "policy.dtensor_cfg.lora_cfg.enabled"
    told = {adapts: ("lora policy: ", "_v2=true")}
    yield row(
        "nemo_rl", DTENSOR, f"++{adapts}=true", problems=told, marks=[since("0.5", "nemo_rl")]
    )
    for fraction, offload, name in (
        ("1.0", "true", ""),
        ("0.5", "true", "offload_fraction"),
        ("0.5", "false", ""),
        ("1.0", "'false'", "cpu_offload"),
    ):
        words = [f"offload_fraction={fraction}", f"cpu_offload={offload}"]
        words = [f"++{optimizer}.optimizer_{one}" for one in words]
        told = {f"{optimizer}.optimizer_{name}": ""} if name else {}
        yield row("nemo_rl", on_megatron, *words, problems=told)
    key = "policy.hf_config_overrides.dtype"
    told = {key: "no-effect policy: "}
    yield row("nemo_rl", on_megatron, f"++{key}=float32", problems=told)
    key = "policy.dtensor_cfg.mixed_precision.param_dtype"
    yield row("nemo_rl", DTENSOR, f"++{key}=float16", problems={key: "no-effect policy: "})
    key = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_fp32"
    yield row("nemo_rl", on_megatron, f"++{key}=true", problems={key: "grad_reduce_in_fp32"})
    # Keys on precision that NeMo-RL accepts and does not read.
    rollout = "policy.generation.vllm_cfg"
    needed = dict.fromkeys(
        ("policy.precison", "policy.dtype", "policy.dtensor_cfg.precision"),
        "policy.precision=float16",
    )
    needed[f"{rollout}.dtype"] = f"{rollout}.precision=float16"
    names = [f"{optimizer}.exp_avg_dtype", "policy.megatron_cfg.exp_avg_dtype"]
    names += ["policy.optimizer.exp_avg_dtype", "policy.dtensor_cfg.fsdp_output_dtype"]
    names += ["policy.generation.dtype"]
    flags = ["policy.megatron_cfg.first_last_layers_bf16", "policy.dtensor_cfg.fsdp_param_dtype"]
    flags += ["policy.megatron_cfg.te_precision_config_file", "policy.optimizer.kwargs.half_dtype"]
    read = [f"++{rollout}.precision=bfloat16", "++policy.generation.backend=vllm"]
    read += [f"++{optimizer}.params_dtype=float32", "++policy.megatron_cfg.moe_router_dtype=fp32"]
    told = {key: f". Write {other}, or leave {key} out." for key, other in needed.items()}
    told |= {key: f". Leave {key} out." for key in (*names, *flags)}
    words = [f"++{key}=float16" for key in (*needed, *names)]
    yield row(
        "nemo_rl", (*DTENSOR, *read), *words, *(f"++{key}=true" for key in flags), problems=told
    )
    marks = (since("0.5.0rc0", "nemo_rl"),)
    yield row("nemo_rl", DTENSOR, f"++{rollout}.kv_cache_dtype=fp8", marks=marks)
    words = ("fp8_cfg={enabled: true, fp8: e4m3, fp8_recipe: blockwise}",)
    line = (*on_megatron, f"++{rollout}.precision=bfloat16", "++policy.generation.backend=vllm")
    told = "bf16 beside the policy's bf16 with weights in fp8 e4m3 (blocks of 128x128)"
    yield row("nemo_rl", line, f"++policy.megatron_cfg.{words[0]}", notes=[(told,)])
    recipe, marks = "quant_cfg=FP8_DEFAULT_CFG", (since("0.7.0rc0", "nemo_rl"),)
    told = ("weights and activations in fp8 e4m3 (per tensor); not in lm_head", ", as the policy")
    words = (f"++policy.{recipe}", f"++policy.generation.{recipe}")
    yield row("nemo_rl", line, *words, notes=[told], marks=marks)
    recipe = "quant_cfg=nvfp4_experts.yaml"
    words = (f"++policy.{recipe}", f"++policy.generation.{recipe}")
    told, marks = "layers in nvfp4_experts (by ModelOpt)", (since("0.7.0rc0", "nemo_rl"),)
    same = f"{told}; not in its recipe's exceptions, as the policy"
    yield row("nemo_rl", line, *words, notes=[(same,)], marks=marks)
    told = f"bf16 beside the policy's bf16 with {told}"
    yield row("nemo_rl", line, words[0], notes=[(told,)], marks=marks)
    words = (*words, "++policy.generation.real_quant=true")
    words += ("++policy.generation.real_quant_ignore=[lm_head]",)
    told = "may differ: left out by the rollout alone: lm_head"
    yield row("nemo_rl", line, *words, notes=[(told,)], marks=marks)
    # Automodel's parallelizer of experts then takes bf16.
    experts = ("++policy.dtensor_cfg._v2=true", "++policy.dtensor_cfg.expert_parallel_size=2")
    told = {"policy.precision": "has no effect: the layers compute in bf16"}
    words, marks = ("++policy.precision=float16", *experts), (since("0.6.0rc0", "nemo_rl"),)
    yield row("nemo_rl", DTENSOR, *words, problems=told, marks=marks)
    key = "policy.dtensor_cfg.automodel_kwargs.backend.te_fp8"  # which Automodel's recipes read
    told = {key: ("no-effect policy: ", "nothing reads this key")}
    yield row("nemo_rl", DTENSOR, f"++{key}.recipe=block", problems=told)
    # Where such a key says what is in force, and where no model has it.
    words = [
        f"policy.{one}_dtype=float32" for one in ("dtensor_cfg.fsdp_output", "optimizer.exp_avg")
    ]
    told = [f"{one}: nothing reads this key; fp32 is in force without it" for one in words]
    other = "grpo.advantage_dtype=bf16"
    yield row(
        "nemo_rl",
        DTENSOR,
        *(f"++{one}" for one in (*words, other)),
        notes=[*((one,) for one in told), (f"{other}: NeMo-RL reads no key of this name",)],
    )
    told = "value: not built, as value.model_name is not set; without effect: value."
    yield row(
        "nemo_rl",
        on_megatron,
        "++value.precision=float16",
        notes=[("value: not built", told)],
        silent=["not built"],
        built=["policy"],
    )
    yield row("nemo_rl", on_megatron, silent=["not built"])


def _layers() -> Iterator[object]:
    """Names of dtypes that Megatron's layers take, and that the shim would read."""
    for package, line, prefix, key in (
        ("verl", GRPO_ON_MEGATRON, "++", f"{VERLS_LAYERS}.params_dtype"),
        ("skyrl", SKYRL_ON_MEGATRON, "", f"{LAYERS}.moe_router_dtype"),
        ("nemo_rl", NEMO_RL_ON_MEGATRON, "++", "policy.megatron_cfg.moe_router_dtype"),
    ):
        told = {key: ("dtype ", f"{key}='bf17' is not a dtype")}
        yield row(package, line, f"{prefix}{key}=bf17", problems=told)
        yield row(package, line, f"{prefix}{key}=FP32")
        yield row(package, (UNCOERCED, *line), f"{prefix}{key}=bf17")


def _titans() -> Iterator[object]:
    for word in ("training.dtype=half", "training.mixed_precision_param=bf17"):
        told = {word.partition("=")[0]: "dtype "}
        yield row("torchtitan", TITAN, f"--{word}", problems=told)


PLANNED = [*_verls(), *_skyrls(), *_nemo_rls(), *_layers(), *_titans()]


def _refused(package: str, line: Sequence[str], *texts: str) -> object:
    return pytest.param(line, texts, marks=needs(package), id=line[-1])


def _of_no_layout(gpus: int, word: str, fault: str) -> object:
    word = f"parallelism.{word}"
    line = ("torchrun", f"--nproc-per-node={gpus}", *LLAMA, f"--{word}")
    return _refused("torchtitan", line, f"{word}: the job's layout cannot be computed: {fault}")


REFUSED = [
    _refused("verl", (*VERL, "actor_rollout_ref.nonsense=1"), "ppo_trainer.yaml", "nonsense"),
    _refused("verl", (*VERL, "actor_rollout_ref.model.lora_rank=some"), "'some'", "Write"),
    _refused("verl", (*VERL, f"{FSDP}.fsdp_size=all"), "'all'", "Write"),
    _refused("verl", (*VERL, f"{ACTOR}=null"), "NoneType", "Write"),
    _refused(
        "verl",
        ("python", "-m", "verl.trainer.main_gone"),
        "verl.trainer.main_gone: ",
        "there is no such module or script here",
    ),
    _refused(
        "skyrl",
        (*SKYRL, "trainer.strategy=fsdp", "trainer.critic=null"),
        "trainer.critic=None (NoneType): expected a section with keys",
    ),
    _refused(
        "skyrl",
        (*SKYRL, "trainer.policy.fsdp_config.param_dtype=fp16"),
        f"Did you mean {SKYRLS_MIXED}.param_dtype? ",
    ),
    _of_no_layout(
        8, "data_parallel_shard_degree=4", "the degrees multiply to 4 GPUs, and the job has 8"
    ),
    _of_no_layout(8, "tensor_parallel_degree=0", "it is less than 1"),
    _of_no_layout(6, "tensor_parallel_degree=3", "it does not divide 16 n_heads"),
    _of_no_layout(8, "expert_parallel_degree=3", "it does not divide 8 GPUs of a replica"),
]
"""Jobs that cannot be planned, and texts in what the command says."""
