"""Weights for other tools: `python -m model.export --ckpt runs/x/last.ckpt --out folder`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model.checkpoints import load_gpt
from model.command import command
from model.errors import UserError
from model.files import replacing
from model.gpt import GPT, GPTConfig

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TIED = "head.weight"  # the same matrix as the embedding: it is in the file once


def export(ckpt: str, out: str) -> None:
    """Write the model in a checkpoint as model.safetensors, with a config.json beside it.

    The config has what `model.gpt.GPTConfig` takes, the tokenizer's name and the number of steps
    of training. The output matrix is the embedding and is not written twice.

    Args:
        ckpt: Checkpoint of train.py.
        out: Folder to write to, which is made; files of these names in it are replaced.
    """
    if not out:
        raise UserError("--out is empty: name a folder to write to.")
    gpt, checkpoint = load_gpt(Path(ckpt))
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file: name a folder to write to.")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight for name, weight in gpt.state_dict().items() if name != TIED}
    about = {"tokenizer": checkpoint.get("tokenizer"), "steps": checkpoint["global_step"]}
    with replacing(folder / WEIGHTS) as temporary:
        try:
            save_file(weights, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise UserError(f"{folder / WEIGHTS} cannot be written: {error}.") from None
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(json.dumps(asdict(gpt.config) | about, indent=2) + "\n")
    print(f"Written to {folder}/: {WEIGHTS}, {CONFIG}")


def load(folder: Path, norm: str | None = None) -> GPT:
    """The GPT that `export` wrote to `folder`, on the CPU, under another norm if one is named.

    Raises:
        UserError: if the files are not there or do not belong together.
    """
    try:
        settings = json.loads((folder / CONFIG).read_text())
        fields = {name: settings[name] for name in GPTConfig.__dataclass_fields__}
        gpt = GPT(GPTConfig(**{**fields, "norm": norm or fields["norm"]}))
        weights = load_file(folder / WEIGHTS)
        gpt.load_state_dict(weights | {TIED: weights["embedding.weight"]})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise UserError(f"There is no exported model in {folder}: {error}") from None
    return gpt.eval()


if __name__ == "__main__":
    sys.exit(command(export, "python -m model.export"))
