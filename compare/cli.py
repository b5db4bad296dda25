"""The command line of a comparison: its own few flags, and all settings of train.py."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from compare import scaling, sentences
from compare.setup import SCOPES, Settings, from_config
from model import cli
from model.checks import PRECISIONS, full_precision, norm_problems, on_gpu
from model.cli import checked_data
from model.errors import UserError

COUNTED = ("accelerator", "default_root_dir", "precision")  # of the trainer's options


@dataclass(frozen=True)
class Request:
    """What a command asks for; the settings are in the first of the scopes."""

    settings: Settings
    scopes: tuple[str, ...]
    parts: tuple[str, ...]
    joins: bool  # the parts were named: they are added to a comparison that is there
    rounds: int | None
    strategies: tuple[str, ...]
    root: Path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m compare",
        usage="python -m compare [speed,profile,memory,parity] [--config FILE] [--norms A,B,...]\n"
        "                         [--scopes A,B] [--rounds N] [--name NAME]\n"
        "                         [--model.* ...] [--data.* ...] [--trainer.* ...]\n"
        f"       {scaling.LAUNCH} [--strategy ddp,fsdp] ...\n"
        "       python -m compare report FOLDER\n"
        "       python -m compare report RUN RUN ...",
        description="Step time, memory and loss curves of the same model under each norm. Parts "
        "named in front (speed,memory) run alone, and are added to the comparison of this name if "
        "the settings are the same; report writes the report anew from the results.json files in a "
        "folder, or lays runs of train.py over each other. scaling, under torchrun, measures "
        "several devices, each with data.batch_size sequences.",
        epilog="--config, --model.*, --data.* and --seed_everything are those of train.py (python "
        f"train.py --help), and of --trainer.* {sentences.enumeration(list(COUNTED))}: every step "
        "is one micro-batch. Without a config, tiny.yaml or, with a GPU, small.yaml. Exit status: "
        "0 parity holds (or was not asked for), 1 it fails, is inconclusive, or a part could not "
        "be measured, 2 bad input, 130 after Ctrl-C.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--norms",
        default="eager,compiled,triton",
        help="norms to compare, the first one is the baseline: names of train.py's --norm, or "
        "package.module:name (default: %(default)s)",
    )
    parser.add_argument(
        "--scopes",
        default="eager,compiled" if torch.cuda.is_available() else "eager",
        help="eager, compiled, graphs: whether the whole model runs through torch.compile, and "
        "with CUDA graphs, of which speed alone is measured (default: %(default)s on this machine)",
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of blocks of steps (default: 30, on a CPU 5)"
    )
    parser.add_argument(
        "--strategy",
        help="how several devices share the training: ddp (default), fsdp for FSDP2, or both",
    )
    parser.add_argument(
        "--name", help="the results' directory is runs/compare-NAME (default: the config's name)"
    )
    return parser


def parse(argv: list[str]) -> Request:
    """The comparison that a command line asks for, its data set up.

    Raises:
        UserError: with a sentence for everything that is wrong.
        SystemExit: after --help, and for flags without a value or of a wrong type.
    """
    parts, named = sentences.PARTS, bool(argv) and not argv[0].startswith("-")
    if named:
        known, parts = (*parts, "scaling"), tuple(dict.fromkeys(_list(argv[0])))
        if not parts or not set(parts) <= set(known):
            raise UserError(
                f"There is no part {argv[0]!r}; there are {', '.join(known)} and report."
            )
        argv = argv[1:]
    flags, others = build_parser().parse_known_args(argv)
    norms, scopes = _list(flags.norms), _list(flags.scopes)
    problems = _problems(norms, scopes, flags.rounds)
    trainings = {word.partition("=")[0] for word in others} & {"--norm", "--ckpt_path"}
    problems += [f"{flag} is train.py's; a comparison has --norms." for flag in sorted(trainings)]
    if trainings:  # whoever means a training has its other flags, too
        raise UserError(*problems)
    trainer = {word.partition("=")[0] for word in others if word.startswith("--trainer.")}
    problems += [
        f"{flag} has no effect on a comparison, whose steps are one micro-batch each: of "
        f"--trainer.*, {sentences.enumeration(list(COUNTED))} count."
        for flag in sorted(trainer - {f"--trainer.{option}" for option in COUNTED})
    ]
    strategies = tuple(_list(flags.strategy)) if flags.strategy else ()
    problems += _part_problems(parts if named else (), scopes, strategies)
    others += ["--name", flags.name] if flags.name else []
    if scaling.world_size() > 1:
        others += [f"--trainer.{place}={n}" for place, n in scaling.places().items()]
    try:
        parser, training = cli.parse(others)
        config = _config(training, flags.name, norms, scopes)
        if "graphs" in scopes and config["device"] != "cuda":
            problems.append("--scopes names graphs, which are CUDA graphs and so need a GPU.")
        if config["model"]["norm_recompute"]:
            problems += [problem for norm in norms for problem in norm_problems(norm, True)]
            if set(scopes) - {"eager"}:
                problems.append(
                    "model.norm_recompute is true, which is not for a compiled model: --scopes "
                    "eager."
                )
        if "fsdp" in strategies and config["precision"] == "16-mixed":
            problems.append(
                "trainer.precision is 16-mixed, whose scaled gradients fsdp does not check for "
                "overflow on all devices alike: set bf16-mixed or 32-true, or --strategy ddp."
            )
        if config["precision"] not in PRECISIONS:
            problems.append(
                f"trainer.precision is {config['precision']}; a comparison runs in "
                f"{', '.join(PRECISIONS)}."
            )
        data = checked_data(cli.instantiate(parser, training))
    except UserError as error:
        raise UserError(*dict.fromkeys([*problems, *error.args])) from None
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return Request(
        from_config(config, data),
        tuple(scopes),
        parts,
        named,
        flags.rounds,
        strategies or ("ddp",),
        Path(training.trainer.default_root_dir),
    )


def _problems(norms: list[str], scopes: list[str], rounds: int | None) -> list[str]:
    problems = [problem for norm in norms for problem in norm_problems(norm)]
    if len(norms) < 2 or len(set(norms)) < len(norms):
        problems.append(f"--norms is {','.join(norms)!r}; it has to name at least two, each once.")
    if not scopes or len(set(scopes)) < len(scopes) or not set(scopes) <= set(SCOPES):
        problems.append(
            f"--scopes is {','.join(scopes)!r}; it has to name some of {', '.join(SCOPES)}, each "
            "once."
        )
    if rounds is not None and rounds < 2:
        problems.append(f"--rounds is {rounds}; it has to be at least 2.")
    return problems


def _part_problems(
    parts: tuple[str, ...], scopes: list[str], strategies: tuple[str, ...]
) -> list[str]:
    """What does not go together with the parts that are named."""
    problems, several = [], scaling.world_size() > 1
    if "scaling" in parts:
        if len(parts) > 1:
            problems.append("scaling is measured by itself: name no other part with it.")
        if not several:
            problems.append(
                "scaling measures several devices, each with a process of its own: start it with "
                f"{scaling.LAUNCH}."
            )
        if not {*strategies} <= {*scaling.STRATEGIES}:
            problems.append(
                f"--strategy is {','.join(strategies)!r}; it has to name some of "
                f"{', '.join(scaling.STRATEGIES)}."
            )
    else:
        if several:
            problems.append(
                f"{', '.join(parts or sentences.PARTS)}: measured by one process, and torchrun "
                f"started {scaling.world_size()}. Several devices are the part scaling: "
                f"{scaling.LAUNCH}."
            )
        if strategies:
            problems.append(f"--strategy is for the part scaling: {scaling.LAUNCH}.")
    if "graphs" in scopes:
        absent = [part for part in parts if part in sentences.NOT_WITH_GRAPHS]
        problems += [f"{part} is not measured in scope graphs." for part in absent]
    return problems


def _config(training, name: str | None, norms: list[str], scopes: list[str]) -> dict:
    """The settings' plain values, as `from_config` takes them."""
    training.norm = norms[0] if norms else "eager"
    config = {
        "model": training.model.as_dict(),
        "data": training.data.as_dict(),
        "norms": norms,
        "scope": scopes[0] if scopes else "eager",
        "precision": full_precision(training.trainer.precision),
        "device": "cuda" if on_gpu(training.trainer.accelerator) else "cpu",
        "seed": training.seed_everything,
        "name": name or Path(training.config[-1]).stem,
    }
    return json.loads(json.dumps(config))  # as it is read back from a results.json


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
