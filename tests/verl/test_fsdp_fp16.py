"""verl's FSDP2 engines in fp16, in two real processes over gloo, with verl's own checkpoints.

``fsdp_ranks.py`` has the ranks' cases; this module launches them and checks their results. FSDP1
does not start on a CPU: torch refuses.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..every_framework.without_effect import CASES, agree
from ..processes.commands import command
from ..processes.rank_server import Ranks
from .conftest import VERL

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="0.6's are covered by test_untested_version"
)

FILE = "precision_shim_scaler.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
OWN_SCALER = Version("0.8") <= VERL
"""Whether verl's FSDP engine makes its own scaler."""

BETWEEN = OWN_SCALER and Version("0.9.1") > VERL
not_between = pytest.mark.slow if BETWEEN else pytest.mark.skipif(False, reason="")
"""Versions between the oldest and the newest, whose scaler they have, run it before a release."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints, with the shim and without."""
    return tmp_path_factory.mktemp("halves")


@pytest.fixture(scope="module")
def with_shim(fsdp_ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    return fsdp_ranks("exact", folder=folder)


@pytest.fixture(scope="module")
def resumed(fsdp_ranks: Ranks, folder: Path, with_shim: Any) -> list[dict[str, Any]]:
    return fsdp_ranks("resumed", folder=folder)


# -- resuming ----------------------------------------------------------------------------------


def test_resumed_in_a_new_process_is_bit_identical(with_shim: Any, resumed: Any) -> None:
    for straight, second in zip(with_shim, resumed, strict=True):
        assert second["end"] == straight["straight"]
        assert second["said"] == []
        assert second["predicted"] == ["exact", "starts anew"]


def test_a_resume_that_rounds_is_told(fsdp_ranks: Ranks, tmp_path: Path) -> None:
    for exact, (told,), error in fsdp_ranks("rounds", folder=tmp_path):
        assert exact == []
        assert "actor: loading this checkpoint rounds its exp_avg and exp_avg_sq from fp32" in told
        assert "model_dtype=fp32" in told
        assert error.startswith(told.rstrip("."))


def test_resumed_in_the_same_process_is_bit_identical(with_shim: Any) -> None:
    for one in with_shim:
        assert one["loaded"] == one["half"]
        assert one["same_process"] == one["straight"]
        assert json.dumps(one["said_again"]) == json.dumps(one["said"][6:])  # NaN as text


def test_an_overflow_and_growth_in_each_half(with_shim: Any) -> None:
    for one in with_shim:
        assert one["kind"] == "LossScaler"
        assert one["half"]["counter"] == [6, 1, 0]
        assert one["straight"]["counter"] == [11, 2, 0]
        assert one["half"]["scale"] == 2.0 * 8 / 2 * 8  # more growth than backoff
        assert one["straight"]["scale"] == one["half"]["scale"] * 8 * 8 / 2
        assert (one["half"]["tracker"], one["straight"]["tracker"]) == (1, 1)
        skipped = [step for step, said in enumerate(one["said"]) if math.isnan(said[-1])]
        assert skipped == [2, 9]


def test_saving_moves_neither_scaler_nor_moments(with_shim: Any) -> None:
    """torch's DCP would take a dummy optimizer step, but verl's checkpoint manager takes none."""
    for one in with_shim:
        assert one["steps_while_saving"] == 0
        assert one["after_save"] == one["half"]
        assert FILE in one["files"]


def test_a_checkpoint_of_the_shims_loads_without_it(with_shim: Any, resumed: Any) -> None:
    for ours, plain in zip(with_shim, resumed, strict=True):
        for key in ("parameters", "moments"):
            assert plain["of_the_shim"][key] == ours["half"][key]


def test_engines_that_were_built_before_install_are_told(resumed: Any) -> None:
    for plain in resumed:
        (note,) = plain["late"]
        assert "AdamW) was built before install(): " in note


def test_a_checkpoint_without_the_scaler_loads_with_one_warning(resumed: Any) -> None:
    for one in resumed:
        (said,) = one["said_without"]
        assert "no loss scaler state" in said
        assert one["fresh"] == 2.0
        assert all(math.isfinite(value) for step in one["trains"] for value in step)


def test_installed_after_the_engine_was_built(fsdp_ranks: Ranks) -> None:
    if not OWN_SCALER:
        pytest.skip("0.7.1's FSDP engine has no scaler")
    for one in fsdp_ranks("late", world=1):
        assert one["kind"] == "ShardedGradScaler"
        assert one["loaded_kind"] == "LossScaler"
        for key in ("parameters", "moments", "scale", "tracker"):
            assert one["loaded"][key] == one["saved"][key]


# -- checkpoints with and without the scaler ---------------------------------------------------


@pytest.fixture(scope="module")
def contents(fsdp_ranks: Ranks) -> list[dict[str, Any]]:
    return fsdp_ranks("contents")


@not_between
def test_without_the_optimizer_no_scaler(contents: Any) -> None:
    for one in contents:
        files, said = one["model_only"]
        assert FILE not in files
        assert said == []
        before, after, said = one["load_model_only"]
        assert before == after
        assert said == []


@not_between
def test_rotated_with_the_checkpoint(contents: Any) -> None:
    for one in contents:
        assert one["rotated"] == ["2", "3"]
        assert FILE in one["again"]


@not_between
def test_remote_checkpoint(contents: Any) -> None:
    for one in contents:
        saved, loaded, said, left = one["remote"]
        assert loaded == saved
        assert said == left == []


@not_between
def test_a_reference_model_gets_nothing(contents: Any) -> None:
    for one in contents:
        assert one["reference"] != "LossScaler"


# -- faults ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(fsdp_ranks: Ranks) -> list[dict[str, Any]]:
    return fsdp_ranks("faults")


def assert_skipped(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert after["parameters"] == before["parameters"]
    assert after["moments"] == before["moments"]
    assert after["scale"] == before["scale"] / 2
    assert after["tracker"] == 0
    assert after["counter"][0] == before["counter"][0] + 1
    assert after["counter"][1] == before["counter"][1] + 1


def test_rank_1_overflows_alone(faults: Any) -> None:
    for one in faults:
        before, after, norm = one["alone"]
        assert_skipped(before, after)
        assert math.isnan(norm)


def test_nan_in_one_micro_batch(faults: Any) -> None:
    for one in faults:
        before, after, norm, _ = one["nan"]
        assert_skipped(before, after)
        assert math.isnan(norm)
        assert all(math.isfinite(value) for step in one["after"] for value in step)
    assert math.isnan(faults[0]["nan"][3][1])
    assert all(math.isfinite(loss) for loss in faults[1]["nan"][3])


def test_eval_mode(faults: Any) -> None:
    for one in faults:
        before, after, losses = one["eval"]
        assert after == before
        assert all(math.isfinite(loss) for loss in losses)


def test_every_step_skipped_is_an_error(faults: Any) -> None:
    for one in faults:
        kind, message, steps = one["end"]
        assert kind == "LossScaleError"
        assert "25 optimizer steps in a row" in message
        assert "step 25 at loss scale" in message
        assert steps == 25


def test_a_file_that_cannot_be_written_loses_no_checkpoint(faults: Any) -> None:
    for one in faults:
        (said,), files = one["blocked"]
        assert "cannot write the loss scaler's state" in said
        assert {"optim_world_size_2_rank_0.pt", "extra_state_world_size_2_rank_1.pt"} <= set(files)


@not_between
def test_the_norm_of_fp16_shards_is_taken_in_fp32(fsdp_ranks: Ranks) -> None:
    """torch sums the squares of the ranks' norms in fp16: from 256 on the norm is inf."""
    for one in fsdp_ranks("shards"):
        norm, expected, clipped = one["norms"]
        assert one["kinds"] == ["torch.float16"]
        assert expected > 256
        assert norm == pytest.approx(expected, rel=2.0**-10)
        assert clipped == pytest.approx(1.0, rel=2.0**-8)
        assert (one["moved"], one["skipped"]) == (True, 0)


@not_between
def test_a_step_of_the_users_own_is_an_error(fsdp_ranks: Ranks) -> None:
    (one,) = fsdp_ranks("own_step", world=1)
    for scale, what in ((2.0**10, "a step came"), (2.0**40, "gradients were dropped")):
        assert one[str(scale)].startswith(f"SeamError: verl {VERL}: actor: {what}")
        assert "FSDPEngineWithLMHead.optimizer_step, which is not" in one[str(scale)]
    assert one["unmoved"]


# -- what the user sees ------------------------------------------------------------------------


def test_metrics(fsdp_ranks: Ranks) -> None:
    for one in fsdp_ranks("metrics"):
        assert one["meter"] == []  # nobody asked for lost updates
        for subject, (steps, looked, minis) in one["subjects"].items():
            scales = [step["loss_scale"] for step in steps]
            assert scales == [2.0**12, 2.0**12, 2.0**11], subject  # each step's own scale
            assert [step["skipped_steps"] for step in steps] == [0.0, 1.0, 1.0]
            assert math.isnan(steps[1]["grad_norm"])
            assert all(isinstance(step["grad_norm"], float) for step in steps)
            assert "loss_scale" not in looked
            if minis is not None:
                assert minis["loss_scale"] == 2.0**11
                assert minis["skipped_steps"] == 1.0


@not_between
@pytest.mark.skipif(not OWN_SCALER, reason="0.7.1 computes under a bfloat16 autocast")
def test_losses_and_norms_are_unscaled(fsdp_ranks: Ranks) -> None:
    """Losses are equal to the bit, norms within rounding of fp32 sums of under 2**14 squares."""
    for one in fsdp_ranks("by_hand", world=1):
        assert one["scale"] == 2.0**10
        assert one["start"] == 0
        reported, by_hand = one["losses"]
        assert reported == by_hand
        reported, by_hand = one["norms"]
        assert reported == pytest.approx(by_hand, rel=2.0**-10)


NO_EFFECT = [case for case in CASES if (case.framework, case.engine) == ("verl", "fsdp")]
STORED = [{"model_dtype": "float16"}, *({"overrides": {k: "float16"}} for k in DTYPE_KEYS)]


@pytest.fixture(scope="module")
def configured(fsdp_ranks: Ranks) -> list[dict[str, Any]]:
    (found,) = fsdp_ranks(
        "without_effect", world=1, configs=[*(dict(one.written) for one in NO_EFFECT), *STORED]
    )
    return found


@not_between
def test_keys_without_effect(configured: Any) -> None:
    for case, one in zip(NO_EFFECT, configured, strict=False):
        agree(case, one["problems"], one["said"])
        assert one["error"].startswith("InconsistentPrecisionError")
        assert one["problems"][0] in one["error"]
        assert one["scaler"] == "NoneType"


@not_between
def test_parameters_stored_in_float16_are_no_fp16_training(configured: Any) -> None:
    one = configured[len(NO_EFFECT)]
    (said,) = one["said"]
    assert "model_dtype=float16 is no fp16 training here" in said
    assert (one["problems"], one["error"]) == ([], "")


@not_between
def test_verl_replaces_the_dtype_in_transformers_config(configured: Any) -> None:
    """The config, which a checkpoint keeps, has the parameters' dtype as well."""
    found = configured[len(NO_EFFECT) + 1 :]
    assert [one["dtypes"] for one in found] == [["torch.float32"]] * len(DTYPE_KEYS)


@not_between
@pytest.mark.parametrize("dtype", [None, pytest.param("fp32", marks=pytest.mark.slow)])
def test_other_dtypes_are_untouched(fsdp_ranks: Ranks, dtype: str | None) -> None:
    (off,) = fsdp_ranks("untouched", world=1, dtype=dtype, on=False)
    (on,) = fsdp_ranks("untouched", world=1, dtype=dtype, on=True)
    assert on["said"] == []
    for key in ("state", "files", "scaler", "calls"):
        assert on[key] == off[key], key
    assert FILE not in on["files"]


# -- 0.7.1's legacy workers --------------------------------------------------------------------


has_legacy_workers = pytest.mark.skipif(OWN_SCALER, reason="verl 0.8 has no legacy workers")


@pytest.fixture(scope="module", params=[("actor", 2), ("critic", 1)], ids=str)
def legacy(
    request: pytest.FixtureRequest, fsdp_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, Any]:
    role, world = request.param
    options = {"folder": tmp_path_factory.mktemp("legacy"), "world": world, "role": role}
    ours = fsdp_ranks("legacy_exact", **options)
    return role, ours, fsdp_ranks("legacy_resumed", **options)


@has_legacy_workers
def test_legacy_workers_resume_bit_identically(legacy: Any) -> None:
    _, ours, resumed = legacy
    for one, second in zip(ours, resumed, strict=True):
        assert one["kind"] == "LossScaler"
        assert one["loaded"] == one["half"]
        assert one["same_process"] == one["straight"]
        assert second["end"] == one["straight"]
        assert one["straight"]["counter"] == [11, 2, 0]
        assert one["half"]["scale"] == 2.0 * 8 / 2 * 8
        assert one["straight"]["scale"] == one["half"]["scale"] * 8 * 8 / 2
        assert FILE in one["files"]


@has_legacy_workers
def test_legacy_workers_metrics(legacy: Any) -> None:
    role, ours, _ = legacy
    for one in ours:
        norms = [step[f"{role}/grad_norm"][0] for step in one["metrics"]]
        assert [step for step, norm in enumerate(norms) if math.isnan(norm)] == [2, 9]
        assert [step[f"{role}/skipped_steps"] for step in one["metrics"]][-1] == 2.0
        scales = [2.0] * 2 + [16.0] + [8.0] * 2 + [64.0] * 2 + [512.0] * 2 + [4096.0, 2048.0]
        assert [step[f"{role}/loss_scale"] for step in one["metrics"]] == scales


# -- the audit ---------------------------------------------------------------------------------


def test_the_audit_of_the_engine(fsdp_ranks: Ranks) -> None:
    found = fsdp_ranks("audited")
    for rank, one in enumerate(found):
        names = [f"verl.{role}.model.rank{rank}.audit.json" for role in ("actor", "critic")]
        adapters = f"verl.actor.model-2.rank{rank}.audit.json"
        assert sorted(one["before"]) == sorted(one["after"]) == names
        assert sorted(one["all"]) == sorted([*names, adapters])
        assert one["kept"] == 3  # a reference model has no optimizer
        codes, said = one["bare"]  # bf16 weights without masters: rank 0 warns once, also in strict
        assert codes == ["no-master"]
        told = r"no-master \(.*, and 98.1% of the updates .*fsdp_config.model_dtype=fp32"
        assert [bool(re.search(told, line)) for line in said] == ([] if rank else [True])
        for name in names:
            before, after = one["before"][name], one["after"][name]
            assert (before["complete"], after["complete"]) == (False, True)
            assert (after["rank"], after["world_size"]) == (rank, len(found))
            assert after["problems"] == after["notes"] == []
            (part,) = after["parts"]
            assert part["data_parallel_size"] == len(found)
            for component in ("params", "exp_avg", "exp_avg_sq"):
                assert part["components"][component]["dtypes"] == ["fp32"]
                assert part["components"][component]["sharded"]
        actor, critic = (one["after"][name]["parts"][0] for name in names)
        assert (actor["scaler"], critic["scaler"]) == ("LossScaler", None)
        part = one["all"][adapters]["parts"][0]
        assert part["components"]["frozen"]["bytes"] > 0
        assert part["components"]["exp_avg"]["bytes"] == 4 * part["owned"] > 0
    for name in ("actor", "critic"):
        parts = [
            one["after"][f"verl.{name}.model.rank{rank}.audit.json"]["parts"][0]
            for rank, one in enumerate(found)
        ]
        assert sum(part["owned"] for part in parts) == parts[0]["parameters"]


@not_between
def test_adapters_need_the_bytes_that_the_plan_says(fsdp_ranks: Ranks, checkpoint: Path) -> None:
    found = fsdp_ranks("adapted")
    rank, actor = "model.lora_rank=4", "actor_rollout_ref"
    words = [f"{actor}.{rank}", f"{actor}.model.target_modules=all-linear"]
    words += ["algorithm.adv_estimator=gae", f"trainer.n_gpus_per_node={len(found)}"]
    line = ("plan", "--json", "--model", checkpoint, "--", "python", "-m", "verl.trainer.main_ppo")
    for place, stored in enumerate(("fp32", "bf16")):
        key = f"{actor}.actor.fsdp_config.model_dtype={stored}"
        code, out, said = command(*line, *words, key)
        assert code == 0, said
        (part,) = json.loads(out)["models"][0]["with_shim"][0]["parts"]
        ranks = [one["audits"][place]["parts"][0] for one in found]
        assert part["parameters"] == ranks[0]["parameters"]
        for component in {*part["components"], *ranks[0]["components"]} - {"other"}:
            held = [one["components"].get(component, {"bytes": 0}) for one in ranks]
            total, planned = sum(one["bytes"] for one in held), part["components"].get(component)
            assert total == (planned["group_bytes"] if planned else 0), (stored, component)
            assert total == 0 or held[0]["dtypes"] == planned["dtypes"], (stored, component)
    assert "prepare_inputs_for_generation" in found[0]["critic"]
    code, out, _ = command(*line, *words, f"++critic.{rank}")
    told = [(one["code"], one["key"]) for one in json.loads(out)["problems"]]
    assert (code, told) == (1, [("lora", "critic.model.lora_rank")])


def test_a_rank_without_the_shim_is_named(fsdp_ranks: Ranks) -> None:
    assert "of 2 ranks, rank 1: without the shim" in fsdp_ranks("half")[0]


# -- strict ------------------------------------------------------------------------------------


def test_strict_raises_where_a_trained_engine_gets_its_optimizer(fsdp_ranks: Ranks) -> None:
    (found,) = fsdp_ranks("strict", world=1)
    assert found["bad setting"].startswith("SettingsError: PRECISION_SHIM_GROWTH_INTERVAL='often'")
    refused = f"SeamError: verl {VERL}: fp16-scaling, group 'fsdp engine', is refused whole"
    assert found["refused"].startswith(refused)
    for harmless in (
        "bad setting, reference",
        "refused, reference",
        "refused, not strict",
        "nothing wrong",
    ):
        assert found[harmless] == "", harmless
