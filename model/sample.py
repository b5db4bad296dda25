"""Lets a trained model write: `python -m model.sample --ckpt runs/x/last.ckpt --prompt "..."`."""

import sys
from pathlib import Path

import torch

from data import DataError, load_tokenizer
from model.checkpoints import load_gpt
from model.command import command
from model.errors import UserError
from model.faults import weights_not_finite
from model.gpt import GPT


def sample(
    ckpt: str,
    prompt: str = "",
    n: int = 200,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 1337,
    stop: bool = True,
    norm: str | None = None,
    tokenizer: str | None = None,
    device: str | None = None,
) -> None:
    """Print a prompt and what the model in a checkpoint writes after it.

    Of a prompt longer than the model's context, the end is read. When the context is full, its
    older half is dropped and the model goes on from the rest.

    Args:
        ckpt: Checkpoint of train.py.
        prompt: Text to go on from; by default the beginning of a document.
        n: Tokens to write at most.
        samples: How many continuations to write.
        temperature: Divides the logits; smaller is less random, 0 takes the most probable token.
        top_k: Sample from the k most probable tokens only; null for all of them.
        seed: Of the random choices.
        stop: Whether to stop at the end of text that the model writes; else it begins another.
        norm: RMSNorm implementation to use instead of the one that it was trained with.
        tokenizer: Name of the tokenizer, for a checkpoint that does not say it.
        device: Where to compute, such as cpu or cuda:1; by default a GPU where there is one.
    """
    if problems := _problems(n, samples, temperature, top_k, seed):
        raise UserError(*problems)
    gpt, checkpoint = load_gpt(Path(ckpt), norm)
    if bad := weights_not_finite(gpt):
        raise UserError(f"{ckpt} holds weights that are not finite, {bad[0]} for one.")
    encoding = _tokenizer(tokenizer or checkpoint.get("tokenizer"), gpt, ckpt)
    device = torch.device(_device(device))
    start = encoding.encode_ordinary(prompt) or [encoding.eot_token]
    context = gpt.config.context
    if len(start) > context:
        _note(f"the prompt has {len(start)} tokens, of which the model reads the last {context}.")
    if min(len(start), context) + n > context + 1:
        _note(f"whenever its context of {context} tokens is full, it forgets the older half.")
    tokens = torch.tensor([start] * samples, device=device)
    # A 16-bit stream takes 16-bit branches, which is what autocast makes of float32 weights.
    bfloat16 = gpt.stream_dtype == torch.bfloat16
    with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
        generator = torch.Generator(device).manual_seed(seed)
        end = encoding.eot_token if stop else None
        written = gpt.to(device).generate(tokens, n, temperature, top_k, generator, end)
    for number, row in enumerate(written[:, len(start) :].tolist()):
        if samples > 1:
            print(f"--- {number + 1} ---")
        kept = row[: row.index(end)] if end in row else row
        print(prompt + encoding.decode(kept))


def _problems(n: int, samples: int, temperature: float, top_k: int | None, seed: int) -> list[str]:
    rules = [
        ("n", n, n >= 1, "at least 1"),
        ("samples", samples, samples >= 1, "at least 1"),
        ("temperature", temperature, 0 <= temperature < float("inf"), "at least 0"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
        ("seed", seed, 0 <= seed < 2**64, "from 0 to 2^64 - 1"),
    ]
    return [f"{name} is {value}; it has to be {rule}." for name, value, ok, rule in rules if not ok]


def _tokenizer(name: str | None, gpt: GPT, ckpt: str):
    if name is None:
        raise UserError(f"{ckpt} does not say its tokenizer: name it with --tokenizer.")
    try:
        encoding = load_tokenizer(name)
    except DataError as error:
        raise UserError(str(error)) from None
    if encoding.n_vocab != gpt.config.vocab_size:
        raise UserError(
            f"The model in {ckpt} has {gpt.config.vocab_size} token ids, but the tokenizer {name} "
            f"has {encoding.n_vocab}."
        )
    return encoding


def _device(name: str | None) -> str:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"There is no device {name!r} here: {reason}.") from None
    return name


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(command(sample, "python -m model.sample"))
