"""Configs and CPU stand-ins of verl's VeOmni, Automodel, torchtitan and FSDP Turbo engines.

The ranks of ``engine_ranks.py`` and Ray's workers import this module, which imports no shim.
``fsdp_turbo.py`` has FSDP Turbo's stand-in.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ..stand_ins.tiny_models import VOCABULARY
from ..torchtitan import cpu as titans
from . import fsdp_support as support
from . import fsdp_turbo

_IMPL = "verl.workers.engine"
MODULES = {
    "veomni": f"{_IMPL}.veomni.transformer_impl",
    "automodel": f"{_IMPL}.automodel.transformer_impl",
    "torchtitan": f"{_IMPL}.torchtitan.transformer_impl",
    "fsdp_turbo": f"{_IMPL}.fsdp.fsdp_turbo_impl",
}
KINDS = {
    "veomni": "VeOmniEngineWithLMHead",
    "automodel": "AutomodelEngineWithLMHead",
    "torchtitan": "TorchTitanEngineWithLMHead",
    "fsdp_turbo": "FSDPTurboEngineWithLMHead",
}


_tiny_has_experts = False
"""Whether torchtitan's tiny model is a mixture of experts; ``configs`` sets it for each engine."""


def prepare() -> None:
    """Import verl and the libraries of its engines."""
    with_titan = importlib.util.find_spec("torchtitan") is not None  # verl's engine from 0.9.0
    if with_titan:
        titans.answer_for_gpus()
    support.prepare()
    fsdp_turbo.install()
    if with_titan:
        optimizers = importlib.import_module("torchtitan.components.optimizer")
        # verl's engine imports LRSchedulersContainer from a module that torchtitan 0.3.0 lacks.
        moved = ModuleType("torchtitan.components.lr_scheduler")
        moved.LRSchedulersContainer = optimizers.LRSchedulersContainer  # type: ignore[attr-defined]
        sys.modules[moved.__name__] = moved
        titans.imports(rl=False)
    for name, module in MODULES.items():
        wanted = with_titan or name != "torchtitan"
        if wanted and importlib.util.find_spec(module) is not None:  # 0.9.1 adds FSDP Turbo's
            importlib.import_module(module)
    _answer_for_gpus()
    if with_titan:
        _answer_for_titan()
        torch.distributed.all_to_all = _all_to_all_of_unequal_parts


def _all_to_all_of_unequal_parts(
    received: list[torch.Tensor], sent: list[torch.Tensor], group: Any = None
) -> None:
    """``all_to_all`` as NCCL has it; gloo's takes only parts of equal sizes."""
    into = torch.empty(sum(map(torch.numel, received)), dtype=sent[0].dtype)
    torch.distributed.all_to_all_single(
        into,
        torch.cat([one.reshape(-1) for one in sent]),
        [one.numel() for one in received],
        [one.numel() for one in sent],
        group=group,
    )
    for one, part in zip(received, into.split([one.numel() for one in received]), strict=True):
        one.copy_(part.view_as(one))


def _answer_for_gpus() -> None:
    """Let VeOmni and Automodel build their models on a CPU, even on a single rank."""
    import nemo_automodel._transformers.auto_model as auto_model
    import nemo_automodel.components.distributed.mesh_utils as meshes
    import nemo_automodel.components.models.qwen3_moe.model as qwen3_moe
    import wrapt
    from veomni.distributed.parallel_state import ParallelState

    init = meshes.init_device_mesh
    meshes.init_device_mesh = lambda device_type, **kwargs: init("cpu", **kwargs)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]

    class CpuTorch(wrapt.ObjectProxy):  # type: ignore[type-arg]
        """The module torch, in which every device is the CPU."""

        def device(self, *names: Any) -> Any:
            return torch.device("cpu")

    auto_model.torch = qwen3_moe.torch = CpuTorch(torch)
    torch.distributed.tensor._random.manual_seed = lambda seed, mesh: torch.manual_seed(seed)
    ParallelState.fsdp_enabled = True  # so that VeOmni shards even on a single rank


def _answer_for_titan() -> None:
    """Let torchtitan build its models on a CPU; add the tiny model that verl's engine looks up."""
    import torch.distributed.tensor._dispatch as dispatch
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.models import qwen3

    impl = importlib.import_module(MODULES["torchtitan"])
    kind = impl.TorchTitanEngine
    # torchtitan 0.3.0 captures CUDA graphs unless told, and refuses them beside parallel experts.
    impl.TrainingConfig = functools.partial(impl.TrainingConfig, disable_cuda_graphs=True)
    mesh_of = ParallelDims.get_optional_mesh

    def get_optional_mesh(self: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        # verl's engine asks for a mesh "fsdp", which torchtitan 0.3.0 lacks. Without context
        # parallelism the mesh "loss" has the same ranks; on a single rank there is no mesh.
        return mesh_of(self, "loss" if "fsdp" in name else name, *args, **kwargs)

    ParallelDims.get_optional_mesh = get_optional_mesh
    dispatch.is_rng_supported_mesh = lambda mesh: False
    make_mesh = kind._init_device_mesh

    def with_plain_sums(self: Any) -> None:
        make_mesh(self)
        for module in self.trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum

    kind._init_device_mesh = with_plain_sums

    def tiny(attn_backend: str = "varlen", **kwargs: Any) -> Any:
        return titans.model_spec(experts=_tiny_has_experts).model

    qwen3.qwen3_configs["tiny"] = tiny


def make_model(folder: Path, *, experts: bool = False) -> Path:
    """Write the Qwen3 of ``torchtitan.cpu.model_spec`` as a Hugging Face checkpoint.

    Args:
        folder: the folder to write.
        experts: whether each layer is a mixture of four experts, two of them for each token, with
            an auxiliary loss, which only Automodel's own models add.
    """
    import transformers

    from ..stand_ins.tiny_models import make_checkpoint

    make_checkpoint(folder)
    torch.manual_seed(0)
    kind, more = "Qwen3", dict[str, Any]()
    if experts:
        kind = "Qwen3Moe"
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        more |= {"router_aux_loss_coef": 1e-3}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        **more,
    )
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def configs(
    name: str,
    model: str,
    world: int,
    dtype: str = "float16",
    *,
    optimizer: str = "",
    own: Any = (),
    **fields: Any,
) -> dict[str, Any]:
    """verl's own configs of an engine, by the argument names of the engine's class.

    Args:
        name: a key of ``MODULES``.
        model: folder of the checkpoint.
        world: number of ranks.
        dtype: the dtype in which the engine computes matrix products.
        optimizer: the name of VeOmni's optimizer, if not its default.
        own: fields of the engine's config that have the names of other arguments.
        fields: further fields of the engine's config.
    """
    import verl.workers.config as verls
    from verl.trainer.config import CheckpointConfig

    global _tiny_has_experts
    _tiny_has_experts = "Qwen3Moe" in Path(model, "config.json").read_text(encoding="utf-8")
    contents = ["model", "optimizer", "extra"]
    common: dict[str, Any] = {"use_torch_compile": False, "use_dynamic_bsz": False}
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[dtype]
    if name == "veomni":
        kind, optim = "VeOmniEngineConfig", "VeOmniOptimizerConfig"
        common |= {"dtype": dtype, "mixed_precision": True, "init_device": "meta"}
        common |= {"attn_implementation": "eager", "moe_implementation": "eager"}
    elif name == "automodel":
        kind, optim = "AutomodelEngineConfig", "AutomodelOptimizerConfig"
        common |= {"mp_param_dtype": short, "attn_implementation": "eager"}
    elif name == "torchtitan":
        kind, optim = "TorchtitanEngineConfig", "TorchtitanOptimizerConfig"
        common |= {"dtype": dtype, "attn_type": "varlen", "activation_checkpoint": "none"}
        common |= {"data_parallel_shard_size": world, "max_seq_len": 64}
    else:
        kind, optim = "FSDPEngineConfig", "FSDPOptimizerConfig"
        plan = {"param_dtype": f"torch.{dtype}"}
        common |= {"strategy": "fsdp_turbo", "turbo_config": {"distributed": {"fsdp_plan": plan}}}
    more = {"lr_scheduler_type": "constant"} if name == "automodel" else {}
    more |= {"optimizer": optimizer} if optimizer else {}
    return {
        "model_config": verls.HFModelConfig(
            path=model,
            use_remove_padding=name == "torchtitan",
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        "engine_config": getattr(verls, kind)(**common | fields | dict(own)),
        "optimizer_config": getattr(verls, optim)(lr=1e-2, total_training_steps=40, **more),
        "checkpoint_config": CheckpointConfig(save_contents=contents, load_contents=contents),
    }
