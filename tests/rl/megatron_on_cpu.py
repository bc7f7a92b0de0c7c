"""verl's Megatron engine on a CPU in a whole job, beside the demo's stand-ins for a GPU.

The engine's model, built by Megatron-Bridge, has Megatron's own layers instead of
TransformerEngine's, and a stand-in replaces TransformerEngine's FusedAdam. Megatron's device names
mean the CPU in one thread only, so the engine is made in the thread that runs Ray's methods.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

KEYS = {
    "model_engine": "megatron",
    # By verl's default a resumed Megatron job restarts its LR schedule.
    "actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler": True,
    "actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend": "unfused",
}
"""Keys of verl's config for the Megatron engine on a CPU."""

_open = contextlib.ExitStack()
"""The stand-ins, which stay in place until the worker ends."""


def keys(dtype: str) -> dict[str, object]:
    """The config keys of an engine that computes in this dtype, by verl's name."""
    from precision_shim_tools.testing.megatron_cpu import CPU_TRANSFORMER

    engine = "actor_rollout_ref.actor.megatron"
    fields = {f"+{engine}.override_transformer_config.{k}": v for k, v in CPU_TRANSFORMER.items()}
    return {**KEYS, f"{engine}.dtype": dtype, f"{engine}.vanilla_mbridge": False, **fields}


def _own_layers() -> None:
    """Let Megatron-Bridge build a model of Megatron's own layers, whose names it knows."""
    from ..stand_ins.megatron_bridge import import_megatron_bridge

    import_megatron_bridge()
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    finish = ModelProviderMixin.apply_overrides_and_finalize

    def finalize(self: Any, dtype: Any = None, overrides: Any = None) -> Any:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        return finish(self, dtype, {**(overrides or {}), "transformer_layer_spec": spec})

    ModelProviderMixin.apply_overrides_and_finalize = finalize


def prepare(module: Any) -> None:
    """Let the engine of this module of verl's put the stand-ins in place when it is made."""
    made = module.MegatronEngine.__init__

    @functools.wraps(made)
    def make(self: Any, *given: Any, **named: Any) -> None:
        from precision_shim_tools.testing import megatron_on_cpu, stand_in_transformer_engine

        from ..verl.support import local_layers

        _own_layers()
        for one in (stand_in_transformer_engine(), megatron_on_cpu(), local_layers(weights=True)):
            _open.enter_context(one)
        made(self, *given, **named)

    module.MegatronEngine.__init__ = make
