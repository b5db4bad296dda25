"""Fixtures for the data tests: everything that is cached goes to a temporary folder."""

import datasets
import pytest

from data import TextDataModule


@pytest.fixture(autouse=True)
def _no_home(tmp_path_factory, monkeypatch):
    """Keeps ~/.cache out of the tests, and the hub out of reach."""
    caches = tmp_path_factory.mktemp("caches")
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches / "xdg"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", caches / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def prepare(tmp_path):
    """Prepares a source with small settings and returns the data module, set up."""

    def prepare(source, **options):
        options = {"tokenizer": "bytes", "context": 4, "batch_size": 1} | options
        module = TextDataModule(str(source), cache_dir=str(tmp_path / "cache"), **options)
        module.prepare_data()
        module.setup("fit")
        return module

    return prepare


@pytest.fixture
def documents(prepare):
    """The documents of each split, as the token files of a `bytes` module hold them."""

    def documents(source, **options):
        tokens = prepare(source, context=1, **options).caches[0]
        return {split: _split_at_end(getattr(tokens, split)) for split in ("train", "validation")}

    return documents


def _split_at_end(ids):
    """Texts between the end-of-text ids (256) of byte tokens; the last must be ended too."""
    texts, current = [], bytearray()
    for token in ids.tolist():
        if token == 256:
            texts.append(current.decode())
            current = bytearray()
        else:
            current.append(token)
    assert not current, "the split does not end with an end of text"
    return texts
