"""The LightningDataModule: text in, batches of token ids out."""

import lightning
import tiktoken
import torch

from .batches import (
    MixedBlocks,
    OrderedBlocks,
    ShuffledBlocks,
    TrainBatches,
    ValidationBatches,
    stack,
)
from .cache import TokenCache, prepare_tokens
from .errors import DataError
from .folders import cache_folder
from .sources import DEFAULT_SOURCE, SOURCES, LocalFiles, Part, find_parts
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
        source: the text: kjv, tinystories, wikitext-103, fineweb-edu; another data set of the
            Hugging Face hub as owner/name or owner/name:config:split:column; the path of a .txt,
            .jsonl or .json file (also .gz or .zst), a .parquet or .arrow file, or of a folder of
            such files; or several with weights, as in kjv=0.7,my.txt=0.3, of which each fills
            that share of the blocks. Only kjv and paths work without network the first time.
        tokenizer: gpt2, bytes (these two work without network), or another of tiktoken's names.
        context: tokens a model sees at once.
        batch_size: blocks a batch, on each rank.
        val_batches: batches of a validation run, on each rank; fewer if the data has fewer.
        seed: of the order of the training data; >= 0.
        cache_dir: where token files are kept; by default triton-rmsnorm-gpt in $XDG_CACHE_HOME
            or ~/.cache.
        text_column: the column that holds the text; by default "text".
        num_proc: processes that tokenise; by default one a core.
        max_tokens: tokens of a split at most, of each source; documents are taken in order until
            then and no more is read, or downloaded. By default all.

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
        max_tokens: int | None = None,
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
                ("max_tokens", 2 if max_tokens is None else max_tokens, 2),
            )
            if value < least
        ]
        try:
            self.parts = find_parts(source)
            problems += _shares_too_small(self.parts)
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
        self.cache_dir = cache_folder(cache_dir)
        self.text_column = text_column
        self.num_proc = num_proc
        self.max_tokens = max_tokens
        self.caches: list[TokenCache] = []

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer, the end of text included."""
        return self.tokenizer.n_vocab

    @property
    def is_own_files(self) -> bool:
        """Whether all text is in local files other than ours: read soon, and wrong perhaps."""
        return all(
            isinstance(part.source, LocalFiles) and part.name not in SOURCES for part in self.parts
        )

    def prepare_data(self) -> None:
        """Fetches and tokenises the text, unless its tokens are cached."""
        if not self.caches:
            self.caches = [
                prepare_tokens(
                    part.source,
                    self.tokenizer,
                    self.cache_dir,
                    self.text_column,
                    self.num_proc,
                    self.max_tokens,
                )
                for part in self.parts
            ]

    def setup(self, stage: str | None = None) -> None:
        """Opens the token files; after `prepare_data` in another process this is quick."""
        self.prepare_data()
        train, validation = [], []
        for part, cache in zip(self.parts, self.caches, strict=True):
            whose = f" of {part.name}" if len(self.parts) > 1 else ""
            for split, tokens in (("train", cache.train), ("validation", cache.validation)):
                if len(tokens) < self.context + 1:
                    raise DataError(
                        f"The {split} split{whose} has {len(tokens)} tokens; a context of "
                        f"{self.context} needs at least {self.context + 1}."
                    )
            train.append(ShuffledBlocks(cache.train, self.context, self.seed))
            validation.append(OrderedBlocks(cache.validation, self.context))
            if self.batch_size * part.share > (blocks := train[-1].per_epoch):
                most = max(1, int(blocks / part.share))
                raise DataError(
                    f"batch_size is {self.batch_size}, but the train split{whose} has {blocks} "
                    f"blocks of {self.context} tokens: set batch_size to at most {most}, or "
                    f"context lower."
                )
        if len(self.parts) == 1:
            (self._train_blocks,), (self._val_blocks,) = train, validation
        else:
            shares = [part.share for part in self.parts]
            self._train_blocks = MixedBlocks(train, shares, self.seed)
            self._val_blocks = MixedBlocks(validation, shares, seed=0)  # the same for any order

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


def _shares_too_small(parts: list[Part]) -> list[str]:
    quotas = MixedBlocks.quotas_of([part.share for part in parts])
    return [
        f"The share of {part.name} is {part.share:.3g}; it must be at least one block in "
        f"{MixedBlocks.PERIOD}."
        for part, quota in zip(parts, quotas, strict=True)
        if quota == 0
    ]
