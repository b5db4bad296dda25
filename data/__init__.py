"""Text sources, tokenizers, the cache of packed tokens, and the DataModule over them."""

from .datamodule import TextDataModule
from .errors import DataError
from .sources import SOURCES
from .tokenizer import load_tokenizer

__all__ = [
    "SOURCES",
    "DataError",
    "TextDataModule",
    "load_tokenizer",
]
