"""The GPT as a LightningModule: its loss, its optimizer and its validation metrics."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from model.gpt import GPT, GPTConfig

CompileMode = Literal["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
COMPILE = (False, True, *get_args(CompileMode))
LARGEST_LR = 1e30  # AdamW divides it by 1 - beta1, and what comes of that has to be a float32
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
GATHERED = 20_000_000  # parameters: every unit costs the host milliseconds a step, small or large


class LitGPT(LightningModule):
    """A GPT with the hyper-parameters of its training.

    Args:
        n_layer: Number of transformer blocks.
        n_head: Number of attention heads; has to divide n_embd into an even head dimension.
        n_embd: Width of the residual stream.
        context: Longest sequence that the model reads, in tokens.
        vocab_size: Number of token ids of the tokenizer.
        norm: RMSNorm implementation, a name in kernels.NORMS or package.module:name.
        norm_eps: Epsilon inside the norm's square root.
        qk_norm: Whether queries and keys are normalised per head, by the same norm.
        stream_dtype: Dtype of the residual stream, float32 or (for a bf16 precision) bfloat16.
        norm_recompute: Whether the backward pass makes the norms' outputs again, which saves memory
            and costs a little time; not for a compiled model, and only for norms with add_is_exact.
        lr: Learning rate after the warm-up, at its highest.
        min_lr_ratio: Learning rate of the last step as a fraction of lr.
        warmup_steps: Steps over which the learning rate rises linearly from zero to lr.
        weight_decay: AdamW's weight decay, applied to matrices and not to norm weights.
        betas: AdamW's decay rates of the first and the second moment.
        grad_clip: Largest norm of the whole gradient, longer ones are scaled down; 0 turns it off.
        compile: Whether the whole model runs through torch.compile: true, or the name of one of its
            modes. reduce-overhead and max-autotune record CUDA graphs, for small batches whose
            steps the host cannot launch fast enough.

    Raises:
        ValueError: naming everything that is wrong with the model's shape, one sentence a line,
            or with the optimizer's settings.
    """

    def __init__(
        self,
        n_layer: int = 6,
        n_head: int = 6,
        n_embd: int = 384,
        context: int = 256,
        vocab_size: int = 50257,
        norm: str = "triton",
        norm_eps: float = 1e-6,
        qk_norm: bool = False,
        stream_dtype: str = "float32",
        norm_recompute: bool = False,
        lr: float = 1e-3,
        min_lr_ratio: float = 0.1,
        warmup_steps: int = 100,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        grad_clip: float = 1.0,
        compile: bool | CompileMode = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if problems := training_problems(**self.hparams):
            raise ValueError("\n".join(problems))
        self.gpt = GPT(
            GPTConfig(
                n_layer=n_layer,
                n_head=n_head,
                n_embd=n_embd,
                context=context,
                vocab_size=vocab_size,
                norm=norm,
                norm_eps=norm_eps,
                qk_norm=qk_norm,
                stream_dtype=stream_dtype,
                norm_recompute=norm_recompute,
            )
        )
        if compile:  # in place: the checkpoint's names stay as they are
            self.gpt.compile(**self.compile_options)
        # A batch whose loss is nan counts as infinite; torchmetrics would leave it out.
        self.val_loss = MeanMetric(nan_strategy=math.inf)
        self.grad_norm: Tensor | None = None  # of the last step, before clipping
        self._diverged: Tensor | None = None  # whether a gradient was not finite so far

    @property
    def compile_options(self) -> dict[str, Any]:
        """Arguments of torch.compile."""
        mode = None if self.hparams.compile is True else self.hparams.compile
        return {"fullgraph": True, "mode": mode}

    @property
    def cuda_graphs(self) -> bool:
        """Whether passes through the model are recorded as CUDA graphs, if it is on a GPU."""
        return self.hparams.compile in CUDA_GRAPHS

    def configure_model(self) -> None:
        """Shard the parameters over the devices if the Trainer's strategy has them do so."""
        if self.device_mesh is not None and not isinstance(self.gpt, FSDPModule):
            self.shard(self.device_mesh)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the parameters over a mesh's dimension "data_parallel" (FSDP2)."""
        if self.hparams.compile:
            # Shards are gathered by hooks around each block, where the graph of the whole model
            # would break. What lies between the hooks is compiled instead.
            self.gpt._compiled_call_impl = None
            for block in self.gpt.blocks:
                block.forward = torch.compile(block.forward, **self.compile_options)
            self.gpt.output = torch.compile(self.gpt.output, **self.compile_options)
        for unit in (*gathered_together(self.gpt.blocks), self.gpt):
            fully_shard(unit, mesh=mesh["data_parallel"])

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats of a batch, int64 (B, context + 1)."""
        if not self.cuda_graphs:
            return self.gpt(batch[:, :-1], batch[:, 1:])
        torch.compiler.cudagraph_mark_step_begin()
        return self.gpt(batch[:, :-1], batch[:, 1:]).clone()  # the next call writes to its memory

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_loss.update(self.loss(batch), weight=batch[:, 1:].numel())

    def on_validation_epoch_end(self) -> None:
        loss = self.val_loss.compute()
        self.val_loss.reset()
        # The mean is over all ranks already; the Recorder logs it beside the training metrics.
        self.log("val_loss", loss, logger=False, sync_dist=True)
        self.log("val_perplexity", loss.exp(), logger=False, sync_dist=True)

    def optimizer(self) -> AdamW:
        """AdamW over two groups: matrices, which decay, and everything else, which does not.

        The fused implementation where all parameters are on a GPU.
        """
        matrices = [p for p in self.gpt.parameters() if p.dim() == 2]
        others = [p for p in self.gpt.parameters() if p.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = all(p.is_cuda for p in self.gpt.parameters())
        return AdamW(groups, lr=self.hparams.lr, betas=self.hparams.betas, fused=fused)

    def configure_optimizers(self) -> dict:
        optimizer = self.optimizer()
        schedule = LambdaLR(
            optimizer,
            lambda step: lr_factor(
                step, self.hparams.warmup_steps, self.trainer.max_steps, self.hparams.min_lr_ratio
            ),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zero the gradients, or drop them where one backward pass makes those of a whole step.

        A gradient that was not there before is memory of a CUDA graph, to which the next one's
        backward writes (PyTorch issue 169545). To one that was there it is added.
        """
        accumulates = self.cuda_graphs and self.trainer.accumulate_grad_batches > 1
        if accumulates:
            for parameter in self.gpt.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
        optimizer.zero_grad(set_to_none=not accumulates)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Key the optimizer's state by the names of the parameters.

        A number, which PyTorch gives them in the order of the optimizer's groups, is taken for the
        place in the model when Lightning loads it into sharded parameters.
        """
        if "optimizer_states" not in checkpoint:
            return
        names = {parameter: name for name, parameter in self.named_parameters()}
        states = checkpoint["optimizer_states"]
        for optimizer, saved in zip(self.trainer.optimizers, states, strict=True):
            if not saved:  # rank 0 alone gets the state of sharded parameters
                continue
            new = {}
            for group, saved_group in zip(
                optimizer.param_groups, saved["param_groups"], strict=True
            ):
                ours = [names[parameter] for parameter in group["params"]]
                new.update(zip(saved_group["params"], ours, strict=True))
                saved_group["params"] = ours
            saved["state"] = {new[key]: state for key, state in saved["state"].items()}

    def on_train_start(self) -> None:
        """Have a resumed optimizer and schedule follow the settings of now, not the saved ones."""
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        lr, decays = self.hparams.lr, (self.hparams.weight_decay, 0.0)
        schedule.base_lrs = [lr] * len(decays)
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group |= {"initial_lr": lr, "betas": self.hparams.betas, "weight_decay": decay}
            group["lr"] = lr * schedule.lr_lambdas[0](schedule.last_epoch)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip the gradient.

        Here and not through `Trainer(gradient_clip_val=...)`, which refuses fused optimizers under
        mixed precision (Lightning issue 21435). They may be clipped once their gradients are
        unscaled: with bfloat16 they were never scaled, and GradScaler, asked to unscale before the
        step, no longer has the optimizer do it. For other optimizers Lightning has done so by now.
        """
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        self.grad_norm = clip_gradients(self.gpt.parameters(), self.hparams.grad_clip)
        if scaler is None:  # which leaves out such steps by itself
            self._keep_weights_if_diverged(optimizer)

    def _keep_weights_if_diverged(self, optimizer: Optimizer) -> None:
        """Take no step from the first gradient on that is not finite, without waiting for a GPU.

        So the weights are the last good ones when model.faults.FiniteCheck looks at them.
        """
        bad = ~self.grad_norm.isfinite()
        self._diverged = bad if self._diverged is None else self._diverged | bad
        if optimizer.param_groups[0]["fused"]:
            optimizer.found_inf = self._diverged.float()  # what GradScaler gives it as well
        elif self._diverged:
            optimizer.zero_grad()  # a weight without a gradient is left alone


def training_problems(
    *,
    lr,
    min_lr_ratio,
    warmup_steps,
    weight_decay,
    betas,
    grad_clip,
    compile,
    norm_recompute,
    **_,
) -> list[str]:
    """One sentence for everything that is wrong with these values of LitGPT."""
    rules = [
        ("lr", lr, 0 < lr <= LARGEST_LR, f"above 0 and at most {LARGEST_LR:g}"),
        ("min_lr_ratio", min_lr_ratio, 0 <= min_lr_ratio <= 1, "from 0 to 1"),
        ("warmup_steps", warmup_steps, warmup_steps >= 0, "at least 0"),
        ("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "at least 0"),
        ("betas", betas, all(0 <= beta < 1 for beta in betas), "each at least 0 and below 1"),
        ("grad_clip", grad_clip, 0 <= grad_clip < math.inf, "at least 0"),
        ("compile", compile, compile in COMPILE, "one of " + ", ".join(map(str, COMPILE))),
    ]
    problems = [
        f"{name} is {value}; it has to be {rule}." for name, value, ok, rule in rules if not ok
    ]
    if compile and norm_recompute:
        problems.append(
            "norm_recompute is for a model that is not compiled: with compile, the compiler "
            "chooses what is kept and what is made again. Turn one of them off."
        )
    return problems


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients down in place to a total L2 norm of at most `max_norm`, if above 0.

    Returns the norm before clipping, a scalar that stays on its device: nothing waits for it. Of
    gradients that are sharded over several devices it is the norm of the whole.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def lr_factor(step: int, warmup_steps: int, max_steps: int, min_ratio: float) -> float:
    """What multiplies the learning rate in step 0, 1, ...: linear warm-up, then half a cosine.

    Rises to 1 in step warmup_steps - 1 and falls to min_ratio in the last step, max_steps - 1.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps + 1) / max(1, max_steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return min_ratio + (1 - min_ratio) * cosine


def gathered_together(blocks: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Neighbouring blocks that FSDP2 gathers as one: of GATHERED parameters or more.

    There are two units at least, if there are two blocks, so that one can be gathered while the
    other computes.
    """
    sizes = {block: sum(p.numel() for p in block.parameters()) for block in blocks}
    enough = min(GATHERED, sum(sizes.values()) / 2)
    unit: list[nn.Module] = []
    for block in sizes:
        unit.append(block)
        if sum(sizes[member] for member in unit) >= enough:
            yield unit
            unit = []
    if unit:
        yield unit
