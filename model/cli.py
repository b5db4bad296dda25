"""The command line of train.py: one parser for flags and YAML, and one list of what is wrong."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_only

from data import TextDataModule
from model.checkpoints import offer
from model.checks import (
    PRECISIONS,
    folder_problems,
    full_precision,
    norm_problems,
    on_gpu,
    sentence,
    trainer_problems,
    trial_problems,
)
from model.errors import UserError
from model.files import newest_run
from model.gpt import STREAM_DTYPES, config_problems
from model.lit import LitGPT, training_problems

CONFIGS = Path(__file__).parent.parent / "configs"
TRAINER_DEFAULTS = {
    "check_val_every_n_epoch": None,  # so that val_check_interval counts micro-batches
    "default_root_dir": "runs",
    "devices": 1,
    "enable_model_summary": False,
    "log_every_n_steps": 10,
    "max_epochs": -1,
    "num_sanity_val_steps": 0,
}
MIN_SEED, MAX_SEED = 0, 2**32 - 1  # NumPy's


def parse(argv: list[str]) -> tuple[ArgumentParser, Namespace]:
    """Settings from the flags in `argv` over those of the config.

    Without --config that is the resumed run's own with `--ckpt_path last`, else the default of
    this machine. In what is returned, `name` and `trainer.precision` are filled in.

    Raises:
        UserError: for flags and keys that do not exist, values of a wrong type, a config that
            cannot be read, no run to resume; for an unknown norm as well, if it is not alone.
        SystemExit: with 0, after --help and --print_config.
    """
    first = _first_look(argv)
    if empty := [flag for flag in ("name", "ckpt_path") if getattr(first, flag) == ""]:
        raise UserError(*(f"--{flag} is empty: give it a value or leave it out." for flag in empty))
    name, config = first.name, first.config
    if config is None:
        config = CONFIGS / ("small.yaml" if torch.cuda.is_available() else "tiny.yaml")
        name = name or f"{config.stem}-{first.norm}"
        if first.ckpt_path == "last":
            config = last_run(Path(first.root), name) / "config.yaml"
        elif config.stem == "tiny" and rank_zero_only.rank == 0:
            no_gpu = "No GPU: training configs/tiny.yaml (with a GPU: configs/small.yaml)."
            print(no_gpu, file=sys.stderr)  # what --print_config prints is a config
        argv = ["--config", str(config), *argv]
    parser = build_parser()
    try:
        settings = parser.parse_args(argv)
    except (ArgumentError, UnicodeDecodeError) as error:
        mistakes = _mistakes(parser, argv, Path(config)) or [sentence(error)]
        raise UserError(*mistakes, *norm_problems(first.norm)) from None
    settings.name = name or settings.name or f"{Path(config).stem}-{settings.norm}"
    if Path(settings.name).name != settings.name or settings.name == "..":
        raise UserError(f"The name {settings.name!r} is not that of a directory inside another.")
    if settings.trainer.precision is None:
        settings.trainer.precision = _default_precision(settings.trainer.accelerator)
    return parser, settings


def _first_look(argv: list[str]) -> argparse.Namespace:
    """The flags that decide which config is read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c")
    parser.add_argument("--norm", default="triton")
    parser.add_argument("--name")
    parser.add_argument("--ckpt_path")
    parser.add_argument("--trainer.default_root_dir", dest="root", default="runs")
    return parser.parse_known_args(argv)[0]


def _mistakes(parser: ArgumentParser, argv: list[str], config: Path) -> list[str]:
    """What is wrong with each flag and each key of the config by itself.

    The parser stops at the first mistake. Flags of one option, such as --trainer.callbacks.*, stay
    together, as their meaning depends on each other.
    """
    flags, option = {}, ""
    for word in argv:
        if word.startswith("--"):
            option = ".".join(word[2:].split("=")[0].rstrip("+").split(".")[:2])
        elif word == "-c":
            option = "config"
        flags.setdefault(option, []).append(word)
    mistakes, whole = [], []
    try:
        content = yaml.safe_load(config.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        content, whole = {}, ["--config", str(config)]  # the parser says why
    if not isinstance(content, dict):
        what = "is empty" if content is None else f"holds {content!r}, which are no settings"
        mistakes.append(f"The config {config} {what}; configs/tiny.yaml is an example.")
        content = {}
    flags = [f for option, f in flags.items() if option not in ("config", "help", "print_config")]
    attempts = [(parser.parse_args, words) for words in (whole, *flags)]
    attempts += [(parser.parse_object, piece) for piece in _pieces(content)]
    for attempt, words in attempts:
        try:
            attempt(words)
        except (ArgumentError, UnicodeDecodeError) as error:
            mistakes.append(sentence(error))
    return mistakes


def _pieces(settings: dict) -> list[dict]:
    """The settings of a config, one in each dict."""
    pieces = []
    for key, value in settings.items():
        if key in ("model", "data", "trainer") and isinstance(value, dict):
            pieces += [{key: {inner: one}} for inner, one in value.items()]
        else:
            pieces.append({key: value})
    return pieces


def build_parser() -> ArgumentParser:
    """The parser: LightningCLI's conventions, without a subcommand."""
    parser = ArgumentParser(
        prog="train.py",
        usage="train.py [--norm NORM] [--config FILE] [--model.* ...] [--data.* ...] "
        "[--trainer.* ...]",
        exit_on_error=False,
        allow_abbrev=False,
        description="Train a small GPT in which every RMSNorm is the one that --norm names.",
    )
    parser.add_argument(
        "-c",
        "--config",
        action="config",
        help="YAML file of settings, which flags after it override (default: configs/tiny.yaml, "
        "or configs/small.yaml with a GPU).",
    )
    parser.add_argument(
        "--norm",
        type=str,
        default="triton",
        help="RMSNorm implementation: eager, compiled, triton, a peer that is installed (aten, "
        "liger, quack) or package.module:name.",
    )
    parser.add_argument(
        "--name",
        type=str | None,
        help="Name of the run's directory, which gets -2, -3, ... appended if it exists "
        "(default: config and norm, such as tiny-triton).",
    )
    parser.add_argument(
        "--ckpt_path",
        type=str | None,
        help="Checkpoint to go on from: a path, for a new run, or the word last, to continue the "
        "newest run of this name in its own directory.",
    )
    parser.add_argument(
        "--seed_everything",
        type=int,
        default=1337,
        help="Seed of the weights; the order of the data has its own, data.seed.",
    )
    parser.add_class_arguments(
        LitGPT, "model", skip={"context", "vocab_size", "norm"}, instantiate=False
    )
    parser.add_class_arguments(TextDataModule, "data", instantiate=False)
    parser.add_class_arguments(
        Trainer, "trainer", instantiate=False, fail_untyped=False, sub_configs=True
    )
    parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
    return parser


def _default_precision(accelerator: Any) -> str:
    """bfloat16 on GPUs that compute in it, scaled float16 on older ones, float32 on a CPU."""
    if not on_gpu(accelerator):
        return "32-true"
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if bfloat16 else "16-mixed"


def last_run(root: Path, name: str) -> Path:
    """Directory of the newest run called `name`, which has to have a checkpoint."""
    run = newest_run(root, name, lambda path: _may_be_called(path, name))
    if run is None:
        raise UserError(
            f"There is no run {root / name} to resume: none in {root}/ has the name {name!r} in "
            f"its config.yaml."
        )
    last = run / "last.ckpt"
    if _name_of(run) is None:
        raise UserError(
            f"{run / 'config.yaml'} cannot be read, so that this may be the newest run of this "
            f"name, or one of another.",
            offer(last),
        )
    if not last.exists() and any(run.glob("*.ckpt")):
        raise UserError(f"{last}, of the newest run of this name, is gone.", offer(last))
    if not last.exists():
        raise UserError(
            f"{run}, the newest run of this name, has no checkpoint yet: start it again without "
            f"--ckpt_path, or name a checkpoint by its path."
        )
    return run


def changed_settings(config: Path, now: str) -> list[str]:
    """What differs between a run's config.yaml, if it is there, and the settings in `now`, YAML."""
    try:
        before = yaml.safe_load(config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return []
    after = yaml.safe_load(now)
    after.pop("name")
    return sorted(_changes(before, after)) if isinstance(before, dict) else []


def _changes(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Differences in what both have, nested settings under dotted names."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() & after.keys():
            yield from _changes(before[key], after[key], f"{name}.{key}" if name else key)
    elif before != after:
        before, after = (
            value["class_path"] if isinstance(value, dict) and "class_path" in value else value
            for value in (before, after)
        )
        yield f"{name} {after} instead of {before}"


def _may_be_called(run: Path, name: str) -> bool:
    """Whether a run has this name, or has checkpoints and a name that cannot be read."""
    found = _name_of(run)
    return found == name or (found is None and any(run.glob("*.ckpt")))


def _name_of(run: Path) -> str | None:
    """The name that a run was given, which tells run 2 of "a" from a run called "a-2"."""
    try:
        return yaml.safe_load((run / "config.yaml").read_text())["name"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None  # a run that never began, or not a run


def instantiate(parser: ArgumentParser, settings: Namespace) -> Namespace:
    """The settings with the callbacks, loggers, ... that they name.

    Raises:
        UserError: if one of them cannot be built.
    """
    try:
        return parser.instantiate(settings)
    except Exception as error:  # a class of somebody else's may raise anything
        raise UserError(sentence(error)) from error


def checked_data(settings: Namespace) -> TextDataModule:
    """The data, prepared and ready, once everything that a user can get wrong has been looked at.

    Args:
        settings: What `parse` returned, its trainer's classes instantiated.

    Raises:
        UserError: with a sentence for every mistake in norm, model, data, precision and trainer.
    """
    no_folder = folder_problems(settings)
    problems = no_folder + norm_problems(settings.norm, settings.model.norm_recompute)
    problems += trainer_problems(settings)
    if not MIN_SEED <= settings.seed_everything <= MAX_SEED:
        problems.append(
            f"seed_everything is {settings.seed_everything}; it has to be from {MIN_SEED} to "
            f"{MAX_SEED}."
        )
    data, vocab_size = None, 1  # any size will do where the real one cannot be had
    try:
        data = TextDataModule(**settings.data)
        vocab_size = data.vocab_size
    except ValueError as error:
        problems += str(error).splitlines()
    problems += config_problems(
        **settings.model,
        context=max(1, settings.data.context),  # the data has a sentence of its own
        vocab_size=vocab_size,
    )
    problems += training_problems(**settings.model)
    if not problems:
        problems += trial_problems(
            settings.norm,
            settings.model.n_embd,
            settings.model.norm_eps,
            torch.device("cuda" if on_gpu(settings.trainer.accelerator) else "cpu"),
            PRECISIONS.get(full_precision(settings.trainer.precision), torch.float32),
            STREAM_DTYPES[settings.model.stream_dtype],
        )
    # To fetch and read a named source takes long and there is nothing wrong with it. Nothing is
    # tokenised for a run that has no place.
    if data is not None and (not problems or (data.is_own_files and not no_folder)):
        try:
            data.prepare_data()
            data.setup("fit")
        except ValueError as error:
            problems += str(error).splitlines()
    if problems:
        raise UserError(*problems)
    return data
