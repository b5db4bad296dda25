"""`python -m data`: what a source becomes, and what the cache holds. See `--help`."""

import argparse
import logging
import sys
import warnings

from .cache import TokenCache, entries, remove
from .datamodule import TextDataModule
from .errors import DataError
from .folders import cache_folder
from .tokenizer import load_tokenizer

BAD_INPUT = 2
SAMPLE = 100  # tokens


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 2 for bad input, 130 after Ctrl-C."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
    options = _parser().parse_args(argv)
    try:
        return options.command(options)
    except DataError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data", description=__doc__.split(":")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect", help="prepare a source and show its documents, tokens, splits and a sample"
    )
    inspect.add_argument("source", metavar="SOURCE", help="what --data.source takes")
    inspect.add_argument("--tokenizer", default="gpt2", help="what --data.tokenizer takes")
    inspect.add_argument("--text_column", help="the column that holds the text")
    inspect.add_argument("--max_tokens", type=int, help="tokens of a split at most")
    inspect.add_argument("--num_proc", type=int, help="processes that tokenise")
    inspect.set_defaults(command=_inspect)
    clear = commands.add_parser("clear", help="delete all tokens that are cached")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(command=_clear)
    for command in (inspect, clear):
        command.add_argument("--cache_dir", help="the folder of the tokens")
    return parser


def _inspect(options: argparse.Namespace) -> int:
    settings = {key: value for key, value in vars(options).items() if key != "command"}
    module = TextDataModule(**settings)
    module.prepare_data()
    for part, cache in zip(module.parts, module.caches, strict=True):
        share = f", {part.share:.1%} of the blocks" if len(module.parts) > 1 else ""
        print(f"{part.name}{share}")
        for row in _rows(cache, options.tokenizer):
            print("  {:<11} {}".format(*row))
    return 0


def _rows(cache: TokenCache, tokenizer: str) -> list[tuple[str, str]]:
    splits = {"train": cache.train, "validation": cache.validation}
    sample = load_tokenizer(tokenizer).decode(cache.train[:SAMPLE].tolist())
    size = sum(ids.nbytes for ids in splits.values())
    return [
        *(
            (split, f"documents {cache.documents[split]:,}, tokens {len(ids):,}")
            for split, ids in splits.items()
        ),
        ("begins", repr(sample)),
        ("cache", f"{cache.path} ({_megabytes(size)}, {cache.train.dtype})"),
    ]


def _clear(options: argparse.Namespace) -> int:
    folder = cache_folder(options.cache_dir)
    found = entries(folder)
    if not found:
        print(f"There are no tokens in {folder}.")
        return 0
    for entry in found:
        print(f"{_megabytes(entry.size):>12}  {entry.path.name}  ({entry.source or 'of no use'})")
    question = f"Delete these {len(found)} in {folder}, {_megabytes(sum(e.size for e in found))}"
    if not options.yes and not _agreed(question):
        print("Nothing was deleted.")
        return 0
    for entry in found:
        if not remove(entry):
            print(f"Left {entry.path.name}: another process is at work on it.")
    return 0


def _agreed(question: str) -> bool:
    try:
        return input(f"{question}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise DataError("There is nobody to ask: add --yes to delete them.") from None


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
