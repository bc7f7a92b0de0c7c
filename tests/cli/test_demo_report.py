"""The demo's report, made from results that this file writes."""

import copy
import importlib.util
import sys
from pathlib import Path

from precision_shim.process.settings import FEATURES

# The tests run on the wheel, which lacks the demo; the repository's root is not on sys.path.
_FILE = Path(__file__).parents[2] / "examples/demo/report.py"
_SPEC = importlib.util.spec_from_file_location("demo_report", _FILE)
_MODULE = sys.modules["demo_report"] = importlib.util.module_from_spec(_SPEC)  # dataclasses look
_SPEC.loader.exec_module(_MODULE)
check, differences, promised = _MODULE.check, _MODULE.differences, _MODULE.promised
sparkline, tolerance = _MODULE.sparkline, _MODULE.tolerance

_SIZE = {"float32": 4, "bfloat16": 2, "int16": 2}


def a_rank(bucket: str, master: str, exp_avg: str, exp_avg_sq: str):
    dtypes = {
        "params": "bfloat16",
        "grad_buckets": bucket,
        "master": master,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    parts = {
        name: {"dtypes": [dtype], "bytes_per_parameter": float(_SIZE[dtype])}
        for name, dtype in dtypes.items()
    }
    return {
        "parts": parts,
        "main_grads": [bucket],
        "per_parameter": float(sum(_SIZE[dtype] for dtype in dtypes.values())),
    }


def a_result(name: str, finals, rank, beta2=0.95, enabled=True):
    return {
        "name": name,
        "asked": {"main_grads_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"},
        "shim": {
            "enabled": enabled,
            "features": FEATURES if enabled else (),
            "settings": {"optimizer_states": "auto"} if enabled else {},
        },
        "runs": [
            {
                "seed": seed,
                "losses": [5.5, final, final],
                "held_out": final,
                "ranks": [copy.deepcopy(rank) for _ in range(2)],
                "adam_beta2": beta2,
            }
            for seed, final in enumerate(finals)
        ],
    }


WITHOUT = a_result("without", [2.00, 2.03, 2.05], a_rank("float32", *["float32"] * 3))
BF16 = a_rank("bfloat16", "int16", "bfloat16", "bfloat16")


def wrong(with_shim, without=WITHOUT):
    return {one.name for one in check(without, with_shim, tolerance(without)) if not one.ok}


def test_at_the_default_beta2_the_second_moment_stays_fp32():
    guarded = a_rank("bfloat16", "int16", "bfloat16", "float32")
    finals = [2.01, 2.03, 2.04]
    assert wrong(a_result("with", finals, guarded, beta2=0.999)) == set()
    assert wrong(a_result("with", finals, BF16, beta2=0.999)) == {"with: dtypes", "with: bytes"}
    assert promised({}, 0.999, "follow-model").exp_avg_sq == "bfloat16"
    assert promised({"exp_avg_sq_dtype": "bfloat16"}, 0.999, "auto").exp_avg_sq == "bfloat16"


def test_an_effect_that_is_not_there_is_named():
    result = a_result("with", [2.0, 2.03, 2.05], WITHOUT["runs"][0]["ranks"][0], enabled=False)
    failed = {one.name: one.found for one in check(WITHOUT, result, tolerance(WITHOUT))}
    assert wrong(result) == {"shim installed", "with: dtypes", "with: bytes"}
    assert "PRECISION_SHIM=0" in failed["shim installed"]
    assert "grad_buckets is fp32, promised bf16" in failed["with: dtypes"]
    assert failed["with: bytes"] == "18 B/param measured, promised 10 or 12"


def test_one_rank_that_differs_is_enough():
    result = a_result("with", [2.01, 2.03, 2.04], BF16)
    result["runs"][2]["ranks"][1]["parts"]["exp_avg"]["dtypes"] = ["float32"]
    assert wrong(result) == {"with: dtypes"}
    result = a_result("with", [2.01, 2.03, 2.04], BF16)
    result["runs"][0]["ranks"][1]["per_parameter"] = 12.0
    assert wrong(result) == {"with: bytes"}


def test_one_seed_is_compared_with_what_its_batches_change():
    without = a_result("without", [2.00], a_rank("float32", *["float32"] * 3))
    without["runs"][0]["losses"] += [1.9, 2.1]  # a standard error of 0.1 / sqrt(2)
    assert wrong(a_result("with", [2.05], BF16), without) == set()
    assert wrong(a_result("with", [2.10], BF16), without) == {"final losses agree"}


def test_losses_that_fall_apart_or_do_not_fall():
    assert wrong(a_result("with", [2.01, 2.03, 2.11], BF16)) == {"final losses agree"}
    not_falling = {"with: the loss falls", "final losses agree"}
    assert wrong(a_result("with", [2.01, 2.03, 6.0], BF16)) == not_falling
    assert wrong(a_result("with", [2.01, 2.03, float("nan")], BF16)) == not_falling
