"""Text sources, tokenizers, the cache of packed tokens, and the DataModule over them."""

from .datamodule import TextDataModule
from .errors import DataError
from .sources import DEFAULT_SOURCE, SOURCES
from .tokenizer import OFFLINE_TOKENIZERS, load_tokenizer

__all__ = [
    "DEFAULT_SOURCE",
    "OFFLINE_TOKENIZERS",
    "SOURCES",
    "DataError",
    "TextDataModule",
    "load_tokenizer",
]
