"""A function as a command: what sample and export have in common."""

import inspect
import sys
from collections.abc import Callable

from jsonargparse import ArgumentError, ArgumentParser

from model.checks import sentence
from model.errors import UserError


def command(function: Callable[..., None], prog: str, argv: list[str] | None = None) -> int:
    """Call `function` with flags from the command line, its docstring being their help.

    Returns the exit status: 0, 2 for bad input, told in sentences, 130 after Ctrl-C.
    """
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        allow_abbrev=False,
        description=inspect.getdoc(function).split("\n\nArgs:")[0],
    )
    parser.add_function_arguments(function)
    try:
        function(**parser.parse_args(argv).as_dict())
    except (ArgumentError, UserError, OSError) as error:
        sentences = error.args if isinstance(error, UserError) else [sentence(error)]
        print("\n".join(f"error: {text}" for text in sentences), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
