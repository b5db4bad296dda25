"""Errors that a user is told in sentences."""


class UserError(Exception):
    """Sentences, one an argument, that tell a user what to change."""


class TrainingError(Exception):
    """Sentences, one an argument: what ended the training, and what to do about it."""
