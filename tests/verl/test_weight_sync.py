"""Weights sent to the rollout, compared bit by bit: verl's real worker and engines, over gloo.

``sync_ranks.py`` has the ranks' cases. In each rank the jobs without the shim run first. FSDP1 does
not start on a CPU: torch refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..processes.commands import command
from ..processes.rank_server import Ranks
from .conftest import VERL

pytestmark = [
    pytest.mark.skipif(Version("0.7") > VERL, reason="0.6's worker is another"),
    pytest.mark.slow,
    pytest.mark.oldest,
]

ROUNDS = Version("0.9") > VERL
"""Whether verl's FSDP engine rounds all weights to bf16, and not only merged LoRA."""

LORA = "base" if ROUNDS else "merged"
"""The kind of weights that verl sends with ``lora.merge``; before 0.9 without the adapters."""

Launch = Callable[..., list[dict[str, Any]]]

KEY = "rollout.engine_kwargs.vllm.dtype"


def on(dtype: str, **options: Any) -> dict[str, Any]:
    return {"on": True, "dtype": dtype, **options}


def off(dtype: str, **options: Any) -> dict[str, Any]:
    return {"on": False, "dtype": dtype, **options}


def both(dtype: str = "float16", **options: Any) -> dict[str, Any]:
    return {"off": off(dtype, **options), "on": on(dtype, **options)}


@pytest.fixture(scope="module")
def launch(fsdp_ranks: Ranks) -> Launch:
    """Runs jobs in fresh processes; returns the results of each rank, by the jobs' names."""

    def run(kind: str, *, world: int = 2, **jobs: Any) -> list[dict[str, Any]]:
        return fsdp_ranks("sync", world=world, kind=kind, jobs=jobs)

    return run


@pytest.fixture(scope="module")
def two_ranks(launch: Launch) -> list[dict[str, Any]]:
    """Results of the same jobs without the shim and with it, on two ranks."""
    jobs = {
        "off": off("float16"),
        "off, lora": off("float16", lora=True),
        "on": on("float16"),
        "on, lora": on("float16", lora=True),
        "on, bf16": on("bfloat16"),
    }
    return launch("stream", **jobs)


@pytest.fixture(scope="module")
def one_rank(launch: Launch) -> dict[str, Any]:
    """Results for rollouts in each dtype, and for parameters that are stored in fp16."""
    jobs = {
        "off": off("bfloat16"),
        "on": on("bfloat16"),
        "half": on("Half"),
        "fp32": on("float32"),
        "fp16, lora": on("float16", lora=True, stored="fp16"),
        "stored fp16, fp32": on("float32", stored="fp16"),
        "vllm's own": on("float16", key=KEY),
        "auto": on("auto"),
    }
    (found,) = launch("stream", world=1, **jobs)
    return found


def test_an_fp16_rollout_gets_the_trainers_weights_rounded_once(two_ranks: Any) -> None:
    for rank in two_ranks:
        assert rank["on"]["is"] == [f"trainer in {'fp16' if ROUNDS else 'fp32'}"]
        assert rank["on, lora"]["is"] == [f"{LORA} in fp16"]
        assert rank["on"]["on bf16's grid"] < 1.0
        assert rank["on, lora"]["on bf16's grid"] < 1.0
        said = "verl weights to the rollout: rollout-agreement: float16, rounded once (verl itself"
        assert sum(one.startswith(said) for one in rank["on, lora"]["decisions"]) == 1


def test_a_sync_costs_what_it_did(two_ranks: Any) -> None:
    """The shim adds no collectives, copies, or reads by the host."""
    for rank in two_ranks:
        for job in ("", ", lora"):
            assert rank[f"on{job}"]["operators"] == rank[f"off{job}"]["operators"]
            assert rank[f"on{job}"]["eager"] == rank[f"off{job}"]["eager"]
            assert any("all_gather" in one for one in rank[f"on{job}"]["operators"])


def test_a_bf16_rollout_gets_verls_own_stream(two_ranks: Any, one_rank: Any) -> None:
    for before, after in ((one_rank["off"], one_rank["on"]), *[(None, r) for r in two_ranks]):
        job = after if before else after["on, bf16"]
        assert job["verls"]
        assert job["is"] == [f"trainer in {'bf16' if ROUNDS else 'fp32'}"]
        if before:
            ours: dict[str, Any] = {"decisions": [], "compared": []}
            assert {**job, **ours} == {**before, **ours}


def test_a_stream_leaves_the_trainer_as_it_was(two_ranks: Any, one_rank: Any) -> None:
    """Streaming twice gives equal weights, and leaves the trainer's weights unmerged."""
    for rank in (*two_ranks, one_rank):
        assert all(job["untouched"] and job["again"] for job in rank.values())


@pytest.mark.parametrize(
    ("job", "sent"),
    [
        ("half", "trainer in fp16"),
        ("fp32", "trainer in fp32"),
        ("fp16, lora", f"{LORA} in fp16"),
        ("stored fp16, fp32", "trainer in fp16"),
        ("vllm's own", "trainer in fp16"),
    ],
)
def test_each_pair_of_dtypes(one_rank: Any, job: str, sent: str) -> None:
    if not ROUNDS and "lora" not in job and "stored" not in job:
        sent = "trainer in fp32"  # verl itself sends weights in the trainer's dtype
    assert one_rank[job]["is"] == [sent]


def test_auto_is_told_and_left(one_rank: Any) -> None:
    job = one_rank["auto"]
    assert job["verls"]
    told = [one for one in job["said"] if "dtype=auto" in one]
    assert [one.count("Write actor_rollout_ref.rollout.dtype=float16") for one in told] == (
        [1] if ROUNDS else []
    )


def test_the_torchtitan_engine(launch: Launch) -> None:
    for found in launch("titan", **both(), bf16=on("bfloat16")):
        assert found["off"]["is"] == found["bf16"]["is"] == ["trainer in bf16"]
        assert found["bf16"]["verls"]
        assert found["on"]["is"] == ["trainer in fp16"]
        assert (found["off"]["router"], found["on"]["router"]) == ("torch.bfloat16", "exact")
        casts = "aten._to_copy"  # the router is not cast
        operators = found["off"]["operators"]
        assert found["on"]["operators"] == {**operators, casts: operators[casts] - 1}
        assert found["on"]["eager"] == found["off"]["eager"] == 0


@pytest.mark.skipif(
    Version("0.9.1") <= VERL, reason="0.9.1 gathers experts in a stream like others"
)
def test_torchtitans_expert_parallelism_is_told_and_left(launch: Launch) -> None:
    (found,) = launch("titan", world=1, **both(ep=True))
    assert found["off"]["said"] == []
    (message,) = found["on"]["said"]
    assert "the weights reach the rollout rounded to bf16" in message
    assert "under expert parallelism" in message
    assert found["on"]["verls"]
    assert found["on"]["is"] == found["off"]["is"] == ["trainer in bf16"]


def test_mooncakes_wire(launch: Launch) -> None:
    own = on("float16", written="BF16")
    (found,) = launch("mooncake", world=1, **both(), fp32=on("float32"), written=own)
    assert found["off"]["is"] == ["trainer in bf16"]
    assert found["on"]["is"] == ["trainer in fp16"]
    assert found["fp32"]["is"] == ["trainer in fp32"]
    assert found["on"]["said"] == found["fp32"]["said"] == []
    (message,) = found["written"]["said"]
    assert "engine_kwargs.mooncake.rollout_dtype=bfloat16" in message
    assert "rollout.dtype=float16" in message


def test_kimis_wire(launch: Launch) -> None:
    (found,) = launch("kimi", world=1, **both())
    assert (found["off"]["is"], found["on"]["is"]) == (["trainer in bf16"], ["trainer in fp16"])


@pytest.mark.skipif(Version("0.9") > VERL, reason="delta_sharded is from 0.9")
def test_deltas_of_the_fsdp_engine_beside_sglang(launch: Launch) -> None:
    for found in launch("shards", **both(), bf16=on("bfloat16")):
        for job, dtype in (("off", "bf16"), ("on", "fp16"), ("bf16", "bf16")):
            assert found[job]["seed"] == found[job]["is"] == [f"trainer in {dtype}"]
            assert found[job]["said"] == []
            assert found[job]["rounds"]  # the audit's halves are compared after this rounding
            assert found[job]["operators"] == found["off"]["operators"]
        assert found["on"]["dtypes"] == ["float16"]
        assert found["off"]["dtypes"] == found["bf16"]["dtypes"] == ["bfloat16"]


@pytest.mark.skipif(Version("0.9") > VERL, reason="delta_sharded is from 0.9")
def test_the_delta_checkpoint_engine(launch: Launch) -> None:
    """Each worker's start fails, because GPU packages are missing; the shim acts before that."""
    jobs = {f"{one}, bf16": on("bfloat16", engine=one) for one in ("vllm", "sglang")}
    jobs.update({one: on("float16", engine=one) for one in ("vllm", "sglang")})
    other = on("float16", engine="sglang", strategy="torchtitan")
    (found,) = launch("delta", world=1, **jobs, titan=other)
    (strict,) = launch("delta", world=1, titan={**other, "strict": True})
    for job in ("vllm, bf16", "sglang, bf16", "sglang"):
        assert found[job]["said"] == []
        assert "UnsupportedPrecisionError" not in found[job]["error"]
    (told,) = found["titan"]["said"]
    assert "rollout.dtype=float16: with actor.strategy=torchtitan verl sends every weight" in told
    assert "UnsupportedPrecisionError" not in found["titan"]["error"]
    assert strict["titan"]["error"] == f"UnsupportedPrecisionError: {told}"
    refused = "UnsupportedPrecisionError: verl" in found["vllm"]["error"]
    assert refused is (Version("0.9.1") <= VERL)
    assert ("takes no other dtype than bfloat16" in found["vllm"]["error"]) is refused


@pytest.mark.skipif(Version("0.8") > VERL, reason="0.7.1's engine autocasts to bf16")
def test_one_worker_says_whether_the_engines_agree(two_ranks: Any) -> None:
    """If a user's own driver calls no wrapped function, one worker compares the dtypes."""
    same = "verl rollout: rollout-agreement: fp16, as the actor"
    first, second = two_ranks
    for rank, times in ((first, 1), (second, 0)):
        assert len(rank["on, bf16"]["compared"]) == times
        assert rank["on"]["compared"] == rank["off"]["compared"] == []
        assert sum(one.startswith(same) for one in rank["on"]["decisions"]) == times


@pytest.mark.skipif(Version("0.8") <= VERL, reason="verl 0.8 has no legacy workers")
def test_a_worker_of_the_engine_is_not_compared_as_a_legacy_one(launch: Launch) -> None:
    """Only legacy workers compute in ``fsdp_config.dtype``; 0.7.1's engine autocasts to bf16."""
    legacy = on("float16", key="actor.fsdp_config.dtype")
    (found,) = launch("stream", world=1, legacy=legacy)
    same = "verl rollout: rollout-agreement: bf16, as the actor"
    assert sum(one.startswith(same) for one in found["legacy"]["decisions"]) == 1
    assert found["legacy"]["compared"] == []


def test_the_audit_has_what_was_sent_beside_the_trainers_own(
    launch: Launch, tmp_path: Path
) -> None:
    """Audits verl's stream, the shim's streams, merged LoRA, and a stream that rounds to bf16."""
    jobs: dict[str, dict[str, Any]] = {
        "fp16": {"dtype": "float16", "takes": 3},
        "bf16": {"dtype": "bfloat16"},
        "lora": {"dtype": "float16", "lora": True},
        "alone": {"dtype": "float16", "features": "-rollout-agreement"},
        "wire": {"dtype": "float16", "wire": "bf16"},
    }
    folders = {name: tmp_path / name for name in jobs}
    for folder in folders.values():
        folder.mkdir()
    ranks = launch("audited", **{n: {**j, "folder": str(folders[n])} for n, j in jobs.items()})
    rounds = ["bf16"] if ROUNDS else ["fp32"]
    for rank in ranks:
        for name, dtypes in (
            ("fp16", ["fp16"] if ROUNDS else ["fp32"]),
            ("bf16", rounds),
            ("lora", ["fp16"]),
            ("alone", rounds),
        ):
            job = rank[name]
            (half,) = job["halves"]
            sent, own = half["sent"]["weights"], half["own"]["weights"]
            assert sorted(sent["dtypes"]) == job["dtypes"] == dtypes
            assert sum(sent["dtypes"].values()) == job["elements"]
            assert list(own["dtypes"]) == ["fp32"]
            assert own["exact"] is False
            assert sent["exact"] is (dtypes == ["bf16"])
            assert half["sync"] == min(jobs[name].get("takes", 1), 2)
            assert half["asked"] == jobs[name]["dtype"]
            assert half["key"] == "actor_rollout_ref.rollout.dtype"
        said = [one for job in ("fp16", "bf16", "lora") for one in rank[job]["said"]]
        assert not any("-wire" in one or "weights-dtype" in one for one in said)
        assert rank["wire"]["halves"][0]["sent"]["weights"]["exact"]
    (warned,) = [one for one in ranks[0]["wire"]["said"] if "bf16-wire" in one]
    assert "something rounds them to bf16 before they are sent" in warned
    assert len([one for one in ranks[0]["alone"]["said"] if "weights-dtype" in one]) == ROUNDS
    codes = {"wire": "bf16-wire", "bf16": "rollout-dtype"}
    codes |= {"alone": "weights-dtype"} if ROUNDS else {}
    for name, folder in folders.items():
        code, said, _ = command("audit", folder)
        assert (f"contradiction, ranks 0-1: {codes.get(name)}: " in said) == (name in codes)
        assert ("contradiction" in said) == (name in codes)
        assert code == int(name in codes)


@pytest.mark.skipif(Version("0.8") <= VERL, reason="verl 0.8 has no legacy workers")
def test_the_audit_looks_at_what_a_legacy_worker_sends(launch: Launch, tmp_path: Path) -> None:
    same = "verl rollout: rollout-agreement: fp16, as the actor"
    ranks = launch("audited_legacy", one={"folder": str(tmp_path), "dtype": "float16"})
    for rank, times in zip(ranks, (1, 0), strict=True):
        done = rank["one"]
        assert sum(one.startswith(same) for one in done["decisions"]) == times
        assert done["adapter"] == "ServerAdapter"
        (half,) = done["halves"]
        sent = half["sent"]["weights"]
        assert (half["framework"], half["subject"], half["sync"]) == ("verl", "actor", 1)
        assert (half["asked"], half["key"]) == ("float16", "actor_rollout_ref.rollout.dtype")
        assert sorted(sent["dtypes"]) == done["dtypes"]
        assert sum(sent["dtypes"].values()) == done["elements"]
        assert sent["exact"] is False
