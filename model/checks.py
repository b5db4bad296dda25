"""What can be wrong with the norm and the trainer's options: one sentence a problem."""

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, Namespace
from lightning import Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kernels import NORMS, RMSNorm, load_norm
from model.lit import CUDA_GRAPHS
from model.recompute import recompute_problems

# Lightning's mixed precisions, and float32, with the dtype that branches have in each.
PRECISIONS = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
SHORT_PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
MONITORED = ("val_loss", "val_perplexity")
# For a Trainer that is built only to hear what is wrong with its other options.
PLAIN = {
    "callbacks": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "logger": False,
}


def on_gpu(accelerator: Any) -> bool:
    """Whether a run with this trainer.accelerator will be on a GPU."""
    return accelerator != "cpu" and torch.cuda.is_available()


def full_precision(precision: str | int) -> str:
    """Lightning's full name of a trainer.precision."""
    return SHORT_PRECISIONS.get(str(precision), str(precision))


def sentence(error: Exception) -> str:
    """An error's text in one line, with its type where the text alone may say too little."""
    text = " ".join(str(error).split())
    if isinstance(error, ArgumentError | MisconfigurationException | ValueError | TypeError):
        return f"config: {text}" if isinstance(error, UnicodeDecodeError) else text
    return f"{type(error).__name__}: {text}"


def norm_problems(name: str, norm_recompute: bool = False) -> list[str]:
    """Why there is no norm of that name, or none that norm_recompute can be used with."""
    try:
        norm = load_norm(name)
    except ValueError as error:
        return [str(error)]
    return recompute_problems(norm) if norm_recompute else []


def trial_problems(
    name: str,
    n_embd: int,
    eps: float,
    device: torch.device,
    branch: torch.dtype,
    stream: torch.dtype,
) -> list[str]:
    """What goes wrong in a small forward and backward pass of a norm that is not this project's.

    It is called as a model calls it: the stream by itself, then a branch and the stream, under
    autocast where the branch is not float32.
    """
    if name in NORMS and NORMS[name].package is None:
        return []
    residual = torch.ones(2, 3, n_embd, device=device, dtype=stream, requires_grad=True)
    x = residual.detach().to(branch).requires_grad_()
    try:
        norm = RMSNorm(n_embd, eps, name).to(device)
        with torch.autocast(device.type, branch, enabled=branch != torch.float32):
            outputs = norm(residual), *norm(x, residual)
        sum(output.float().sum() for output in outputs).backward()
    except Exception as error:  # somebody else's code may raise anything
        text = " ".join(str(error).split())
        return [f"norm {name!r} fails in a first call: {type(error).__name__}: {text}"]
    shapes = [tuple(output.shape) for output in outputs]
    if shapes != [tuple(x.shape)] * 3:
        return [
            f"norm {name!r} has to keep the shape {tuple(x.shape)} in rms_norm's output and the "
            f"two of add_rms_norm; what it returns has {', '.join(map(str, shapes))}."
        ]
    dtypes, wanted = [output.dtype for output in outputs], [branch, branch, stream]
    if dtypes != wanted:
        return [
            f"norm {name!r} has to return y in out_dtype and h in residual's dtype: "
            f"{', '.join(map(str, wanted))} from rms_norm and add_rms_norm, but it returns "
            f"{', '.join(map(str, dtypes))}."
        ]
    return []


def folder_problems(settings: Namespace) -> list[str]:
    """Why there can be no folder for the run that can be written, if there can be none."""
    if settings.trainer.default_root_dir is None:
        return ["trainer.default_root_dir has to be a folder; it gets one for each run."]
    root, name = Path(settings.trainer.default_root_dir), settings.name
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".tmp-") as folder:
            (Path(folder) / name).mkdir()
    except OSError as error:
        return [f"There cannot be a folder {root / name}: {error.strerror} ({there})."]
    return []


def trainer_problems(settings: Namespace) -> list[str]:
    """What is wrong with settings.trainer, alone and together with settings.model."""
    trainer, problems = settings.trainer, []
    strategy = copy.copy(trainer.strategy)  # a Trainer leaves its mark on it
    if strategy == "ModelParallelStrategy":  # by itself, no class for the parser
        strategy = ModelParallelStrategy()
    try:
        plain = Trainer(**{**trainer, **PLAIN, "strategy": strategy})
    except Exception as error:  # such as an ImportError of what an accelerator needs
        problems.append(sentence(error))
    else:
        problems += _process_problems(plain.num_devices, plain.num_nodes) or _strategy_problems(
            plain.strategy, settings.model.compile
        )
    problems += _monitor_problems(trainer.callbacks)
    if trainer.overfit_batches:
        problems.append(
            "trainer.overfit_batches has no effect on data that never ends: use a short text as "
            "data.source."
        )
    for option in ("max_epochs", "limit_train_batches"):
        if trainer[option] == 0:
            problems.append(f"trainer.{option} is 0, which leaves nothing to train.")
    if trainer.max_steps < 1:
        problems.append(
            "trainer.max_steps has to be at least 1: training data never ends and the learning "
            "rate's schedule needs to know its last step."
        )
    if trainer.log_every_n_steps < 1:
        problems.append("trainer.log_every_n_steps has to be at least 1.")
    interval, micro_batches = trainer.val_check_interval, trainer.accumulate_grad_batches
    if micro_batches < 1:
        problems.append("trainer.accumulate_grad_batches has to be at least 1.")
    elif isinstance(interval, float) or interval == 0:
        problems.append(
            f"trainer.val_check_interval is {interval}; it has to be a whole number of "
            f"micro-batches, at least 1, as the training data never ends."
        )
    elif isinstance(interval, int) and interval % micro_batches:
        problems.append(
            f"trainer.val_check_interval is {interval} micro-batches, which is not a whole number "
            f"of steps of {micro_batches} (trainer.accumulate_grad_batches)."
        )
    if trainer.gradient_clip_val is not None:
        problems.append(
            "trainer.gradient_clip_val does not work with the fused optimizer: "
            "use model.grad_clip, which is 1.0 by default."
        )
    if str(trainer.precision).startswith("16") and not on_gpu(trainer.accelerator):
        problems.append(
            f"trainer.precision is {trainer.precision}, which is for GPUs: on a CPU, set "
            "bf16-mixed or 32-true."
        )
    if settings.model.compile in CUDA_GRAPHS and not on_gpu(trainer.accelerator):
        problems.append(
            f"model.compile is {settings.model.compile}, which records CUDA graphs and so needs a "
            "GPU: set --model.compile true."
        )
    if settings.model.stream_dtype == "bfloat16" and "bf16" not in str(trainer.precision):
        problems.append(
            f"model.stream_dtype is bfloat16 and trainer.precision {trainer.precision}: set "
            f"--trainer.precision bf16-mixed or --model.stream_dtype float32."
        )
    return problems


def _process_problems(devices: int, nodes: int) -> list[str]:
    """Why this many devices are not those that processes were started for, if they are not.

    Processes too many would each train by itself, and write where another run has its checkpoints.
    """
    if TorchElasticEnvironment.detect():
        launcher, started = "torchrun", TorchElasticEnvironment().world_size()
    elif "SLURM_STEP_NUM_TASKS" in os.environ and SLURMEnvironment.detect():
        launcher, started = "srun", int(os.environ["SLURM_STEP_NUM_TASKS"])
    else:
        return []
    if started == devices * nodes:
        return []
    return [
        f"{launcher} has started {started} processes, but trainer.devices is {devices} and "
        f"trainer.num_nodes {nodes}: set --trainer.devices to the processes of a node, with "
        f"--trainer.strategy ddp or ModelParallelStrategy, and --trainer.num_nodes to the nodes."
    ]


def _strategy_problems(strategy: Strategy, compile: bool | str) -> list[str]:
    if isinstance(strategy, FSDPStrategy):
        return [
            "trainer.strategy fsdp is PyTorch's first FSDP, whose flat shards hide which parameter "
            "is a matrix: use ModelParallelStrategy, which is FSDP2, or ddp."
        ]
    if getattr(strategy, "_start_method", "popen") != "popen":
        return [
            f"trainer.strategy starts its processes by {strategy._start_method}, from which no "
            "results come back: use ddp."
        ]
    if not isinstance(strategy, ModelParallelStrategy):
        return []
    problems = []
    wanted = {
        "data_parallel_size": strategy.num_processes * strategy.num_nodes,
        "tensor_parallel_size": 1,
        "save_distributed_checkpoint": False,
    }
    if any(getattr(strategy, f"_{name}") != value for name, value in wanted.items()):
        flags = " ".join(f"--trainer.strategy.{name} {value}" for name, value in wanted.items())
        problems.append(
            "trainer.strategy ModelParallelStrategy has to shard over all devices and to save "
            f"checkpoints from which one device can go on as well: set {flags.lower()}."
        )
    if compile in CUDA_GRAPHS:
        problems.append(
            f"model.compile is {compile}, whose CUDA graphs need parameters that stay where they "
            "are, which ModelParallelStrategy gathers anew: set --model.compile true."
        )
    return problems


def _monitor_problems(callbacks: Any) -> list[str]:
    return [
        f"{type(callback).__name__} monitors {callback.monitor!r}; what can be monitored is "
        f"{' and '.join(MONITORED)}."
        for callback in (callbacks if isinstance(callbacks, list) else [callbacks])
        if isinstance(callback, EarlyStopping | ModelCheckpoint)
        and callback.monitor not in (None, *MONITORED)
    ]
