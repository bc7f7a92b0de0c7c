"""What our rules assume of verl, asked of the verl that is installed."""

from __future__ import annotations

from types import SimpleNamespace

from precision_shim.adapting import Answer, probe

_ENGINE = "verl.workers.engine.megatron.transformer_impl"


@probe(
    "verl's Megatron engine raises on an overflow",
    assumes="MegatronEngine.optimizer_step raises NotImplementedError where no step was taken",
    rule="precision_shim_adapters.verl.megatron",
    needs=(_ENGINE,),
)
def overflow() -> Answer:
    """The shim makes a skipped step of it."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    engine = SimpleNamespace(optimizer=SimpleNamespace(step=lambda: (False, None, None)))
    try:
        found = repr(MegatronEngine.optimizer_step(engine))
    except Exception as error:
        found = type(error).__name__
    return Answer("NotImplementedError", found)
