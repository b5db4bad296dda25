"""The one exception this package raises for what a user can put right, and a look at causes."""

from collections.abc import Iterator


class DataError(ValueError):
    """Bad data, or a bad data option; the message is one or more sentences for the user."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and, one after another, the errors that it was raised from or while handling."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
