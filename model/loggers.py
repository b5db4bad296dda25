"""Where logged metrics go: metrics.csv and TensorBoard events in the run's directory."""

import csv
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from model.errors import UserError
from model.files import replacing

SECONDS_BETWEEN_WRITES = 10  # of metrics.csv


class MetricsFile(Logger):
    """A CSV file with one row a logged step: training and validation metrics side by side.

    Lightning's CSVLogger gives them a row each, and starts an existing file anew.

    Attributes:
        rows: Metrics by step.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """With `resume_step`, the rows up to that step are kept from the file.

        Raises:
            UserError: if that cannot be read.
        """
        super().__init__()
        self.path = path
        self.rows: dict[int, dict[str, float]] = {}
        self._last_write = time.monotonic()
        if resume_step is not None and path.exists():
            try:
                rows = read_metrics(path)
            except (OSError, ValueError) as error:
                raise UserError(f"{error}. Without that file, training goes on.") from None
            self.rows = {step: row for step, row in rows.items() if step <= resume_step}

    name = version = None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def save(self) -> None:
        if time.monotonic() - self._last_write > SECONDS_BETWEEN_WRITES:
            self.write()

    def finalize(self, status: str) -> None:
        self.write()

    @rank_zero_only
    def write(self) -> None:
        """Write the file now; `save` does so every few seconds at most."""
        self._last_write = time.monotonic()
        columns = dict.fromkeys(key for row in self.rows.values() for key in row)
        with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", *columns])
            writer.writeheader()
            writer.writerows({"step": step, **row} for step, row in sorted(self.rows.items()))


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """The rows of a metrics.csv by step, without the cells that are empty.

    Raises:
        OSError, ValueError: if it cannot be read, or is something else.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if "step" not in (reader.fieldnames or []):
                raise ValueError
            return {
                int(row.pop("step")): {key: float(value) for key, value in row.items() if value}
                for row in reader
            }
    except (ValueError, TypeError, csv.Error):
        raise ValueError(f"{path} is not what train.py writes") from None


class EventsFile(TensorBoardLogger):
    """TensorBoard events straight in the run's directory, whose config.yaml is already there."""

    NAME_HPARAMS_FILE = "config.yaml"

    def __init__(self, run: Path, resume_step: int | None = None) -> None:
        purge = {} if resume_step is None else {"purge_step": resume_step + 1}
        super().__init__(run, name="", version="", default_hp_metric=False, **purge)
