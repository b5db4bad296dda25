"""What all parts of a comparison share: same weights, same batches, one step."""

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from data import TextDataModule
from model.checks import PRECISIONS, trial_problems
from model.gpt import STREAM_DTYPES
from model.lit import LitGPT, clip_gradients

# What LitGPT takes as compile in each scope.
SCOPES = {"eager": False, "compiled": True, "graphs": "reduce-overhead"}


@dataclass(frozen=True)
class Settings:
    """One comparison: a model, its data and the norms that take turns in it.

    Args:
        model: LitGPT's arguments, without norm and compile.
        data: Set up, so that train_batch and val_dataloader work.
        norms: What load_norm takes; the first one is the baseline.
        scope: "eager", "compiled" for the whole model through torch.compile, or "graphs" for that
            with CUDA graphs.
        precision: Lightning's name, one of PRECISIONS.
        device: Where everything runs.
        seed: Of the weights.
        name: Of the comparison.
        config: Everything above in plain values, from which `from_config` makes it again.
    """

    model: dict
    data: TextDataModule
    norms: tuple[str, ...]
    scope: str
    precision: str
    device: torch.device
    seed: int
    name: str
    config: dict

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.data.context

    @property
    def baseline(self) -> str:
        return self.norms[0]

    @property
    def branch_dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    def autocast(self) -> torch.autocast:
        """The precision's autocast, which does nothing in float32."""
        mixed = self.precision != "32-true"
        return torch.autocast(self.device.type, self.branch_dtype, enabled=mixed)

    def with_scope(self, scope: str) -> "Settings":
        """These settings in another scope."""
        return dataclasses.replace(self, scope=scope, config={**self.config, "scope": scope})


def from_config(config: dict, data: TextDataModule | None = None) -> Settings:
    """Settings from their plain values, in this process or in one that it starts.

    Args:
        config: Keys model and data (arguments of LitGPT and TextDataModule), norms, scope,
            precision, device, seed and name.
        data: The data of this config where it is set up already.

    Raises:
        ValueError: for wrong data, with a sentence a line.
    """
    if data is None:
        data = TextDataModule(**config["data"])
        data.setup("fit")
    model = {key: value for key, value in config["model"].items() if key != "compile"}
    return Settings(
        model={**model, "context": data.context, "vocab_size": data.vocab_size},
        data=data,
        norms=tuple(config["norms"]),
        scope=config["scope"],
        precision=config["precision"],
        device=torch.device(config["device"]),
        seed=config["seed"],
        name=config["name"],
        config=config,
    )


def make_model(settings: Settings, norm: str, seed: int) -> LitGPT:
    """A model on the device that depends on `seed` alone: every norm gets the same weights."""
    if settings.scope != "eager":
        # Models share the code that Dynamo compiles, each norm is one version of it: more than
        # there may be of them would run uncompiled, with no more than a warning.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    on_gpu = [settings.device] if settings.device.type == "cuda" else []
    with torch.random.fork_rng(on_gpu), settings.device:  # on a GPU, weights are drawn there
        torch.manual_seed(seed)
        lit = LitGPT(**settings.model, norm=norm, compile=SCOPES[settings.scope])
    return lit.to(settings.device)


class Step:
    """One training step as a function of its batch, int64 (B, context + 1); returns the loss.

    The step of `train.py` without a Trainer: forward under the precision's autocast, backward,
    clipping, optimizer. One micro-batch a step. Nothing in it waits for the device; the loss is a
    scalar there.
    """

    def __init__(self, settings: Settings, lit: LitGPT, optimizer: Optimizer) -> None:
        self.lit, self.optimizer = lit, optimizer
        self._autocast = settings.autocast
        float16 = settings.precision == "16-mixed"
        self._scaler = torch.amp.GradScaler(settings.device.type, enabled=float16)

    def __call__(self, batch: Tensor) -> Tensor:
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return loss.detach()

    def forward(self, batch: Tensor) -> Tensor:
        with self._autocast():
            return self.lit.loss(batch)

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def update(self) -> None:
        self._scaler.unscale_(self.optimizer)
        clip_gradients(self.lit.gpt.parameters(), self.lit.hparams.grad_clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()


def norm_inputs(settings: Settings, batch_size: int) -> tuple[Tensor, Tensor]:
    """Random branch and stream (B, T, C) in the dtypes that they have in the model."""
    dtypes = settings.branch_dtype, STREAM_DTYPES[settings.model["stream_dtype"]]
    shape = (batch_size, settings.data.context, settings.model["n_embd"])
    return tuple(
        torch.randn(shape, dtype=dtype, device=settings.device, requires_grad=True)
        for dtype in dtypes
    )


def norm_problems(settings: Settings, progress: Callable) -> list[str]:
    """A sentence for every norm that cannot do what the model asks of it."""
    return [
        problem
        for norm in settings.norms
        for problem in trial_problems(
            norm,
            settings.model["n_embd"],
            settings.model["norm_eps"],
            settings.device,
            settings.branch_dtype,
            STREAM_DTYPES[settings.model["stream_dtype"]],
        )
    ]


def batches(settings: Settings, steps: int, seed: int) -> list[Tensor]:
    """Training batches on the device, int64 (B, context + 1), the same for equal arguments.

    Args:
        steps: How many.
        seed: Of their order, in place of data.seed.
    """
    data = settings.data
    if seed != data.seed:
        data = TextDataModule(**{**settings.config["data"], "seed": seed})
        data.setup("fit")
    return [data.train_batch(step).to(settings.device) for step in range(steps)]


def norm_sources(norms: Iterable[str]) -> dict[str, str]:
    """Digests of the Python files of norms of one's own: of the whole package that one is in."""
    digests = {}
    for name in norms:
        if ":" in name:
            top = importlib.import_module(name.partition(":")[0].partition(".")[0])
            files = [
                file
                for folder in getattr(top, "__path__", [])
                for file in sorted(Path(folder).rglob("*.py"))
            ] or [Path(top.__file__)]
            content = hashlib.sha256(b"".join(file.read_bytes() for file in files))
            digests[name] = content.hexdigest()[:12]
    return digests
