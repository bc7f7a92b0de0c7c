"""The stand-in for TransformerEngine appears, states its version, and leaves no trace."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from precision_shim_tools.testing import real_transformer_engine, stand_in_transformer_engine

from ..processes.commands import python

without_real = pytest.mark.skipif(
    real_transformer_engine() is not None, reason="the real TransformerEngine is installed"
)
with_real = pytest.mark.skipif(
    real_transformer_engine() is None, reason="the real TransformerEngine is not installed"
)


def test_nothing_is_left_behind(snapshot: Any) -> None:
    with stand_in_transformer_engine("2.14.0"):
        pass  # imports Megatron's optimizers, if Megatron is installed
    before = snapshot()
    with stand_in_transformer_engine("2.14.0"):
        assert snapshot() != before
    assert snapshot() == before
    with pytest.raises(KeyError), stand_in_transformer_engine("2.14.0"):
        raise KeyError
    assert snapshot() == before


@without_real
def test_megatron_is_told_the_version(megatron_core: Any, snapshot: Any) -> None:
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import distrib_optimizer

    without = utils.get_te_version()  # the version is None, or 0.0.0 from megatron-core 0.18 on
    before = snapshot()
    assert optimizer.USING_PYTORCH_OPTIMIZER is True
    with stand_in_transformer_engine("2.1.0") as stand_in:
        assert str(utils.get_te_version()) == "2.1.0"
        assert utils.is_te_min_version("2.1.0")
        assert not utils.is_te_min_version("2.3.0")
        assert optimizer.Adam is distrib_optimizer.Adam is stand_in.fused_adam
        assert optimizer.USING_PYTORCH_OPTIMIZER is False
        assert distrib_optimizer.USING_TE_OPTIMIZER is True
        assert distrib_optimizer.HAVE_APEX_OR_TE is True
    assert snapshot() == before
    assert utils.get_te_version() == without


@without_real
@pytest.mark.filterwarnings("ignore")
def test_megatron_that_was_not_imported_is_patched_and_restored(megatron_core: Any) -> None:
    script = """
        import sys, warnings
        warnings.simplefilter("ignore")
        from precision_shim.testing import stand_in_transformer_engine
        assert not any(name.startswith("megatron") for name in sys.modules)
        with stand_in_transformer_engine("2.3.0") as stand_in:
            from megatron.core import optimizer, utils
            from megatron.core.optimizer import distrib_optimizer
            import megatron.core.models.gpt.gpt_layer_specs as specs
            assert optimizer.Adam is distrib_optimizer.Adam is stand_in.fused_adam
            assert distrib_optimizer.USING_TE_OPTIMIZER and not optimizer.USING_PYTORCH_OPTIMIZER
            assert str(utils.get_te_version()) == "2.3.0"
            assert not getattr(specs, "HAVE_TE", False)
        assert optimizer.Adam.__module__.startswith("torch.optim")
        assert distrib_optimizer.Adam.__module__.startswith("torch.optim")
        assert optimizer.USING_PYTORCH_OPTIMIZER and not distrib_optimizer.USING_TE_OPTIMIZER
        assert str(utils.get_te_version()) in ("None", "0.0.0")
        assert not any(name.startswith("transformer_engine") for name in sys.modules)
    """
    done = python("-c", textwrap.dedent(script), timeout=300)
    assert done.returncode == 0, done.stderr


@with_real
@pytest.mark.parametrize("master", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("flag", [None, "capturable", "store_param_remainders", "amsgrad"])
def test_the_real_constructor_agrees(
    master: torch.dtype, moment: torch.dtype, flag: str | None
) -> None:
    from precision_shim_tools.testing import cuda_means_cpu, fused_adam_for

    real = real_transformer_engine()
    assert real is not None
    version, real_adam = real
    arguments: dict[str, Any] = {
        "master_weights": True,
        "master_weight_dtype": master,
        "exp_avg_dtype": moment,
        "exp_avg_sq_dtype": moment,
    }
    if flag is not None:
        arguments[flag] = True

    def verdict(cls: Any) -> str:
        try:
            with cuda_means_cpu():
                cls([torch.nn.Parameter(torch.zeros(2))], **arguments)
        except NotImplementedError:
            return "legal"
        except RuntimeError:
            return "illegal"
        return "legal"

    assert verdict(real_adam) == verdict(fused_adam_for(version))
