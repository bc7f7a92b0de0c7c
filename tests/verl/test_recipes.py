"""The plan refuses none of the recipes that verl ships."""

from __future__ import annotations

from importlib.metadata import distribution, version

import pytest
from packaging.version import Version

from ..plan.shipped import hold, recorded

UNPLANNED = (
    "Could not override 'actor_rollout_ref.actor.megatron.optimizer_offload'",  # as hydra does
    "already at 'actor_rollout_ref.actor.fsdp_config.model_dtype'",
    "Cannot find primary config 'fully_async_dapo_trainer",
    "mindspeed",
    "mlite_actor",  # in a package of its own
    "verl.trainer.main_ppo_sync",  # in no release
)


@pytest.mark.slow
@pytest.mark.skipif(Version(version("verl")) < Version("0.9"), reason="recipes of 0.9.0")
def test_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(distribution("verl").locate_file(""))  # some configs name others from here
    hold(recorded("verl"), *UNPLANNED)
