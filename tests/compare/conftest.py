"""A comparison so small that a step takes milliseconds, on a text of its own."""

import json

import pytest

from compare import child
from compare.setup import Settings, from_config


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> dict:
    """Plain values of the settings."""
    folder = tmp_path_factory.mktemp("compare")
    text = folder / "text.jsonl"
    lines = (f"The {i}th line tells of {i * i} sheep and {i % 7} goats." for i in range(80))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return {
        "model": {
            "n_layer": 1,
            "n_head": 2,
            "n_embd": 16,
            "norm_eps": 1e-6,
            "qk_norm": False,
            "stream_dtype": "float32",
            "lr": 1e-3,
            "grad_clip": 1.0,
        },
        "data": {
            "source": str(text),
            "tokenizer": "bytes",
            "context": 16,
            "batch_size": 4,
            "val_batches": 2,
            "seed": 1337,
            "cache_dir": str(folder / "cache"),
            "num_proc": 1,
        },
        "norms": ["eager", "aten"],
        "scope": "eager",
        "precision": "32-true",
        "device": "cpu",
        "seed": 1337,
        "name": "small",
    }


@pytest.fixture(scope="session")
def settings(config) -> Settings:
    return from_config(config)


@pytest.fixture
def in_this_process(monkeypatch):
    """Parts run here and not in processes of their own, which take seconds to start."""

    def call(target, config, progress, environment=None, **arguments):
        module, _, name = target.partition(":")
        function = getattr(__import__(module, fromlist=[name]), name)
        return json.loads(json.dumps(function(from_config(config), progress, **arguments)))

    monkeypatch.setattr(child, "call", call)
