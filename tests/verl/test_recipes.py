"""The plan refuses none of the recipes that verl ships."""

from __future__ import annotations

from importlib.metadata import distribution, version

import pytest
from packaging.version import Version

from ..plan.shipped import CHECKOUT, hold, recorded

UNPLANNED = {
    "Could not override|already at": "with a key that hydra refuses",
    "Cannot find primary config": "with a config that is not there",
    "mindspeed": "on MindSpeed",
    "mlite_actor": "on megatron-lite, a package of its own",
    "verl.trainer.main_ppo_sync": "with a module that no release has",
}
VERL = version("verl")


@pytest.mark.slow
@pytest.mark.skipif(Version(VERL) < Version("0.9") and not CHECKOUT, reason="recipes of 0.9.0")
def test_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    # some configs name others from here
    monkeypatch.chdir(CHECKOUT or distribution("verl").locate_file(""))
    recipes = recorded("verl", "examples", "verl", "recipe")
    hold(f"verl {VERL}", recipes, UNPLANNED)
