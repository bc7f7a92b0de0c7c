"""verl's own server and the real SGLang: the audit reads the dtypes of the engine's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim.auditing import halves
from precision_shim.auditing.contradictions import contradictions
from precision_shim.auditing.halves import BASE, ROLLOUT, Held, Sent, Weights
from precision_shim_adapters.rollout import of_rollout
from precision_shim_adapters.rollout.held_sglang import SAMPLE

from ..rank_server import Ranks, rank_server
from ..ray_cluster import drive
from ..tiny_models import make_checkpoint
from .weights import make_llama, share_of

KEY = "actor_rollout_ref.rollout.dtype"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with rank_server("tests.sglang.servers", tmp_path_factory.mktemp("ranks")) as found:
        yield found


@pytest.fixture(scope="module")
def ask(ranks: Ranks) -> Callable[..., Any]:
    """Runs a case of ``servers.py``, only once for each set of options."""
    known: dict[str, Any] = {}

    def found(case: str, model: Path, dtype: str, **options: Any) -> Any:
        name = f"{case} {model} {dtype} {options}"
        if name not in known:
            (known[name],) = ranks(
                case, world=1, timeout=200, model=str(model), dtype=dtype, **options
            )
        return known[name]

    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 model of an architecture whose weights SGLang does not return."""
    return make_checkpoint(tmp_path_factory.mktemp("qwen"), "bfloat16", width=64)


def sent(asked: str, own: float, on_the_wire: float) -> Sent:
    """The audit's record of an fp32 trainer's first sync."""
    weights = {"sent": on_the_wire, "own": own}
    groups = {side: {BASE: Weights({"fp16": 9999}, one, 9999)} for side, one in weights.items()}
    return Sent("verl", "actor", 0, 1, "", asked, KEY, 1, **groups)


def test_an_engine_is_asked_at_its_start_and_after_weight_syncs(ask: Any, llama: Path) -> None:
    done = ask("synced", llama, "float16")
    found = [Held.of(one) for one in done["held"]]
    assert [one.sync for one in found] == [0, 1, 2]
    for one in found:
        assert (one.framework, one.subject, one.name) == ("verl", ROLLOUT, "server")
        assert (one.engine, one.model) == ("sglang 0.5.12", str(llama))
        assert (one.computes, one.quantization, one.kv_cache) == ("fp16", "", "auto")
        assert one.not_answered == ""
    assert done["tokens"] > 0


def test_the_share_that_bf16_represents_is_of_the_engines_own_weights(
    ask: Any, llama: Path
) -> None:
    found = [Held.of(one) for one in ask("synced", llama, "float16")["held"]]
    half, over_bf16 = torch.float16, torch.bfloat16
    wanted = [share_of(llama, half), share_of(llama, half), share_of(llama, over_bf16, half)]
    assert wanted[2][0] == 1.0 > wanted[1][0]
    weights = [one.weights for one in found]
    assert [(one.exact, one.sampled) for one in weights if one is not None] == wanted
    assert {(one.sample, *one.kinds, *one.kv_held) for one in found} == {(SAMPLE,)}
    # Sampled weights are no contradiction, because a trainer may have frozen them.
    assert not list(contradictions([sent("float16", 0.1, 0.1)], [found[2]]))


def test_auto_is_told_as_sglang_resolved_it_and_no_weight_is_guessed(
    ask: Any, qwen: Path, ranks: Ranks
) -> None:
    done = ask("synced", qwen, "auto")
    for one in map(Held.of, done["held"]):
        assert one.computes == "bf16"
        assert one.weights is None
        assert one.not_answered == "SGLang tells no weights of Qwen2ForCausalLM"
    assert done["told"] is None  # SGLang logs an error for this test's own request
    assert "".join(ranks.said).count("Error when getting parameter") == 1


def test_an_engines_own_dtype_contradicts_the_rollouts_key(ask: Any, llama: Path) -> None:
    overriding = {"dtype": "bfloat16", "enable_fp32_lm_head": True}
    one = Held.of(ask("overridden", llama, "float16", engine_kwargs=overriding))
    assert (one.computes, one.head) == ("bf16", "fp32")
    (found,) = contradictions([sent("float16", 0.1, 0.1)], [one])
    assert found.code == "engine-dtype"
    assert "sglang 0.5.12" in found.message


def test_the_shim_knows_that_this_sglang_has_an_lm_head_in_fp32() -> None:
    head = of_rollout("sglang", {}, "engine_kwargs.sglang")
    assert (head.key, head.value) == ("engine_kwargs.sglang.enable_fp32_lm_head", True)
    assert (head.refusal, head.in_fp32) == ("", False)


def test_without_an_audit_directory_no_engine_is_asked(ask: Any, llama: Path) -> None:
    done = ask("unaudited", llama, "float16")
    assert done["held"] is None
    assert done["asked"] == []
    assert done["asked by itself"] == ["state"]


def test_an_engine_that_does_not_answer_does_not_end_the_rollout(ask: Any, llama: Path) -> None:
    done = ask("silent", llama, "float16")
    stopped, going_on = Held.of(done["stopped"]), Held.of(done["going on"])
    assert (stopped.sync, stopped.computes, stopped.weights) == (1, "", None)
    assert stopped.not_answered == "TimeoutError: no answer in 0.5 s"
    assert (going_on.sync, going_on.computes, going_on.not_answered) == (2, "fp16", "")


@pytest.mark.parametrize(("dtype", "computes"), [("bfloat16", "bf16"), ("auto", "")])
def test_over_http_sglang_does_not_tell_what_auto_became(
    ask: Any, llama: Path, dtype: str, computes: str
) -> None:
    done = ask("over_http", llama, dtype)
    one, nobody = Held.of(done["held"]), Held.of(done["nobody"])
    assert (one.engine, one.model, one.computes) == ("sglang 0.5.12", str(llama), computes)
    assert (one.sync, one.not_answered) == (1, "")
    became = {"bfloat16": torch.bfloat16, "auto": torch.float16}[dtype]  # SGLang's choice for fp32
    assert one.weights is not None
    assert (one.weights.exact, one.weights.sampled) == share_of(llama, became)
    assert (nobody.computes, nobody.weights) == ("", None)
    assert nobody.not_answered.startswith("URLError: ")


@pytest.mark.timeout(700)
def test_verls_replica_starts_the_engine_in_a_ray_actor_where_the_shim_asks_it(
    tmp_path_factory: pytest.TempPathFactory, llama: Path, tmp_path: Path, start_up_file: None
) -> None:
    with rank_server("tests.verl.ray_processes", tmp_path_factory.mktemp("driver")) as drivers:
        done = drive(
            drivers,
            Path(__file__).with_name("ray_driver.py"),
            llama,
            "float16",
            timeout=600,
            PRECISION_SHIM="1",
            PRECISION_SHIM_AUDIT_DIR=str(tmp_path),
        )
    assert done["tokens"] > 0
    assert done["actor"]["process"] != done["process"]
    assert set(done["actor"]["seams"].values()) == {"wrapped"}
    (found,) = [one for _, one in halves.read(tmp_path)]
    assert (found.framework, found.subject, found.name) == ("verl", ROLLOUT, "sglang_server_0_0")
    assert (found.engine, found.computes, found.sync) == ("sglang 0.5.12", "fp16", 2)
    assert found.weights is not None
    assert (found.weights.exact, found.weights.sampled) == share_of(llama, torch.float16)
