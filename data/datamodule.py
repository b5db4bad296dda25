"""The LightningDataModule: text in, batches of token ids out."""

from pathlib import Path

import lightning
import tiktoken
import torch

from .batches import OrderedBlocks, ShuffledBlocks, TrainBatches, ValidationBatches, stack
from .cache import TokenCache, default_cache_dir, prepare_tokens
from .errors import DataError
from .sources import DEFAULT_SOURCE, find_source
from .tokenizer import load_tokenizer


class TextDataModule(lightning.LightningDataModule):
    """Batches of int64 token ids, (batch_size, context + 1), from a text source.

    Inputs are `batch[:, :-1]`, targets `batch[:, 1:]`. A batch is copied straight out of a memory
    map, so there are no workers and no DataLoader. Training batches never end: the trainer needs
    `max_steps`, and an integer `val_check_interval` with `check_val_every_n_epoch=None`.

    The batch of micro-step k (one batch a rank; `accumulate_grad_batches` of them make a step of
    the optimizer) is a pure function of the data, `seed`, k, the rank and the number of ranks:
    validation runs, checkpoints and restarts do not change it. Ranks share out consecutive blocks,
    so all ranks together see the same data for any number of ranks if `batch_size` times that
    number stays the same.

    Args:
        source: the text: kjv, tinystories, wikitext-103, fineweb-edu, or the path of a .txt,
            .jsonl, .json or .parquet file or of a folder of such files. Only kjv and paths work
            without network.
        tokenizer: gpt2, bytes (these two work without network), or another of tiktoken's names.
        context: tokens a model sees at once.
        batch_size: blocks a batch, on each rank.
        val_batches: batches of a validation run, on each rank; fewer if the data has fewer.
        seed: of the order of the training data; >= 0.
        cache_dir: where token files are kept; by default triton-rmsnorm-gpt in $XDG_CACHE_HOME
            or ~/.cache.
        text_column: the column that holds the text; by default "text".
        num_proc: processes that tokenise; by default one a core.

    Raises:
        DataError: on construction, for all wrong arguments at once (a line each); in
            `prepare_data` and `setup`, for data that cannot be fetched or read, holds no text, or
            has a split shorter than a block or fewer training blocks than `batch_size`, and for a
            cache folder that cannot be written.
    """

    def __init__(
        self,
        source: str = DEFAULT_SOURCE,
        tokenizer: str = "gpt2",
        context: int = 256,
        batch_size: int = 16,
        val_batches: int = 20,
        seed: int = 1337,
        cache_dir: str | None = None,
        text_column: str | None = None,
        num_proc: int | None = None,
    ) -> None:
        super().__init__()
        problems = [
            f"{name} is {value}; it must be at least {least}."
            for name, value, least in (
                ("context", context, 1),
                ("batch_size", batch_size, 1),
                ("val_batches", val_batches, 1),
                ("seed", seed, 0),
                ("num_proc", 1 if num_proc is None else num_proc, 1),
            )
            if value < least
        ]
        try:
            self.source = find_source(source)
        except DataError as error:
            problems.append(str(error))
        try:
            self.tokenizer: tiktoken.Encoding = load_tokenizer(tokenizer)
        except DataError as error:
            problems.append(str(error))
        if problems:
            raise DataError("\n".join(problems))
        self.context = context
        self.batch_size = batch_size
        self.val_batches = val_batches
        self.seed = seed
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
        self.text_column = text_column
        self.num_proc = num_proc
        self.tokens: TokenCache | None = None

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer, the end of text included."""
        return self.tokenizer.n_vocab

    def prepare_data(self) -> None:
        """Fetches and tokenises the text, unless its tokens are cached."""
        if self.tokens is None:
            self.tokens = prepare_tokens(
                self.source, self.tokenizer, self.cache_dir, self.text_column, self.num_proc
            )

    def setup(self, stage: str | None = None) -> None:
        """Opens the token files; after `prepare_data` in another process this is quick."""
        self.prepare_data()
        for split, tokens in (("train", self.tokens.train), ("validation", self.tokens.validation)):
            if len(tokens) < self.context + 1:
                raise DataError(
                    f"The {split} split has {len(tokens)} tokens; a context of {self.context} "
                    f"needs at least {self.context + 1}."
                )
        self._train_blocks = ShuffledBlocks(self.tokens.train, self.context, self.seed)
        if self.batch_size > (blocks := self._train_blocks.per_epoch):
            raise DataError(
                f"batch_size is {self.batch_size}, but the train split has {blocks} blocks of "
                f"{self.context} tokens: set batch_size to at most {blocks}, or context lower."
            )
        self._val_blocks = OrderedBlocks(self.tokens.validation, self.context)

    def train_batch(self, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
        """The training batch of micro-step `step` >= 0: int64, (batch_size, context + 1)."""
        first = (step * world_size + rank) * self.batch_size
        return stack(self._train_blocks, range(first, first + self.batch_size))

    def train_dataloader(self) -> TrainBatches:
        """Endless training batches, from the first that this training has not yet processed."""
        rank, world_size = self._place()
        return TrainBatches(
            lambda step: self.train_batch(step, rank, world_size), self._steps_processed
        )

    def val_dataloader(self) -> ValidationBatches:
        """The validation batches, the same every time."""
        rank, world_size = self._place()
        if len(self._val_blocks) < world_size:
            raise DataError(
                f"The validation split has {len(self._val_blocks)} blocks of {self.context} "
                f"tokens, fewer than the {world_size} ranks."
            )
        return ValidationBatches(
            self._val_blocks, self.val_batches, self.batch_size, rank, world_size
        )

    def _place(self) -> tuple[int, int]:
        """This rank and the number of ranks."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _steps_processed(self) -> int:
        """Micro-steps behind us, which Lightning counts and keeps in its checkpoints.

        Those processed, not those fetched: Lightning fetches a batch ahead.
        """
        if self.trainer is None:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
