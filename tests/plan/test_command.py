"""The command ``plan`` on a toy framework: what it prints, and its exit status."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from precision_shim.errors import PlanError
from precision_shim.process.settings import resolve
from precision_shim_adapters.megatron.policy.legality import NEWEST
from precision_shim_adapters.megatron.policy.requested import RequestedConfig
from precision_shim_tools.cli import build_parser, main
from precision_shim_tools.cli import plan as plan_command
from precision_shim_tools.cli._output import Progress
from precision_shim_tools.plan import plot, shapes
from precision_shim_tools.plan.command import Job, Options, file_of, read_launch_line
from precision_shim_tools.plan.launching import read_launch
from precision_shim_tools.plan.megatron import model as megatron_plan
from precision_shim_tools.plan.megatron.model import CONFIG, DDP, MegatronModel
from precision_shim_tools.plan.megatron.sizes import Sizes
from precision_shim_tools.plan.record import JobPlan
from precision_shim_tools.plan.request import Request, Rules, make
from precision_shim_tools.plan.search import render as render_search
from precision_shim_tools.plan.search import search
from precision_shim_tools.plan.text import GB, render
from precision_shim_tools.plan.torch_optimizer import ShardedModel

from ..audit.test_command import audit_of, put
from ..processes.commands import command
from ..unit.checkpoints.written import distributed
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


def asked(world: int = 64, **requested: Any) -> MegatronModel:
    sizes = Sizes(world, tensor=2, pipeline=2, expert=8)
    return MegatronModel(
        RequestedConfig(subject="actor", **requested),
        mixture(QWEN3_30B_A3B),
        sizes,
        torch.bfloat16,
        key="optim.{}",
    )


def request(*models: Any, world: int = 64) -> Request:
    return Request("toy", "1.0", world, models)


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
    with pytest.raises(PlanError, match="expected a module behind -m") as found:
        job(["python", str(script)])
    assert "There is no file" not in str(found.value)
    with pytest.raises(PlanError, match=r"There is no file gone\.py in"):
        job(["python", "gone.py", "--config", "mine.yaml"])


def test_variables_in_front_count() -> None:
    found = job(["PRECISION_SHIM_OPTIMIZER_STATES=auto", *LINE])
    assert found.launch.named == {"PRECISION_SHIM_OPTIMIZER_STATES": "auto"}
    assert (
        job(["torchrun", "--nnodes", "2", "--nproc-per-node", "8", "-m", "toytrainer.x"]).launched(
            "nproc-per-node"
        )
        == 8
    )
    assert file_of("json.decoder") is not None


ON = {"PRECISION_SHIM": "1"}
SUBMIT = "ray job submit --working-dir . --runtime-env-json"


@pytest.mark.parametrize(
    ("line", "driver", "workers"),
    [
        ("", "1", "1"),
        ("PRECISION_SHIM=0", "0", "0"),
        ("env A=1", "1", "1"),
        ("env -u PRECISION_SHIM", None, None),
        ("/usr/bin/env --unset=PRECISION_SHIM A=1 python -u", None, None),
        ("env -C folder -uPRECISION_SHIM python", None, None),
        ("env -i A=1 PRECISION_SHIM=strict python", "strict", "strict"),
        ("env -u A python -u PRECISION_SHIM", "1", "1"),  # python's -u
        ("srun -n 2", "1", "1"),
        ("srun --export=ALL -n 2", "1", "1"),
        ("srun --export=NONE", None, None),
        ("srun --export NONE,PRECISION_SHIM=1", "1", "1"),
        ("srun --export=HOME,PATH", None, None),
        ("srun --export=HOME,PRECISION_SHIM", "1", "1"),
        ("srun --export=ALL,PRECISION_SHIM=0", "0", "0"),
        ("ray job submit --", None, None),
        ("ray job submit -- env PRECISION_SHIM=1", "1", "1"),
        ("ray job submit -- env PRECISION_SHIM=0", "0", None),
        (SUBMIT + ' {"env_vars":{"PRECISION_SHIM":"1"}} --', "1", "1"),
        (SUBMIT + '={"env_vars":{"PRECISION_SHIM":"strict"}} -- python', "strict", "strict"),
        (SUBMIT + ' {"env_vars":{"PRECISION_SHIM":"1"}} -- env -u PRECISION_SHIM', None, "1"),
        (SUBMIT + ' {"env_vars":{"PRECISION_SHIM":"0"}} -- PRECISION_SHIM=1', "1", "0"),
        (SUBMIT + ' {"env_vars":', None, None),
        ("ray job submit --runtime-env {folder}/env.yaml --", "1", "1"),
        ("ray job submit --runtime-env={folder}/none.yaml --", None, None),
    ],
)
def test_the_variables_that_a_launch_line_passes_on(
    tmp_path: Path, line: str, driver: str | None, workers: str | None
) -> None:
    if "yaml" in line:
        pytest.importorskip("yaml")
        (tmp_path / "env.yaml").write_text("env_vars: {PRECISION_SHIM: '1', A: '2'}\n")
    found = read_launch(line.replace("{folder}", str(tmp_path)).split(), (), {**ON, "A": "1"})
    named = [one.get("PRECISION_SHIM") for one in (found.driver, found.workers)]
    assert named == [driver, workers]
    assert bool(found.unread) is line.endswith((":", "none.yaml --"))
    assert ("in the workers" in found.describe()) is (driver != workers)


def test_the_variables_of_the_workers_in_the_jobs_own_config() -> None:
    words = ["+ray_kwargs.ray_init.runtime_env.env_vars.PRECISION_SHIM=0", "a=1"]
    found = read_launch([], words, ON)
    assert (found.driver, found.workers) == (ON, {"PRECISION_SHIM": "0"})


def test_a_plan_says_which_processes_have_the_shim(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PRECISION_SHIM", "1")
    (tmp_path / "mine.py").write_text("import toytrainer\n")

    def notes(*front: str) -> list[str]:
        found = job([*front, "python", "mine.py"])
        assert found.source == tmp_path / "mine.py"
        unset = "PRECISION_SHIM" not in found.launch.workers
        return list(make(replace(found, unset=unset), request(asked()), RULES).notes)

    assert notes("env", "-C", str(tmp_path), "-u", "PRECISION_SHIM")
    submit = ("ray", "job", "submit", "--working-dir", str(tmp_path))
    assert "add --runtime-env-json" in notes(*submit, "--")[0]
    env = '{"env_vars": {"PRECISION_SHIM": "1", "PRECISION_SHIM_LOG": "debug"}}'
    (first, *_) = notes(*submit, "--runtime-env-json", env, "--")
    told = "in the driver and the workers: PRECISION_SHIM=1, PRECISION_SHIM_LOG=debug"
    assert first.endswith(told)
    first, second, *_ = notes(*submit, "--runtime-env", "none.yaml", "--")
    assert first.startswith("--runtime-env none.yaml cannot be read here")
    assert second.startswith("PRECISION_SHIM is unset")


# -- names and shapes --------------------------------------------------------------------------


def test_transformers_builds_the_model_without_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {**QWEN3_30B_A3B, "num_hidden_layers": 2, "num_experts": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = shapes.read_model(tmp_path)
    assert found.parameters == mixture(config).parameters
    assert (found.experts, found.tied) == (16, False)
    tied = shapes.read_model(tmp_path, {"tie_word_embeddings": True})
    assert tied.tied
    assert tied.parameters == found.parameters - config["vocab_size"] * config["hidden_size"]


def test_experts_that_are_no_number_are_none() -> None:
    model = shapes.Model((), {"moe_num_experts": [64, 64], "num_experts": "many"})
    assert model.experts == 0
    with pytest.raises(PlanError, match="transformers cannot"):
        shapes.from_config({"model_type": "nothing", "moe_num_experts": [64, 64]}, "config.json")


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError, match="cannot be read") as found:
        shapes.read_model(tmp_path)
    assert str(tmp_path / "config.json") in str(found.value)


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


def plan_models(*models: Any) -> JobPlan:
    return make(job(LINE), request(*(models or (asked(),))), RULES)


def test_the_table_says_what_fits_and_what_does_not() -> None:
    text = render(plan_models(), 13.0)
    assert text.startswith("plan of toy 1.0, 64 GPUs, TransformerEngine 2.14")
    assert "12.57" in text
    assert "computes in bf16" in text
    assert "0.43" in text
    assert "activations" in text
    over = render(plan_models(), 12.0)
    assert "0.57 over" in over
    assert all(len(line) <= 110 for line in text.splitlines())


@pytest.mark.parametrize("unset", [True, False])
def test_a_job_that_ends_without_the_shim_has_no_figures_without(unset: bool) -> None:
    fields = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
    plan = make(replace(job(LINE), unset=unset), request(asked(asked=fields)), RULES)
    lines = render(plan).splitlines()
    assert lines[0].endswith(": legal" + " only with the shim, which is not on" * unset)
    assert "  without: ends, because " in render(plan)
    (row,) = (line for line in lines if "together" in line)
    assert len(row.split()) == 2
    assert ("note: PRECISION_SHIM is unset" in render(plan)) is unset
    plan = make(replace(job(LINE), unset=unset), request(asked()), RULES)
    assert render(plan).splitlines()[0].endswith(": legal" + "; the shim is not on" * unset)


@pytest.mark.parametrize(
    ("options", "told"),
    [("", False), ("--isolated", True), ("--isolated --with x/precision_shim", False)],
)
def test_an_environment_that_uv_makes_without_the_shim(options: str, told: bool) -> None:
    line = f"uv run {options} -m toytrainer.main".split()
    assert any("--with" in note for note in make(job(line), request(asked()), RULES).notes) is told


def test_the_fullest_stage_is_shown() -> None:
    (model,) = plan_models().models
    peaks = [stage.totals["peak"] for stage in model.with_shim]
    assert peaks[model.fullest] == max(peaks)
    assert f"stage {model.fullest}, the fullest" in render(plan_models())
    uneven = replace(asked(), sizes=replace(asked().sizes, last=30))
    assert plan_models(uneven).models[0].fullest == 1


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    plot.draw(plan_models(), path, 80.0)
    assert path.stat().st_size > 1000
    with pytest.raises(PlanError, match=r"\.svg or \.png"):
        plot.draw(plan_models(), tmp_path / "plan.pdf")


# -- the search --------------------------------------------------------------------------------


def test_the_search_gives_up_no_more_than_it_has_to() -> None:
    def of(memory: float) -> Any:
        (found,) = search(job(LINE), request(asked()), RULES, memory * GB)
        return found

    assert (of(13.0).fits, of(13.0).lines, of(13.0).gives_up) == (True, (), "")
    first = of(12.0)
    assert first.lines == (
        "optim.use_precision_aware_optimizer=true",
        "optim.store_param_remainders=true",
    )
    lower = of(9.5)
    assert "optim.main_grads_dtype=bf16" in lower.lines
    written = asked().changed(
        use_precision_aware_optimizer=True, main_grads_dtype="bf16", grad_reduce_in_fp32=False
    )
    assert plan_models(written).models[0].peak <= 9.5 * GB
    assert not of(3.0).fits


def test_an_illegal_job_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    for beta2, searched in ((0.95, True), ("0.95", False)):
        model = asked(asked={"adam_beta2": beta2})
        read = job(LINE), request(model), RULES
        monkeypatch.setattr(plan_command, "_read", lambda *ignored, read=read: read)
        code, out, _ = command("plan", "--search", "--gpu-memory", "80", "--", *LINE)
        assert (code, "search: actor fits 80 GiB" in out) == (int(not searched), searched)


def test_each_model_is_searched_by_itself() -> None:
    found = search(job(LINE), request(asked(), asked(trains=False)), RULES, 12.0 * GB)
    assert [(one.fits, bool(one.lines)) for one in found] == [(True, True), (True, False)]
    said = " ".join(" ".join(render_search(found, 12.0 * GB)).split())
    assert "search: actor fits 12 GiB with these lines optim.use_precision" in said
    assert said.endswith("models that are on the same GPUs at the same time add up")


def test_settings_that_are_not_legal_here_are_not_offered() -> None:
    assert [one.lines for one in asked().variants(job(LINE), Rules("2.0", None))] != []
    offered = [
        line for one in asked().variants(job(LINE), Rules("2.2", None)) for line in one.lines
    ]
    assert not any("exp_avg" in line for line in offered)
    late = asked(asked={"adam_beta2": 0.95})
    lines = [line for one in late.variants(job(LINE), RULES) for line in one.lines]
    assert "optim.exp_avg_sq_dtype=bf16" in lines


# -- the command -------------------------------------------------------------------------------


def test_what_is_no_job_ends_with_2() -> None:
    code, _, err = command("plan", "--", "python", "nothing.py")
    assert (code, "expected a module behind -m" in err) == (2, True)
    assert command("plan").code == 2
    assert command("plan", "--search", "--", "python", "nothing.py").code == 2


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
def test_an_option_that_makes_no_sense_ends_with_2(words: tuple[str, ...]) -> None:
    code, out, err = command("plan", "--json", *words, *LINE)
    assert (code, "expected" in err) == (2, True)
    assert json.loads(out)["error"] in err


@pytest.mark.parametrize("word", ["80", "80GB", "80 GiB", "80.0g"])
def test_the_memory_of_a_gpu_may_have_a_unit(word: str) -> None:
    assert build_parser(["plan"]).parse_args(["plan", "--gpu-memory", word]).gpu_memory == 80


def test_a_number_of_gpus_that_is_not_known_here_is_no_guess() -> None:
    words = ["torchrun", "--nproc-per-node=gpu", "-m", "toytrainer.x"]
    with pytest.raises(PlanError, match="nproc-per-node=gpu"):
        job(words).launched("nproc-per-node")
    elastic = ["torchrun", "--nnodes", "1:4", "-m", "toytrainer.x"]
    assert job(elastic).launched("nnodes") == 4


def test_heads_on_dtensor() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = shapes.Model((shapes.Weight("a.weight", (8, 8)),), config)
    with pytest.raises(PlanError, match="tensor: 2 key-value heads cannot be split 4 ways"):
        plan_models(ShardedModel("policy", model, 8, "fp32", tensor=4))


@pytest.mark.parametrize("group", ["world", "tensor", "context", "replicas"])
def test_a_group_of_no_gpu_on_dtensor_is_named(group: str) -> None:
    asked = replace(ShardedModel("policy", shapes.of_size("8B"), 8, "fp32"), **{group: 0})
    with pytest.raises(PlanError, match=rf"layout cannot be computed: .*({group} 0|{group}=0)"):
        plan_models(asked)


def test_fsdp_is_planned_too() -> None:
    model = shapes.of_size("8B")
    made = plan_models(ShardedModel("policy", model, 64, "fp32"))
    (stage,) = made.models[0].with_shim
    assert stage.totals["bytes"] == 8 * 10**9 * 16 // 64
    assert "computes in bf16, FSDP reduces gradients in fp32" in render(made)
    assert made.models[0].notes == ()
    on_host = plan_models(ShardedModel("policy", model, 64, "fp32", offload=True))
    assert on_host.models[0].with_shim[0].totals["gpu"] == 0
    with pytest.raises(PlanError, match="or of tensor x 7 shards"):
        plan_models(ShardedModel("policy", model, 64, "fp32", shards=7))


def test_fp8_parameters_get_what_the_worker_gives_them() -> None:
    plain, eight = asked(auto="guarded"), {"quantized": "fp8", "gathers": True}
    made = plan_models(replace(plain, **eight))
    assert not made.problems
    (model,) = made.models
    assert "fp8 or fp4 parameters: nothing is added" in model.decisions[0].because
    assert model.without == model.with_shim
    sixteen = plan_models(plain).models[0].without[0].parts
    for part, other in zip(model.with_shim[0].parts, sixteen, strict=True):
        assert part.components["params"].dtypes == ("bf16", "fp8")
        assert part.components["params"].bytes == other.components["params"].bytes
        assert part.components["master"] == other.components["master"]
    assert any("transposed" in note for note in model.notes)
    for fields, kept in (({}, True), ({"disable_parameter_transpose_cache": True}, False)):
        (computed,) = plan_models(replace(plain, layers={"fp8": "e4m3", **fields})).models
        assert any(note.startswith("not counted: Trans") for note in computed.notes) is kept
    for kind, dtype in (("fp4", torch.bfloat16), ("fp8", torch.float32)):
        with pytest.raises(PlanError, match=f"{kind} parameters in a .* not known here"):
            plan_models(replace(plain, quantized=kind, dtype=dtype))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"use_precision_aware_optimizer": True}, "use_precision_aware_optimizer"),
        (
            {"use_precision_aware_optimizer": True, "fp8_recipe": "delayed"},
            "store_param_remainders",
        ),
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "mxfp8"}, ""),
        (
            {
                "use_precision_aware_optimizer": True,
                "fp8_recipe": "mxfp8",
                "optimizer_cpu_offload": True,
            },
            "use_precision_aware_optimizer",
        ),
    ],
    ids=str,
)
def test_fp8_parameters_beside_a_precision_aware_optimizer(
    fields: dict[str, Any], key: str
) -> None:
    made = plan_models(replace(asked(asked=fields), quantized="fp8", gathers=True))
    found = [problem.key for problem in made.problems if problem.code == "fp8-parameters"]
    assert found == ([f"optim.{key}"] if key else [])
    if not key:  # Megatron keeps whole masters, which get fp32 copies of bf16 gradients
        (part, *_) = made.models[0].with_shim[0].parts
        assert part.components["master"].dtypes == ("fp32",)


def test_an_optimizer_whose_states_are_not_known_is_refused() -> None:
    for name, options in (
        ("Muon", {}),
        ("torch.optim.SGD", {"momentum": 0.9}),
        ("bitsandbytes.optim.AdamW", {}),
        ("torchao.optim.AdamW8bit", {}),
        ("torch.optim.AdamW", {"amsgrad": True}),
    ):
        model = ShardedModel("policy", shapes.of_size("8B"), 64, "fp32", optimizer=name)
        with pytest.raises(PlanError, match=f"{name}.*not known here") as told:
            plan_models(replace(model, options=options))
        assert "bound" not in str(told.value)
    plan_models(replace(model, options={"amsgrad": False}))
    with pytest.raises(PlanError, match=r"muon.*not known here"):
        plan_models(asked(optimizer="muon"))


def test_the_import_that_failed_is_found_among_the_causes() -> None:
    lacks = ModuleNotFoundError("No module named 'orjson'", name="orjson")
    wrapped = PlanError("toy 1.0: No module named 'orjson'. Correct the command line.")
    wrapped.__cause__ = lacks
    own = ("toy", "mine")
    assert plan_command._missing(lacks, own) is lacks
    assert plan_command._missing(wrapped, own) is lacks
    assert plan_command._missing(PlanError("wrong"), own) is None
    for name in ("toy.config", "mine.configs", "precision_shim_tools.plan"):
        assert plan_command._missing(ImportError(name=name), own) is None


# -- errors in the plan itself -----------------------------------------------------------------


def status_where(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> tuple[object, str]:
    """Exit status and message of a plan in which reading the config raises ``error``."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(plan_command, "_read", fails)
    code, _, err = command("plan", "--", *LINE)
    return code, err


@pytest.mark.parametrize("error", [AttributeError("no such thing"), RuntimeError("out of luck")])
def test_a_fault_of_the_plan_is_to_be_reported_and_says_nothing_of_the_config(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    code, said = status_where(monkeypatch, error)
    assert code == 2
    assert f"{type(error).__name__}: {error}" in said
    assert "Report this line, the lines above it and the command" in said
    assert "Correct" not in said


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = status_where(monkeypatch, KeyboardInterrupt())
    assert ended == (130, "precision-shim: interrupted\n")


@pytest.mark.parametrize(
    ("terminal", "columns", "said"),
    [
        (False, "", "plan: reading on\n"),
        (True, "", "reading on, 0 s"),
        (False, "31", "plan: reading o\n"),
        (True, "31", "plan: reading o\r"),
    ],
)
def test_a_slow_command_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    columns: str,
    said: str,
) -> None:
    told = threading.Event()

    def reads(*args: Any) -> Any:
        Progress.stage = "reading on"
        assert told.wait(60)
        raise PlanError("no config")

    def writes(text: str) -> int:
        if "reading" in text:
            told.set()
        return write(text)

    monkeypatch.setattr(plan_command, "_read", reads)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(Progress, "quiet", 0.0)
    write = sys.stderr.write
    monkeypatch.setattr(sys.stderr, "write", writes)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with pytest.raises(SystemExit):
        main(["plan", "--", *LINE])
    shown = capsys.readouterr().err
    assert said in shown
    # On a terminal the progress is erased before the result is written.
    assert shown.endswith("\r\033[K" * terminal + "precision-shim plan: no config\n")


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--search", "--gpu-memory", "12", "--", *LINE],
        ["plan", "--", "python", "-m", "nothing.that.is.a.framework"],
        ["checkpoint", "saved"],
        ["checkpoint", "nowhere"],
        ["audit", "audits"],
        ["audit", "saved"],
        ["doctor"],
        ["doctor", "--verbose"],
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_no_line_is_wider_than_the_screen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    distributed(tmp_path / "saved")
    put(tmp_path / "audits", audit_of(0), audit_of(1, exp_avg_sq="fp32", exp_avg="fp32"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Progress, "quiet", 1e6)
    if LINE[2] in words:
        read = job(LINE), request(asked()), RULES
        monkeypatch.setattr(plan_command, "_read", lambda *ignored: read)
    shown = {}
    for columns in (60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, out, err = command(*words)
        shown[columns] = (out + err).splitlines()
        wide = [line for line in shown[columns] if len(line) > columns and " " in line.strip()]
        assert wide == []
    assert len(shown[60]) > len(shown[200])
    assert " ".join(shown[60]).split() == " ".join(shown[200]).split()


def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = status_where(
        monkeypatch, PermissionError(13, "Permission denied", "/models/config.json")
    )
    assert code == 2
    assert "Permission denied: '/models/config.json'" in said
    assert "Report" not in said


# -- keys that do not exist --------------------------------------------------------------------


def test_a_misspelt_field_of_megatrons_is_illegal_and_the_near_one_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {CONFIG: ("use_precision_aware_optimizer", "lr"), DDP: ("grad_reduce_in_fp32",)}
    monkeypatch.setattr(megatron_plan, "fields_of", fields.__getitem__)
    wrong = asked(asked={"use_precision_aware_optimiser": True, "lr": 1.0})
    wrong = replace(wrong, bucket_key="ddp.grad_reduce_in_fp32", buckets={"grad_reduce": True})
    _, found = plan_model(wrong, SETTINGS, NEWEST)
    assert [(one.code, one.key) for one in found] == [
        ("key", "optim.use_precision_aware_optimiser"),
        ("key", "ddp.grad_reduce"),
    ]
    assert found[0].remedy.startswith("Did you mean use_precision_aware_optimizer? Correct")


@pytest.mark.parametrize("value", ["false", "no", "Off", "1", "", "yes", "TRUE", "on"])
def test_a_string_in_the_place_of_a_boolean_is_refused_unless_it_means_true(value: str) -> None:
    aware, bucket = {"use_precision_aware_optimizer": value}, {"grad_reduce_in_fp32": value}
    model = replace(
        asked(asked=aware), buckets=bucket, layers={"fp8_param": value, "fp8": "hybrid"}
    )
    made, found = plan_model(replace(model, bucket_key="ddp.grad_reduce_in_fp32"), SETTINGS, NEWEST)
    keys = ["optim.use_precision_aware_optimizer", "ddp.grad_reduce_in_fp32", "fp8_param"]
    refused = value.lower() not in ("yes", "true", "on")
    assert (made is None, [one.key for one in found]) == (refused, keys if refused else [])
    assert all("without quotes, as true or false" in one.remedy for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("distributed", [False, True])
def test_fp32_parameters_are_not_offloaded(dtype: torch.dtype, distributed: bool) -> None:
    fields = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    fields["use_distributed_optimizer"] = distributed
    _, found = plan_model(replace(asked(asked=fields), dtype=dtype), SETTINGS, NEWEST)
    refused = dtype is torch.float32 and distributed
    assert [one.key for one in found] == ["optim.optimizer_cpu_offload"] * refused


def test_a_number_in_the_place_of_a_dtype_is_illegal() -> None:
    _, found = plan_model(asked(asked={"exp_avg_dtype": 32, "lr": 1}), SETTINGS, NEWEST)
    assert [(one.code, one.key) for one in found] == [("dtype", "optim.exp_avg_dtype")]
