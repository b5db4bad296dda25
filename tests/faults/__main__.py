"""`python -m tests.faults [--times N]`: tries every fault and prints what became of the runs."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults import trials as faults
from tests.faults.processes import Trials


def main() -> int:
    """Print the table; returns 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--times", type=int, default=50, help="kills of each kind (default: 50); a tenth of others"
    )
    times = parser.parse_args().times
    tenth = max(1, times // 10)
    print("| fault | tried | lost | what is said, or left |\n| --- | --- | --- | --- |", flush=True)
    lost = []
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        for attempt in (
            lambda: faults.killed_while_training(trials, times),
            lambda: faults.killed_while_saving(trials, times),
            lambda: faults.killed_while_caching(trials, times),
            lambda: faults.full_disk(trials, tenth),
            lambda: faults.read_only_folder(trials, tenth),
            lambda: faults.damaged_checkpoint(trials, tenth),
            lambda: faults.foreign_code(trials, tenth),
            lambda: faults.same_second(trials, tenth),
            lambda: faults.signalled(trials, tenth, signal.SIGINT, twice=False),
            lambda: faults.signalled(trials, tenth, signal.SIGINT, twice=True),
            lambda: faults.signalled(trials, tenth, signal.SIGTERM, twice=False),
            lambda: faults.signalled(trials, tenth, signal.SIGTERM, twice=True),
            lambda: faults.not_finite(trials, tenth),
            lambda: faults.out_of_memory(trials, tenth),
            lambda: faults.changed_settings(trials, tenth),
        ):
            outcome = attempt()
            cells = (outcome.fault, outcome.tried, len(outcome.lost), outcome.message)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            lost += [f"{outcome.fault}: {text}" for text in outcome.lost]
    print("\n".join(["", *lost]), file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
