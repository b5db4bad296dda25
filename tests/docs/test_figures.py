"""The tables of README.md and docs/kernel.md are those of results/ and kernels/tuned/."""

import pytest

from tests.docs.figures import TABLES, cells, lines_of


@pytest.mark.parametrize(
    ("page", "header"), TABLES, ids=lambda value: getattr(value, "name", value)
)
def test_table_is_that_of_the_results(page, header):
    shown = cells(lines_of(page, header))
    assert shown == TABLES[page, header](shown)
