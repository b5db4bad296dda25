"""NORMS, the one table of norms that model, tests, comparison and benchmark read."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Norm:
    """One implementation: two functions with the signatures of `kernels.rms_norm` and
    `kernels.add_rms_norm`, both differentiable.

    `add_is_exact` says that y, h = add_rms_norm(x, residual) implies y = rms_norm(h) bit for bit,
    h being in another dtype than x or not (float64 aside). Without it that is not relied upon.
    """

    name: str
    rms_norm: Callable
    add_rms_norm: Callable
    add_is_exact: bool = False


@dataclass(frozen=True)
class Entry:
    """Where a norm lives, and the package it needs that this project does not install."""

    target: str
    about: str
    package: str | None = None
    install: str | None = None

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


NORMS = {
    "eager": Entry("kernels.reference:norm", "the definition in plain PyTorch, op by op"),
    "compiled": Entry("kernels.compiled:make", "the definition through torch.compile (Inductor)"),
    "triton": Entry("kernels.functional:norm", "this project's fused Triton kernels"),
    "aten": Entry("kernels.peers:aten", "torch.nn.functional.rms_norm"),
    "liger": Entry(
        "kernels.peers:liger",
        "Liger-Kernel's Triton kernels",
        package="liger_kernel",
        install="pip install liger-kernel",
    ),
    "quack": Entry(
        "kernels.peers:quack",
        "QuACK's CuTe-DSL kernels",
        package="quack",
        install="pip install quack-kernels",
    ),
}


def load_norm(name: str) -> Norm:
    """The norm called `name`: a key of NORMS, or "package.module:name" for one of your own.

    What "package.module:name" names is a `Norm`, or a function without arguments that returns one.

    Raises:
        ValueError: if the name is unknown, its package is not installed, or what it names is not
            a norm; the message says which names there are.
    """
    if not isinstance(name, str):
        raise ValueError(f"norm must be a name, but it is a {type(name).__name__}")
    if name in NORMS:
        entry = NORMS[name]
        if not entry.installed:
            raise ValueError(
                f"norm {name!r} needs the package {entry.package!r}, which is not installed: "
                f"{entry.install}"
            )
        return _load(name, entry.target)
    if ":" in name:
        return _load(name, name)
    known = ", ".join(
        key if entry.installed else f"{key} (not installed)" for key, entry in NORMS.items()
    )
    raise ValueError(f"unknown norm {name!r}; there are: {known}, or package.module:name")


def _load(name: str, target: str) -> Norm:
    module_name, _, attribute = target.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ValueError(f"norm {name!r} is not of the form package.module:name")
    try:
        norm = getattr(importlib.import_module(module_name), attribute)
        if not isinstance(norm, Norm) and callable(norm):
            norm = norm()
    except ValueError:
        raise  # a norm's own sentence about what it misses
    except Exception as error:  # somebody else's module may raise anything
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"norm {name!r} cannot be loaded: {what}") from error
    if not isinstance(norm, Norm):
        raise ValueError(
            f"norm {name!r} must name a kernels.Norm or a function without arguments that returns "
            f"one, but it names a {type(norm).__name__}"
        )
    return dataclasses.replace(norm, name=name)
