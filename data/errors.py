"""The one exception this package raises for what a user can put right."""


class DataError(ValueError):
    """Bad data, or a bad data option; the message is one or more sentences for the user."""
