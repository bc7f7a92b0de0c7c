"""The command ``plan`` on a toy framework: what it prints, and its exit status."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from precision_shim.cli import main
from precision_shim.cli import plan as plan_command
from precision_shim.errors import PlanError
from precision_shim.planning import plot, shapes
from precision_shim.planning.command import Job, Options, file_of, read_launch_line
from precision_shim.planning.record import Plan, Problem
from precision_shim.planning.request import Request, Rules, make
from precision_shim.planning.search import search
from precision_shim.planning.text import GB, render, spans
from precision_shim.process.settings import resolve
from precision_shim_adapters.fp16.plan import ShardedModel
from precision_shim_adapters.megatron.deciding.legality import NEWEST
from precision_shim_adapters.megatron.deciding.requested import RequestedConfig
from precision_shim_adapters.megatron.planning import plan as megatron_plan
from precision_shim_adapters.megatron.planning.plan import CONFIG, DDP, MegatronModel
from precision_shim_adapters.megatron.planning.sizes import Sizes

from .models import QWEN3_30B_A3B, mixture, plan_model

torch = pytest.importorskip("torch")
SETTINGS = resolve(environ={})
RULES = Rules("2.14", "0.18.2")


class Toy:
    """A framework's row."""

    framework = "toy"
    packages = ("toytrainer",)


def job(words: list[str], **options: Any) -> Job:
    found = read_launch_line(words, [Toy()], SETTINGS, Options(**options))
    # The plan asks an adapter what would be in force, and the toy has no adapter.
    return replace(found, framework="verl")


def asked(world: int = 64, **wishes: Any) -> MegatronModel:
    sizes = Sizes(world, tensor=2, pipeline=2, expert=8, sequence_parallel=True)
    return MegatronModel(
        RequestedConfig(subject="actor", **wishes),
        mixture(QWEN3_30B_A3B),
        sizes,
        torch.bfloat16,
        key="optim.{}",
    )


def request(*models: Any, world: int = 64) -> Request:
    return Request("toy", "1.0", world, models, megatron=True)


LINE = ["python", "-m", "toytrainer.main", "a=1"]


# -- the launch line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "target", "arguments"),
    [
        ("python -m toytrainer.main a=1", "toytrainer.main", ("a=1",)),
        ("A=1 B=2 uv run --extra x -m toytrainer.main a", "toytrainer.main", ("a",)),
        ("torchrun --nproc_per_node=8 -m toytrainer.sft x", "toytrainer.sft", ("x",)),
        ("ray job submit --a b -- python3 -m toytrainer.main -- y", "toytrainer.main", ("y",)),
        ("python toytrainer/main.py z=1", "toytrainer/main.py", ("z=1",)),
    ],
)
def test_the_entry_point_names_the_framework(
    line: str, target: str, arguments: tuple[str, ...]
) -> None:
    found = read_launch_line(line.split(), [Toy()], SETTINGS, Options())
    assert (found.framework, found.target, found.arguments) == ("toy", target, arguments)


def test_a_script_is_known_by_what_it_imports(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import os\nfrom toytrainer.things import run\n")
    assert job(["python", str(script)]).source == script
    script.write_text("import os\n")
    with pytest.raises(PlanError, match="expected a module behind -m"):
        job(["python", str(script)])


def test_variables_in_front_count() -> None:
    found = job(["PRECISION_SHIM_OPTIMIZER_STATES=auto", *LINE])
    assert found.environ == {"PRECISION_SHIM_OPTIMIZER_STATES": "auto"}
    assert (
        job(["torchrun", "--nnodes", "2", "--nproc-per-node", "8", "-m", "toytrainer.x"]).launched(
            "nproc-per-node"
        )
        == 8
    )
    assert file_of("json.decoder") is not None


# -- names and shapes --------------------------------------------------------------------------


def write(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header = {name: {"dtype": "BF16", "shape": shape} for name, shape in tensors.items()}
    text = json.dumps({"__metadata__": {}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_headers_are_read_and_experts_counted_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1, "tie_word_embeddings": true}')
    experts = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": (4, 2) for n in range(64)}
    write(tmp_path / "model-1.safetensors", experts)
    write(
        tmp_path / "model-2.safetensors",
        {"model.embed_tokens.weight": (10, 2), "lm_head.weight": (10, 2), "x.inv_freq": (3,)},
    )
    found = shapes.read_model(tmp_path)
    assert [(one.name, one.shape, one.repeated) for one in found.weights] == [
        ("model.layers.0.mlp.experts.*.up_proj.weight", (4, 2), 64),
        ("model.embed_tokens.weight", (10, 2), 1),
    ]
    assert found.parameters == 64 * 8 + 20
    assert "safetensors" in found.source


def test_what_transformers_drops_or_ties_is_not_counted_twice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    kept = {"model.embed_tokens.weight": (10, 2), "model.layers.0.mlp.up_proj.weight": (4, 2)}
    further = {
        "model.layers.1.eh_proj.weight": (4, 2),
        "mtp.layers.0.mlp.up_proj.weight": (4, 2),
        "mtp.fc.weight": (4, 2),
    }
    write(tmp_path / "model.safetensors", {**kept, **further})
    found = shapes.read_model(tmp_path)
    assert [one.name for one in found.weights] == list(kept)
    assert found.tied  # the config does not mention tying, and there is no output layer
    write(tmp_path / "model.safetensors", {**kept, "lm_head.weight": (10, 2)})
    assert not shapes.read_model(tmp_path).tied


def test_files_that_are_not_all_here_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    names = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    write(tmp_path / "model-1.safetensors", {"a.weight": (10, 2)})
    with pytest.raises(PlanError, match="transformers cannot"):
        shapes.read_model(tmp_path)
    write(tmp_path / "model-2.safetensors", {"b.weight": (10, 2)})
    assert shapes.read_model(tmp_path).parameters == 40


def test_experts_that_are_no_number_are_none() -> None:
    model = shapes.Model((), {"moe_num_experts": [64, 64], "num_experts": "many"})
    assert model.experts == 0
    assert shapes.fewest_experts({"moe_top_k": [6, 6], "n_group": None}) == 1
    with pytest.raises(PlanError, match="transformers cannot"):
        shapes.from_config({"model_type": "nothing", "moe_num_experts": [64, 64]}, "config.json")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("config.json", b"{", "is no JSON"),
        ("config.json", b"[]", "expected a JSON object"),
        ("model.safetensors", b"123", "is no safetensors file"),
        ("model.safetensors", struct.pack("<Q", 1 << 40), "header of"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PlanError, match=expected) as found:
        shapes.read_model(tmp_path)
    assert str(tmp_path / name) in str(found.value)


def test_a_size_is_enough() -> None:
    model = shapes.of_size("30.5B,experts=29e9")
    assert model.parameters == 30_500_000_000
    for wrong in ("x", "7B,layers=3", "7B,experts=8B", "", "-1"):
        with pytest.raises(PlanError, match="expected N or N,experts=M"):
            shapes.of_size(wrong)


def test_a_model_that_is_not_here_has_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--parameters"):
        job(LINE).model(tmp_path / "nothing")
    assert job(LINE, parameters="7B").model("anything").parameters == 7 * 10**9


# -- text, JSON and pictures -------------------------------------------------------------------


def plan_models(*models: Any) -> Plan:
    return make(job(LINE), request(*(models or (asked(),))), RULES)


def test_the_table_says_what_fits_and_what_does_not() -> None:
    text = render(plan_models(), 13.0)
    assert text.startswith("plan of toy 1.0, 64 GPUs, TransformerEngine 2.14")
    assert "12.57" in text
    assert "0.43" in text
    assert "activations" in text
    over = render(plan_models(), 12.0)
    assert "0.57 over" in over
    assert all(len(line) <= 110 for line in text.splitlines())


def test_stages_that_are_alike_stand_together() -> None:
    assert spans([0, 2, 3, 4, 9]) == "0, 2-4, 9"


def test_json_has_all_keys() -> None:
    values = json.loads(json.dumps(plan_models().to_dict()))
    assert {"framework", "version", "transformer_engine", "megatron_core"} <= values.keys()
    assert {"world_size", "problems", "models"} <= values.keys()
    (model,) = values["models"]
    keys = {"subject", "parameters", "layout", "decisions", "traffic", "before", "after"}
    assert keys <= model.keys()
    assert set(model["traffic"]["after"]) == {"reduce_scatter", "all_gather"}
    for stage in model["after"]:
        assert {"stage", "parts", "totals"} <= stage.keys()
        total = sum(
            held["bytes"] for part in stage["parts"] for held in part["components"].values()
        )
        assert stage["totals"]["bytes"] == total


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan{suffix}"
    plot.draw(plan_models(), path, 80.0)
    assert path.stat().st_size > 1000
    with pytest.raises(PlanError, match=r"\.svg or \.png"):
        plot.draw(plan_models(), tmp_path / "plan.pdf")


# -- the search --------------------------------------------------------------------------------


def test_the_search_gives_up_no_more_than_it_has_to() -> None:
    def of(memory: float) -> Any:
        return search(job(LINE), request(asked()), RULES, memory * GB)

    assert (of(13.0).lines, of(13.0).gives_up) == ((), "")
    first = of(12.0)
    assert first.lines == (
        "optim.use_precision_aware_optimizer=true",
        "optim.store_param_remainders=true",
    )
    assert first.plan is not None
    assert first.plan.peak() <= 12 * GB
    lower = of(9.5)
    assert "grad_reduce_in_fp32=false" in lower.lines
    nothing = of(3.0)
    assert nothing.plan is None


def test_the_smallest_number_of_gpus_fits_and_half_of_it_does_not() -> None:
    found = search(job(LINE), request(asked()), RULES, 24 * GB)
    assert found.fewest == 32
    for world, fits in ((32, True), (16, False)):
        made = make(job(LINE), request(asked(world), world=world), RULES)
        assert (not made.problems and made.peak() <= 24 * GB) is fits


def test_the_framework_checks_the_written_config_alone() -> None:
    """A search neither repeats the framework's check nor ends because of its answer."""
    calls = []

    def ask() -> tuple[list[Problem], list[str]]:
        calls.append("asked")
        return [Problem("flags", "", "check", "it refuses this", "Correct it.")], ["a note"]

    checked = replace(request(asked()), ask=ask)
    made = make(job(LINE), checked, RULES)
    assert [one.code for one in made.problems] == ["flags"]
    assert "a note" in made.notes
    found = search(job(LINE), checked, RULES, 24 * GB)
    assert (found.plan is not None, found.fewest) == (True, 32)
    assert calls == ["asked"]
    wrong = replace(checked, problems=(Problem("size", "", "tp", "it is 0", "Write 1."),))
    assert [one.code for one in make(job(LINE), wrong, RULES).problems] == ["size"]


def test_settings_that_are_not_legal_here_are_not_offered() -> None:
    assert [one.lines for one in asked().variants(job(LINE), Rules("2.0", None))] != []
    offered = [
        line for one in asked().variants(job(LINE), Rules("2.2", None)) for line in one.lines
    ]
    assert not any("exp_avg" in line for line in offered)
    late = asked(asked={"adam_beta2": 0.95})
    lines = [line for one in late.variants(job(LINE), RULES) for line in one.lines]
    assert "optim.exp_avg_sq_dtype=bf16" in lines


def test_models_on_other_gpus_are_not_added() -> None:
    job_ = job(LINE)
    first, second = asked(), replace(asked(32), place="others")
    together = make(job_, request(first, replace(second, place="")), RULES)
    apart = make(job_, request(first, second), RULES)
    alone = [make(job_, request(one), RULES).peak() for one in (first, second)]
    assert apart.peak() == max(alone)
    assert together.peak() == sum(alone)
    assert "on the same GPUs" in render(apart)
    assert "on the same GPUs" not in render(together)
    found = search(job_, request(first, second), RULES, 80 * GB)
    assert found.plan is not None
    assert [one.layout["dp"] for one in found.plan.models] == [16, 8]


def test_models_are_together_unless_the_framework_moves_them() -> None:
    one = plan_models().peak()
    both = plan_models(asked(), asked())
    assert both.peak() == 2 * one
    everything = ("params", "frozen", "master", "exp_avg", "exp_avg_sq")
    away = replace(asked(), parked={"offload": everything})
    apart = plan_models(asked(), away)
    assert apart.models[1].stays == {"before": 0, "after": 0}
    assert apart.peak() == 2 * one  # the other model's step, while this model stays in memory
    assert plan_models(away, away).peak() == one
    assert "offload: between the phases of a step the host holds" in apart.models[1].notes[-1]
    assert "all models" in render(both, 20.0)


# -- the command -------------------------------------------------------------------------------


def test_what_is_no_job_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "--", "python", "nothing.py"])
    assert end.value.code == 2
    assert "expected a module behind -m" in capsys.readouterr().err
    for words in (["plan"], ["plan", "--search", "--", "python", "nothing.py"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--gpu-memory", "nan"),
        ("--gpu-memory", "-3"),
        ("--gpu-memory", "inf"),
        ("--transformer-engine", "foo"),
        ("--megatron-core", "main"),
        ("--", "python", "x" * 5000 + ".py"),
    ],
)
def test_an_option_that_makes_no_sense_ends_with_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words, *LINE])
    assert end.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_number_of_gpus_that_is_not_known_here_is_no_guess() -> None:
    words = ["torchrun", "--nproc-per-node=gpu", "-m", "toytrainer.x"]
    with pytest.raises(PlanError, match="nproc-per-node=gpu"):
        job(words).launched("nproc-per-node")
    elastic = ["torchrun", "--nnodes", "1:4", "-m", "toytrainer.x"]
    assert job(elastic).launched("nnodes") == 4


def test_heads_on_dtensor() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = shapes.Model((shapes.Weight("a.weight", (8, 8)),), config)
    (found,) = make(
        job(LINE), request(ShardedModel("policy", model, 8, "fp32", tensor=4)), RULES
    ).problems
    assert (found.code, "num_key_value_heads of 2" in found.message) == ("heads", True)


@pytest.mark.parametrize("group", ["world", "tensor", "context", "replicas"])
def test_a_group_of_no_gpu_on_dtensor_is_named(group: str) -> None:
    asked = replace(ShardedModel("policy", shapes.of_size("8B"), 8, "fp32"), **{group: 0})
    made = make(job(LINE), request(replace(asked, keys={group: "cfg.it"})), RULES)
    assert [(one.code, one.key) for one in made.problems] == [("size", "cfg.it")]


def test_fsdp_is_planned_too() -> None:
    model = shapes.of_size("8B")
    made = plan_models(ShardedModel("policy", model, 64, "fp32"))
    (stage,) = made.models[0].after
    assert stage.totals["bytes"] == 8 * 10**9 * 16 // 64
    on_host = plan_models(ShardedModel("policy", model, 64, "fp32", offload=True))
    assert on_host.models[0].after[0].totals["gpu"] == 0
    found = plan_models(ShardedModel("policy", model, 64, "fp32", shards=7))
    assert {one.code for one in found.problems} == {"world-size"}
    assert found.models == ()


def test_an_optimizer_whose_states_are_not_known_is_refused() -> None:
    model = shapes.of_size("8B")
    for one in (
        ShardedModel("policy", model, 64, "fp32", optimizer="Muon"),
        asked(optimizer="muon"),
    ):
        with pytest.raises(PlanError, match=r"[Mm]uon.*upper bound"):
            plan_models(one)


# -- errors in the plan itself -----------------------------------------------------------------


def status_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> tuple[object, str]:
    """Exit status and message of a plan in which reading the config raises ``error``."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(plan_command, "_read", fails)
    with pytest.raises(SystemExit) as end:
        main(["plan", "--", *LINE])
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [AttributeError("no such thing"), RuntimeError("out of luck"), OSError("no number, no name")],
)
def test_a_fault_of_the_plan_is_to_be_reported_and_says_nothing_of_the_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    code, said = status_where(monkeypatch, capsys, error)
    assert code == 2
    assert f"{type(error).__name__}: {error}" in said
    assert "Report this line with the command." in said
    assert "Correct" not in said


def test_a_file_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = status_where(
        monkeypatch, capsys, PermissionError(13, "Permission denied", "/models/config.json")
    )
    assert code == 2
    assert "/models/config.json: Permission denied. Correct the path" in said
    assert "Report" not in said


# -- keys that do not exist --------------------------------------------------------------------


def test_a_misspelt_field_of_megatrons_is_illegal_and_the_near_one_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {CONFIG: ("use_precision_aware_optimizer", "lr"), DDP: ("grad_reduce_in_fp32",)}
    monkeypatch.setattr(megatron_plan, "fields_of", fields.__getitem__)
    wrong = asked(asked={"use_precision_aware_optimiser": True, "lr": 1.0})
    wrong = replace(wrong, bucket_key="ddp.grad_reduce_in_fp32", bucket_keys=("grad_reduce",))
    _, found = plan_model(wrong, SETTINGS, NEWEST)
    assert [(one.code, one.key) for one in found] == [
        ("key", "optim.use_precision_aware_optimiser"),
        ("key", "ddp.grad_reduce"),
    ]
    assert found[0].remedy.startswith("Did you mean use_precision_aware_optimizer? Correct")


def test_a_number_in_the_place_of_a_dtype_is_illegal() -> None:
    _, found = plan_model(asked(asked={"exp_avg_dtype": 32, "lr": 1}), SETTINGS, NEWEST)
    assert [(one.code, one.key) for one in found] == [("dtype", "optim.exp_avg_dtype")]


def test_traffic_without_the_shim_does_not_read_as_none() -> None:
    made = make(job(LINE), request(asked()), RULES)
    shown = " ".join(render(made).split())
    assert "sends in a step: without the shim: reduce_scatter" in shown
    assert "computes in bf16" in shown
