"""Values of a ROLL config with which a worker makes no model, optimizer or LR scheduler.

ROLL's config classes accept these values. Its strategies, Megatron's scheduler, torch's AdamW and
transformers' schedulers refuse them in the worker, some of them at an assertion without a message.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from precision_shim.planning.record import Problem, no_number
from precision_shim.planning.values import said

from .fp16.legality import refusal
from .megatron.deciding.numbers import BETA2, NUMBERS
from .megatron.planning.sizes import Sizes

HEADS = ("trl", "auto_token_classification")
"""``model_args.model_type`` of a critic."""

_FIELDS = {"lr": "learning_rate", "clip_grad": "max_grad_norm", "adam_eps": "adam_epsilon"}
"""Maps fields of Megatron's OptimizerConfig to ROLL's arguments with another name."""

_WSD = "warmup_stable_decay"
_SCHEDULERS = (
    *("constant", "linear", "cosine", "constant_with_warmup", "inverse_sqrt"),
    *("cosine_with_min_lr", "cosine_warmup_with_min_lr", _WSD),
)
"""``lr_scheduler_type`` for which ROLL makes a scheduler of Megatron's."""


def of_critic(name: str, worker: Any, *, on_megatron: bool) -> Iterator[Problem]:
    """Yield a problem if ROLL makes no value model from a critic's config.

    Args:
        name: the worker's key in the config.
        worker: ROLL's config of the worker.
        on_megatron: whether the worker trains with Megatron.
    """
    if name != "critic":
        return
    if on_megatron:
        key, fault = f"{name}.strategy_args.strategy_name", "ROLL has no critic on Megatron"
        yield Problem("flags", name, key, fault, "Write fsdp2_train, or another adv_estimator.")
    elif worker.model_args.model_type not in HEADS:
        found = worker.model_args.model_type
        fault = f"ROLL makes no critic with {found!r}; allowed: {', '.join(HEADS)}"
        yield Problem("flags", name, f"{name}.model_args.model_type", fault, "Write one of them.")


def of_megatron(name: str, worker: Any, args: Any) -> Iterator[Problem]:
    """Yield a problem for each value that ROLL's Megatron strategy or Megatron's scheduler refuses.

    Args:
        name: the worker's key in the config.
        worker: ROLL's config of the worker.
        args: the worker's Megatron arguments.
    """
    section = f"{name}.strategy_args.strategy_config"
    written = worker.strategy_args.strategy_config

    def key(argument: str) -> str:
        return f"{section if argument in written else f'{name}.training_args'}.{argument}"

    yield from of_critic(name, worker, on_megatron=True)
    if args.overlap_param_gather:
        at, fault = f"{section}.overlap_param_gather", "ROLL does not support it"
        yield Problem("flags", name, at, fault, "Leave it out.")
    if isinstance(args.seed, int) and args.seed < 1:
        at, fault = key("seed") if "seed" in written else "seed", f"{args.seed} is less than 1"
        yield Problem("number", name, at, fault, "Write at least 1.")
    virtual, stages = args.virtual_pipeline_model_parallel_size, args.pipeline_model_parallel_size
    if virtual is not None and (stages or 1) == 1:
        at, fault = f"{section}.virtual_pipeline_model_parallel_size", "there is one pipeline stage"
        yield Problem("layers", name, at, fault, "Leave it out.")
    numbers = {field: getattr(args, _FIELDS.get(field, field), 0) for field in NUMBERS}
    wrong = [field for field, value in numbers.items() if not isinstance(value, Real)]
    for field in wrong:
        if field != BETA2:  # each model on Megatron is checked for it
            yield no_number(numbers[field], name, key(_FIELDS.get(field, field)))
    if not wrong:
        yield from _of_scheduler(name, args, key)


def _of_scheduler(name: str, args: Any, key: Any) -> Iterator[Problem]:
    more, at = args.lr_scheduler_kwargs, f"{name}.strategy_args.strategy_config.lr_scheduler_kwargs"
    if not isinstance(more, Mapping):
        fault = f"{more!r}: expected a section with keys"
        yield Problem("key", name, at, fault, "Leave it out, or write its keys.")
        return
    style = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if style not in _SCHEDULERS:
        fault = f"ROLL cannot use {style!r} on Megatron; allowed: {', '.join(_SCHEDULERS)}"
        yield Problem("number", name, key("lr_scheduler_type"), fault, "Write one of them.")
    if style == _WSD and more.get("wsd_decay_steps") is None:
        fault = f"it is missing, and lr_scheduler_type={_WSD} needs it"
        yield Problem("number", name, f"{at}.wsd_decay_steps", fault, "Write the number of steps.")
    values = {"max_lr": args.learning_rate, "min_lr": 0.0, "init_lr": 0.0, "lr_decay_steps": 1}
    values |= {word: more[word] for word in values if word in more}
    wrong = [word for word, value in values.items() if not isinstance(value, Real)]
    if wrong:
        yield from (no_number(values[word], name, f"{at}.{word}") for word in wrong)
        return
    most, least, first, steps = (float(value) for value in values.values())
    highest = f"{at}.max_lr" if "max_lr" in more else key("learning_rate")
    for legal, where, found, allowed in (
        (least >= 0, f"{at}.min_lr", least, "a number from 0"),
        (most >= least, highest, most, f"a number from {least}, the lowest learning rate"),
        (first <= most, f"{at}.init_lr", first, f"a number up to {most}, the learning rate"),
        (steps > 0, f"{at}.lr_decay_steps", steps, "a number above 0"),
        (args.weight_decay >= 0, key("weight_decay"), args.weight_decay, "a number from 0"),
    ):
        if not legal:
            fault = f"Megatron's scheduler refuses {found}; allowed: {allowed}"
            yield Problem("number", name, where, fault, "Write such a number.")
            return


def of_fsdp(name: str, worker: Any) -> Iterator[Problem]:
    """Yield a problem for each value that AdamW or a scheduler of transformers refuses.

    Args:
        name: the worker's key in the config.
        worker: ROLL's config of the worker.
    """
    yield from of_critic(name, worker, on_megatron=False)
    given, where = worker.training_args, f"{name}.training_args"
    for key, argument, value in (
        ("learning_rate", "lr", given.learning_rate),
        ("weight_decay", "weight_decay", given.weight_decay),
        ("adam_beta1", "betas", (given.adam_beta1, 0.0)),
        ("adam_beta2", "betas", (0.0, given.adam_beta2)),
    ):
        error = refusal(torch.optim.AdamW, argument, value)
        if error is not None:
            fault = f"torch's AdamW: {error}"
            yield Problem("number", name, f"{where}.{key}", fault, "Correct it.")
    if "" in (worker.model_args.freeze_module_prefix or ()):
        at, fault = f"{name}.model_args.freeze_module_prefix", "'' freezes every parameter"
        yield Problem("flags", name, at, fault, "Write a prefix, or leave it out.")
    try:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        make = importlib.import_module("transformers").get_scheduler
        make(given.lr_scheduler_type, optimizer, num_warmup_steps=0, num_training_steps=1)
    except Exception as error:  # transformers raises various errors
        remedy = "Write a type that needs no further arguments, such as linear."
        yield Problem("number", name, f"{where}.lr_scheduler_type", said(error), remedy)


def of_ends(sizes: Sizes, layers: int, subject: str) -> Iterator[Problem]:
    """Yield a problem if the first or the last pipeline stage has a number of layers of its own.

    mcore_adapter builds such stages, but loads the weights of evenly split stages into them.

    Args:
        sizes: the sizes of the parallel groups.
        layers: number of the model's layers; 0 if unknown.
        subject: the worker's key in the config.
    """
    even = layers / max(sizes.pipeline, 1)
    for end in ("first", "last"):
        found = getattr(sizes, end)
        if layers and sizes.pipeline > 1 and found is not None and found != even:
            fault = f"{found!r}: ROLL loads only evenly split weights, {even:g} layers per stage"
            remedy = "Leave it out, or write a pipeline_model_parallel_layout."
            yield Problem("layers", subject, sizes.key(end), fault, remedy)
