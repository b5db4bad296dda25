"""Each fault once or a few times; `python -m tests.faults` tries them more often.

Signals are in tests/test_train.py.
"""

import pytest

from tests.faults import trials as faults
from tests.faults.processes import Trials


@pytest.fixture(scope="module")
def trials(tmp_path_factory) -> Trials:
    return Trials(tmp_path_factory.mktemp("faults"), may_mount=False)


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (faults.killed_while_training, 2),
        (faults.killed_while_saving, 3),
        (faults.killed_while_caching, 2),
        (faults.full_disk, 1),
        (faults.read_only_folder, 1),
        (faults.damaged_checkpoint, 1),
        (faults.foreign_code, 1),
        (faults.same_second, 1),
        (faults.not_finite, 1),
        (faults.out_of_memory, 1),
        (faults.changed_settings, 1),
    ],
)
def test_nothing_is_lost_by(fault, times, trials):
    outcome = fault(trials, times)
    assert outcome.tried >= times
    assert outcome.lost == []
