"""Dtype names from Python and from the command line, converted before torchtitan reads them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import precision_shim
from precision_shim.errors import DtypeError
from precision_shim_adapters.torchtitan.config import coerce_config

from ..every_framework.shim_warnings import watched
from ..processes.rank_server import Ranks

SPELLINGS = {
    "float16": ("fp16", "half", "FP16", " torch.float16 ", "16"),
    "bfloat16": ("bf16", "BFloat16", "torch.bfloat16"),
    "float32": ("fp32", "float", "Float32", "32"),
}


def test_every_spelling_becomes_torchtitans_own(torchtitan: None, shim: Any) -> None:
    from torchtitan.config import TrainingConfig

    shim()
    for own, spellings in SPELLINGS.items():
        for name in (own, *spellings):
            assert TrainingConfig(mixed_precision_param=name).mixed_precision_param == own
            if own != "float16":
                assert TrainingConfig(dtype=name).dtype == own
            built = dataclasses.replace(TrainingConfig(), mixed_precision_param=name)
            assert built.mixed_precision_param == own


def test_every_dtype_of_a_config_is_found_by_its_type(torchtitan: None, shim: Any) -> None:
    """``Config`` has fields of its own; torchtitan's model config is inside of its config."""
    from torchtitan.config import TrainingConfig
    from torchtitan.experiments.rl.models.cast_linear import CastLinear
    from torchtitan.models.common.linear import Linear
    from torchtitan.trainer import Trainer

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        own: Literal["bfloat16", "float32"] = "float32"
        word: str = "float32"
        choice: Literal["float32", "auto"] = "float32"

    shim()
    assert TrainingConfig(mixed_precision_reduce="BF16").mixed_precision_reduce == "bfloat16"
    config = parse()
    held = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    made = Config(**held, own="bf16", word="auto", choice="auto")
    made.checkpoint.export_dtype = "half"
    linear = next(node for _, node, _, _ in config.model_spec.model.traverse(Linear.Config))
    given = {field.name: getattr(linear, field.name) for field in dataclasses.fields(linear)}
    made.model_spec.model.layers.append(CastLinear.Config(**given, compute_dtype="FP32"))
    coerce_config(made)
    assert (made.own, made.word, made.choice) == ("bfloat16", "auto", "auto")
    assert made.checkpoint.export_dtype == "float16"
    assert made.model_spec.model.layers[-1].compute_dtype == "float32"
    made.checkpoint.export_dtype = "bf17"
    with pytest.raises(DtypeError, match=r"torchtitan 0.3.0: checkpoint.export_dtype='bf17' names"):
        coerce_config(made)
    with pytest.raises(DtypeError, match=r"checkpoint.export_dtype='bf17' names no dtype"):
        parse("--checkpoint.export_dtype=bf17")


@pytest.mark.parametrize("name", ["bf16", "half"])
def test_sums_of_gradients(policy: Any, pretrainer: Any, shim: Any, name: str) -> None:
    """Both trainers take their dtype by any name, and warn of float16 beside bfloat16 layers."""
    shim()
    for build, place in ((policy, "trainer.training"), (pretrainer, "training")):
        made, told = watched(
            lambda build=build: build(
                "bfloat16",
                training={"mixed_precision_reduce": name},
                parallelism={"data_parallel_shard_degree": -1},
            )
        )
        model = made.model if build is policy else made.model_parts[0]
        policies = {one._get_fsdp_state()._mp_policy for one in model.modules() if is_sharded(one)}
        dtype = torch.float16 if name == "half" else torch.bfloat16
        assert {one.reduce_dtype for one in policies} == {dtype}
        key = f"torchtitan 0.3.0: {place}.mixed_precision_reduce=float16 is no fp16 training here"
        assert [one.startswith(key) for one in told] == [True] * (name == "half")


def is_sharded(module: torch.nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def test_an_unknown_name(torchtitan: None, shim: Any) -> None:
    from torchtitan.config import TrainingConfig

    shim()
    for name in ("float64", "fp8", "auto", "fp17", "bfloat", ""):
        key = "dtype" if name == "fp8" else "mixed_precision_param"
        with pytest.raises(DtypeError) as raised:
            TrainingConfig(**{key: name})
        text = str(raised.value)
        assert text.startswith("torchtitan 0.3.0: ")
        assert f"training.{key}={name!r}" in text
        for own in SPELLINGS:
            assert own in text
        assert "half" in text


def test_float16_states_are_an_error(torchtitan: None, shim: Any) -> None:
    from torchtitan.config import TrainingConfig

    shim()
    for name in ("float16", "fp16", "half"):
        with pytest.raises(DtypeError, match=r"eps of 1e-8 is 0.*mixed_precision_param=float16"):
            TrainingConfig(dtype=name)


@pytest.mark.parametrize("features", ["dtype-coercion", "fp16-scaling"])
def test_float16_states_are_an_error_where_a_trainer_is_built(
    policy: Any, pretrainer: Any, shim: Any, features: str
) -> None:
    """Each of two features alone refuses a config that was changed after it was built."""
    shim(features=features)
    for build in (policy, pretrainer):
        with pytest.raises(DtypeError, match="eps of 1e-8 is 0"):
            build(training={"dtype": "float16"})


def test_names_that_were_assigned_later(torchtitan: None, shim: Any, tmp_path: Path) -> None:
    from . import cpu

    shim()
    for config_of, build in (
        (cpu.policy_config, cpu.policy_trainer),
        (cpu.trainer_config, cpu.pretrainer),
    ):
        config = config_of(tmp_path)
        config.training.mixed_precision_param = "Half"
        config.training.dtype = "fp32"
        trainer = build(tmp_path, config=config)
        assert trainer.config.training.mixed_precision_param == "float16"
        assert trainer.config.training.dtype == "float32"


def test_the_generators_dtype(policy: Any, shim: Any) -> None:
    shim()
    assert policy(generator_dtype=" BF16")._transfer_dtype is torch.bfloat16
    assert policy(generator_dtype="fp32")._transfer_dtype is None  # the trainer's own dtype
    assert policy(generator_dtype="")._transfer_dtype is None
    with pytest.raises(DtypeError, match=r"generator.model_dtype='auto': vLLM chooses"):
        policy(generator_dtype="auto")
    with pytest.raises(DtypeError, match=r"generator.model_dtype='fp9'"):
        policy(generator_dtype="fp9")


# -- the command line --------------------------------------------------------------------------


def parse(*arguments: str) -> Any:
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(
        ["--module", "qwen3", "--config", "qwen3_debugmodel", *arguments]
    )


def test_the_command_line(torchtitan: None, shim: Any) -> None:
    shim()
    for own, words in (
        ("float16", ("--training.mixed_precision_param=float16",)),
        ("float16", ("--training.mixed_precision_param", "FP16")),
        ("float16", ("--training.mixed-precision-param=half",)),
        ("float32", ("--training.mixed-precision-param", "float32")),
        ("bfloat16", ()),
    ):
        assert parse(*words).training.mixed_precision_param == own
    assert parse("--training.dtype", "BF16").training.dtype == "bfloat16"
    for name, own in (("fp32", "float32"), ("half", "float16")):
        training = parse(f"--training.mixed_precision_reduce={name}").training
        assert training.mixed_precision_reduce == own
        assert parse(f"--checkpoint.export_dtype={name}").checkpoint.export_dtype == own


def options(text: str) -> set[str]:
    return {word for word in text.split() if word.startswith("--")}


def test_the_command_line_has_the_options_that_it_had(
    torchtitan: None, shim: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> str:
        with pytest.raises(SystemExit):
            parse("--help")
        return capsys.readouterr().out

    alone = told()
    shim()
    ours = told()
    assert options(ours) == options(alone)
    values = "{float16,bfloat16,float32}"  # --checkpoint.export-dtype has these choices already
    assert ours.count(values) == alone.count(values) + 3


# -- the generator's config, whose module imports vLLM -----------------------------------------

GENERATOR = """
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock


class AnyModule(MagicMock):
    __path__ = []
    __spec__ = ModuleSpec("vllm", None)


class Finder:
    # vLLM and the renderer of messages, of which a config needs nothing
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "renderers"):
            return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return AnyModule(name=spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
sys.path.insert(0, {root!r})
import precision_shim
precision_shim.install(settings={{"log": "quiet"}})
from tests.torchtitan import cpu
cpu.answer_for_gpus()
from torchtitan.experiments.rl.actors.generator import VLLMGenerator

Config = VLLMGenerator.Config
names = ("FP16", "bf16", "auto", "float32")
print("TOLD", *(Config(model_dtype=name).model_dtype for name in names))
try:
    Config(model_dtype="fp17")
except precision_shim.DtypeError as error:
    print("TOLD", error)
config = Config()
config.model_dtype = "half"
try:
    VLLMGenerator(config)
except Exception:  # it wants a model, after that
    pass
print("TOLD", config.model_dtype)
"""


@pytest.mark.slow
def test_the_generators_config(ranks: Ranks, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    program = tmp_path / "program.py"
    program.write_text(GENERATOR.format(root=root))
    ranks("script", world=1, arguments=[str(program)], environment=dict(os.environ), cwd=root)
    names, refused, late = (
        line.removeprefix("TOLD ") for line in ranks.said[0].splitlines() if "TOLD" in line
    )
    assert (names, late) == ("float16 bfloat16 auto float32", "float16")
    assert "generator.model_dtype='fp17'" in refused


def test_off_nothing_is_coerced(torchtitan: None, shim: Any) -> None:
    from torchtitan.config import TrainingConfig

    shim(features="-dtype-coercion")
    assert TrainingConfig(mixed_precision_param="fp16").mixed_precision_param == "fp16"
    precision_shim.uninstall()
    assert TrainingConfig(mixed_precision_param="fp16").mixed_precision_param == "fp16"
