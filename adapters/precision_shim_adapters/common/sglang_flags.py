"""Both sides of a trainer that starts SGLang by flags with the prefix ``--sglang``: slime, miles.

The reference model is the trained model with other weights. With ``--fp16`` the trainer starts
SGLang in fp16, whatever ``--sglang-dtype`` is. The file of ``--sglang-config`` overrides the flags.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from precision_shim.adapting import Call, Seam, collect, in_force, seam, versioned
from precision_shim.errors import DtypeError
from precision_shim.precision.agreement import AUTO, Engine, Gate
from precision_shim.precision.formats import Format
from precision_shim.precision.lm_head import SETTING, Head
from precision_shim.precision.names import ALIASES

from ..agreement import lm_head
from ..agreement.model_files import gates_of, quantised, resolve_by_model
from ..agreement.names import engine_name, with_rounded
from ..agreement.report import FEATURE, Sides, report_sides
from ..megatron.policy.formats import read_format
from ..megatron.training.lm_head import compute_in_fp32

GROUP = "rollout"
HEAD = "LM head"
_FLAGS = "--sglang"
_FIELDS = ("dtype", "quantization", "torchao_config", "kv_cache_dtype", "enable_fp32_lm_head")
_CALLED = {"fp8": "fp8-format", "fp4": "fp4-format"}
_CALLED |= {field: field.replace("_", "-") for field in ("fp8_recipe", "fp4_recipe")}
"""Maps fields of Megatron's config to the names of their flags."""

_EXTERNAL = "SGLang servers that run already"

Groups = list[tuple[Mapping[str, Any], str]]
"""Of each group of servers: the options that override the flags, and the place of these options."""


def engines(name: str, args: Any, groups: Groups) -> tuple[Engine, list[Engine]]:
    """Read the trainer and the rollout's groups of servers from a trainer's namespace of flags."""
    computes = "fp16" if args.fp16 else "bf16"  # as both trainers, which set bf16 without fp16
    others = [_rollout(name, args, overrides, place) for overrides, place in groups]
    trainer = Engine("actor", computes, f"--{computes}", format=_format(args))
    return trainer, list(dict.fromkeys(others))


def _format(args: Any) -> Format | None:
    given = vars(args)
    if given.get("megatron_to_hf_mode") == "bridge":  # miles hands only these on to Bridge
        given = {field: given.get(field) for field in ("fp8", "fp8_recipe")}
    return read_format(given, "--{}", _CALLED)


def _rollout(name: str, args: Any, overrides: Mapping[str, Any], place: str) -> Engine:
    flags = {field: value for field, value in _given(args).items() if field not in overrides}
    value, key, because = flags.get("dtype"), f"{_FLAGS}-dtype", ""
    if "dtype" in overrides:
        value, key = overrides["dtype"], f"{place}.dtype"
    elif args.fp16:
        value, because = "float16", f"--fp16, with which {name} starts SGLang in float16"
    if args.rollout_external:
        because = f"{because or key}, if the {_EXTERNAL} were started so"
    follows = not (args.rollout_external or "dtype" in overrides)
    engine = Engine("rollout", ALIASES.get(str(value), AUTO), key, value, because, follows=follows)
    path = str(overrides.get("model_path", args.hf_checkpoint))
    engine = resolve_by_model(engine, "sglang", path)
    engine = with_rounded(engine, {"quantization": quantised(path)}, f"{path}/config.json")
    return with_rounded(with_rounded(engine, flags, _FLAGS, "sglang"), overrides, place, "sglang")


def _gates(args: Any, trainer: Engine, others: list[Engine]) -> tuple[Gate, ...]:
    given = vars(args)
    on_megatron = trainer if given.get("train_backend", "megatron") == "megatron" else None
    by_others = given.get("megatron_to_hf_mode") == "bridge"  # gets the fields of ``_format`` only
    by_others = by_others or bool(given.get("custom_model_provider_path"))
    fields, path = None if by_others else given, str(args.hf_checkpoint)
    flag = "--moe-router-dtype"
    return gates_of(on_megatron, others, "sglang", path, fields, place=flag)


def _given(args: Any) -> dict[str, Any]:
    given = {field: getattr(args, f"sglang_{field}", None) for field in _FIELDS}
    return {**given, "enable_fp32_lm_head": given["enable_fp32_lm_head"] or None}


def _groups(name: str, args: Any) -> Groups:
    """Read the groups of servers that get the trained weights."""
    if getattr(args, "sglang_config", None) is None:
        return [({}, "")]
    module = import_module(f"{name}.backends.sglang_utils.sglang_config")
    models = module.SglangConfig.from_yaml(args.sglang_config).models
    if getattr(args, "eval_num_gpus", 0):  # miles' servers that only evaluate
        models = [model for model in models if model.name != "eval"]
    for model in models:
        model.resolve(args)  # as the trainer does, which then knows what gets the weights
    return [
        (
            {key.replace("-", "_"): value for key, value in group.overrides.items()},
            f"{args.sglang_config}: {model.name}.overrides",
        )
        for model in models
        for group in model.server_groups
        if model.update_weights and group.worker_type not in ("placeholder", "encoder")
    ]


def heads(name: str, args: Any, groups: Groups) -> list[Head]:
    """Describe the LM heads of the trainer and of the rollout's groups of servers."""
    refusal = ""
    if getattr(args, "train_backend", "megatron") != "megatron":
        refusal = f"the shim does not change the LM head of {name}'s {args.train_backend} backend"
    elif lm_head.names_head(getattr(args, "target_modules", None)):
        refusal = "--target-modules has the LM head, whose adapter computes in 16 bits"
    elif not in_force(name, FEATURE, HEAD):
        refusal = lm_head.NOT_IN_FORCE
    native = lm_head.by_megatron("actor", vars(args), "--output-logit-dtype")
    found = [native or lm_head.of_trainer("actor", vars(args), "args", refusal)]
    if args.rollout_external:
        return [*found, Head("rollout", refusal=f"{_EXTERNAL} keep their LM head")]
    for overrides, place in groups:
        at = place if "enable_fp32_lm_head" in overrides else _FLAGS
        found.append(lm_head.of_rollout("sglang", {**_given(args), **overrides}, at))
    return found


def _write(args: Any, key: str, value: object) -> None:
    setattr(args, key.removeprefix("args.").lstrip("-").replace("-", "_"), value)


def seams(name: str) -> tuple[Seam, ...]:
    """The seams of ``rollout-agreement`` in a trainer; ``name`` is its name and package."""
    sglang = f"{name}.backends.sglang_utils"
    here: dict[str, Any] = {
        "feature": FEATURE,
        "group": GROUP,
        "optional": True,
        "delete_when": f"{name} compares the dtypes of trainer and rollout",
    }

    def read_name(key: str, value: object) -> str:
        return engine_name(value, key, versioned(name), (AUTO,))

    def from_flag(value: str) -> str:
        try:
            return read_name(f"{_FLAGS}-dtype", value)
        except DtypeError as error:  # argparse shows no other error's text
            raise ArgumentTypeError(str(error)) from error

    @seam(
        f"{sglang}.arguments:add_sglang_arguments",
        why="adds SGLang's flags to a parser, which knows only SGLang's names of dtypes",
        aliases=(f"{name}.utils.arguments:add_sglang_arguments",),
        **here,
    )
    def add_flags(call: Call, parser: Any) -> Any:
        """Let the flags for SGLang's dtype take every dtype name."""
        added = call.proceed()
        for action in parser._actions:
            if action.dest.endswith("sglang_dtype"):
                action.type = from_flag
        return added

    @seam(
        f"{sglang}.sglang_config:ServerGroupConfig.__post_init__",
        why="has the options of a group of servers, before SGLang refuses their names",
        **here,
    )
    def make_group(call: Call) -> Any:
        """Replace the dtype name of a group of servers by the one that SGLang accepts.

        Raises:
            DtypeError: the name is unknown.
        """
        overrides = call.instance.overrides
        if overrides and overrides.get("dtype") is not None:
            overrides["dtype"] = read_name("overrides.dtype", overrides["dtype"])
        return call.proceed()

    @seam(
        f"{name}.ray.placement_group:create_placement_groups",
        why="the driver, with all flags, before it asks Ray for GPUs",
        **here,
    )
    def compare(call: Call, args: Any) -> Any:
        """Compare the dtypes of trainer and rollout, and report whether they agree.

        Raises:
            DtypeError: a dtype name in the file of ``--sglang-config`` is unknown.
            UnsupportedPrecisionError: in strict mode, only the trainer computes in float16, or an
                engine cannot compute its LM head in fp32.
        """
        alone = args.debug_train_only or args.debug_rollout_only
        if hasattr(args, "sglang_dtype") and not alone:
            groups = _groups(name, args)
            trainer, others = engines(name, args, groups)
            job = name, versioned(name), trainer, others, heads(name, args, groups)
            gates = _gates(args, trainer, others)
            report_sides(Sides(*job, gates=gates), partial(_write, args))
        return call.proceed()

    @seam(
        f"{name}.backends.megatron_utils.model:setup_model_and_optimizer",
        why="returns the model chunks, whose LM head computes in fp32 where the driver asked",
        **{**here, "group": HEAD, "delete_when": f"{name} has an option for the trainer's LM head"},
    )
    def build_head(call: Call, args: Any, role: str = "actor") -> Any:
        """Make the actor's model, which is the reference model's too, compute its head in fp32."""
        built = call.proceed()
        if role == "actor" and lm_head.is_marked(vars(args)):
            compute_in_fp32(built[0], versioned(name), SETTING)
        return built

    return collect(add_flags, make_group, compare, build_head)
