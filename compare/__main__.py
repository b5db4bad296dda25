"""Compare norms in the same model. See `python -m compare --help`."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while libraries load needs no traceback

import json
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compare import child, memory, parity, profile, report, scaling, sentences, speed
from compare.child import ChildError, Kept, Progress
from compare.cli import Request, parse
from compare.live import live
from compare.setup import SCOPES, Settings, norm_sources
from model import overview
from model.environment import environment
from model.errors import UserError
from model.files import InUse, create_run, newest_run, owned
from model.summary import NO_FINDING, write_json

FAILS, BAD_INPUT, INTERRUPTED = 1, 2, 130
RESULTS, SUMMARY, UNFINISHED = "results.json", "summary.json", "unfinished"
PARTS = (*sentences.PARTS, "scaling")
KEYS = ("name", "scope", "stream_dtype", "baseline", "norms", "config", "environment", "missing")
# Measurements of one folder come from the same code on the same hardware.
SAME = ("gpu", "driver", "cpu", "python", "torch", "triton", "git_revision", "norm_sources")


def main(argv: list[str] | None = None) -> int:
    """Compare; returns the exit status. Of several processes the first one does so."""
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        if scaling.rank() > 0:
            scaling.follow()
            return 0
        status = run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print("\n".join(f"error: {sentence}" for sentence in error.args), file=sys.stderr)
        status = BAD_INPUT
    except OSError as error:  # such as a full disk
        print(f"error: {error.filename or 'writing'}: {error.strerror or error}", file=sys.stderr)
        status = BAD_INPUT
    except SystemExit as end:  # argparse's, after --help and for a flag without its value
        status = end.code or 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status != INTERRUPTED:  # which all processes are at once
        scaling.dismiss()
    return status


def run(argv: list[str]) -> int:
    """Do what the command line says; returns the exit status.

    Raises:
        UserError: if it is wrong.
    """
    if argv and argv[0] == "report":
        if argv[1:] != ["--help"]:
            return rebuild(argv[1:])
        argv = ["--help"]
    request = parse(argv)
    with live("trying the norms") as progress:
        config = request.settings.config
        try:
            problems = child.call("compare.setup:norm_problems", config, progress)
        except ChildError as error:  # a norm that ended its process
            raise UserError(str(error)) from None
        if problems:
            raise UserError(*problems)
    command = shlex.join([*scaling.launcher(), "-m", "compare", *argv])
    with Comparison.open(request, command) as comparison:
        return compare(comparison)


def compare(comparison: "Comparison") -> int:
    """Run the parts asked for, one after the other; results and report are there in any case."""
    jobs, failed, interrupted = list(comparison.jobs()), False, False
    print(f"Results go to {comparison.folder}/")
    if again := comparison.measured_before():
        print(f"Measured again, in place of what is there: {', '.join(again)}.")
    if comparison.request.settings.device.type != "cuda":
        print(f"{NO_FINDING} Fewer rounds and shorter trainings run here.")
    try:
        for number, (scopes, part) in enumerate(jobs, start=1):
            title = f"{number}/{len(jobs)} {part}, {sentences.MODELS[scopes[0]]}"
            try:
                with live(title) as progress:
                    comparison.measure(scopes, part, progress)
            except ChildError as error:
                failed = True
                print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        interrupted = True
        print("Interrupted: what was measured is kept.")
    finally:
        comparison.write()
    for result in comparison.results.values():
        print(sentences.headline(result))
    if missing := sentences.missing(list(comparison.results.values())):
        print("\n".join(missing))
        print(
            "Parts by themselves, as in python -m compare speed,memory and the same options, join "
            "these results, and go on where they were cut off."
        )
    print(f"Written to {comparison.folder}/{report.HTML}")
    return INTERRUPTED if interrupted else FAILS if failed else comparison.status()


def rebuild(arguments: list[str]) -> int:
    """`report FOLDER`: the report anew from the results.json files in the folder and below it.

    `report RUN RUN ...`: runs of train.py side by side, in a table and in a picture beside them.
    """
    folders = [Path(argument) for argument in arguments]
    unfinished = [folder for folder in folders if not (folder / SUMMARY).is_file()]
    if folders and not unfinished:
        return overview.main([*arguments, "--out", str(folders[0].parent / "overview.png")])
    if len(folders) != 1:
        raise UserError(
            "report takes one folder of results, or the folders of finished runs of train.py"
            + "".join(f"; {folder} has no {SUMMARY}" for folder in unfinished)
            + "."
        )
    [folder] = folders
    results = [read(path) for path in result_files(folder)]
    if not results:
        raise UserError(f"There is no {RESULTS} in {folder} or below it.")
    try:
        report.write(results, folder)
    except ValueError as error:
        raise UserError(str(error)) from None
    print(f"Written to {folder}/{report.HTML}")
    return 0


@dataclass
class Comparison:
    """Results by scope, and where they are written after every part.

    Args:
        request: What was asked for.
        folder: Of the report; the results of one scope alone are there too, those of several in a
            folder a scope.
        results: By scope, each the contents of its results.json.
    """

    request: Request
    folder: Path
    results: dict[str, dict]

    @classmethod
    @contextmanager
    def open(cls, request: Request, command: str) -> Iterator["Comparison"]:
        """In a new folder, or for parts by name in the newest that has the same settings.

        Raises:
            UserError: if another process is at work in that folder.
        """
        name, about = f"compare-{request.settings.name}", environment()
        if sources := norm_sources(request.settings.norms):
            about["norm_sources"] = sources

        def continues(folder: Path) -> bool:
            found = list(map(read, result_files(folder)))
            return bool(found) and all(_continues(result, request, about) for result in found)

        folder = newest_run(request.root, name, continues) if request.joins else None
        folder = folder or create_run(request.root, name)
        try:
            with owned(folder):
                yield cls(request, folder, {})._begin(command, about)
        except InUse:
            raise UserError(
                f"Another comparison is at work in {folder}: wait for its end, or give this one "
                "another --name."
            ) from None

    def _begin(self, command: str, about: dict) -> "Comparison":
        """Read what is there, and note what will be measured."""
        request, results = self.request, self.results
        results |= {result["scope"]: result for result in map(read, result_files(self.folder))}
        for scope in request.scopes:
            settings = request.settings.with_scope(scope)
            result = results.setdefault(scope, empty_result(settings))
            result["environment"] = result.get("environment", {}) | about
            commands = [result.get("command"), command]
            result["command"] = "\n".join(dict.fromkeys(filter(None, commands)))
        for scopes, part in self.jobs():
            for result in (results[scope] for scope in scopes):
                result["missing"] += {part} - {*result["missing"], *result}
        return self

    def jobs(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Scopes and part, in order. Parity, which takes longest, is the same for all scopes."""
        for scope in self.request.scopes:
            there = [*sentences.parts(scope), "scaling"]
            asked = [part for part in self.request.parts if part in there and part != "parity"]
            yield from (((scope,), part) for part in asked)
        if "parity" in self.request.parts:
            yield self.request.scopes, "parity"

    def measured_before(self) -> list[str]:
        """Parts asked for that the folder has already; those of scaling are added to."""
        found = [part for scopes, part in self.jobs() if part in self.results[scopes[0]]]
        return [part for part in dict.fromkeys(found) if part != "scaling"]

    def measure(self, scopes: tuple[str, ...], part: str, progress: Progress) -> None:
        """Run one part in the first of the scopes and write what it found into all of them."""
        settings, before = self.request.settings.with_scope(scopes[0]), self.results[scopes[0]]
        found = run_part(
            settings, part, before, self.request, progress, self._kept(scopes[0], part)
        )
        clocks = found.pop("clocks", None)
        for scope in scopes:
            result = self.results[scope]
            result[part] = found
            if clocks:
                result["environment"]["clocks"] = clocks
            result["missing"] = [name for name in result["missing"] if name != part]
            result.get(UNFINISHED, {}).pop(part, None)
            if not result.get(UNFINISHED):
                result.pop(UNFINISHED, None)
            self._save(scope)

    def _kept(self, scope: str, part: str) -> Kept:
        """What was measured of a part before it was cut off; what is added is saved at once."""
        result = self.results[scope]
        begun = result.get(UNFINISHED, {}).get(part, {})

        def save() -> None:
            result.setdefault(UNFINISHED, {})[part] = begun
            self._save(scope)

        return Kept(begun, save)

    def write(self) -> None:
        """Write everything, however little there is, and the report over it."""
        for scope in self.results:
            self._save(scope)
        report.write(list(self.results.values()), self.folder)

    def _save(self, scope: str) -> None:
        path = self._path(scope)
        path.parent.mkdir(exist_ok=True)
        write_json(self.results[scope], path)

    def _path(self, scope: str) -> Path:
        alone = self.folder / RESULTS
        if len(self.results) == 1 or (alone.exists() and read(alone)["scope"] == scope):
            return alone
        return self.folder / scope / RESULTS

    def status(self) -> int:
        """Exit status: whether everything was measured and parity, if asked for, holds."""
        asked = [(self.results[scope], part) for scopes, part in self.jobs() for scope in scopes]
        if any(part not in result for result, part in asked):
            return FAILS
        verdicts = [result[part]["verdict"] for result, part in asked if part == "parity"]
        return 0 if all(verdict == "pass" for verdict in verdicts) else FAILS


def run_part(
    settings: Settings, part: str, result: dict, request: Request, progress: Progress, keep: Kept
) -> dict:
    """What goes under the part's name in results.json."""
    match part:
        case "speed":
            return speed.run(settings, progress, keep, speed.plan(settings, request.rounds))
        case "scaling":
            plan = speed.plan(settings, request.rounds)
            found = scaling.run(settings, progress, keep, plan, request.strategies)
            return {**result.get("scaling", {}), **found}
        case "profile":
            return profile.run(settings, progress)
        case "memory":
            return memory.run(settings, progress, keep)
        case "parity":
            return parity.run(settings, progress, keep)
    raise AssertionError(part)


def empty_result(settings: Settings) -> dict:
    """A results.json before anything was measured."""
    return {
        "name": settings.name,
        "scope": settings.scope,
        "stream_dtype": settings.model["stream_dtype"],
        "baseline": settings.baseline,
        "norms": list(settings.norms),
        "config": settings.config,
        "missing": [],
        "cpu": settings.device.type != "cuda",
    }


def _continues(result: dict, request: Request, about: dict) -> bool:
    """Whether a result was measured with these settings, code and hardware."""
    same = all(result["environment"].get(key) == about.get(key) for key in SAME)
    return same and result["config"] == request.settings.with_scope(result["scope"]).config


def result_files(folder: Path | None) -> list[Path]:
    return sorted(folder.rglob(RESULTS)) if folder else []


def read(path: Path) -> dict:
    """The contents of a results.json.

    Raises:
        UserError: if it is none.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(result, dict) or not {*KEYS} <= result.keys():
        raise UserError(f"{path} is no result of a comparison: it lacks some of {', '.join(KEYS)}.")
    tables = [key for key in ("environment", "config", *PARTS, UNFINISHED) if key in result]
    if damaged := [key for key in tables if not isinstance(result[key], dict)]:
        raise UserError(f"{path} is damaged: {', '.join(damaged)} should be a table.")
    if not all(isinstance(found, dict) for found in result.get(UNFINISHED, {}).values()):
        raise UserError(f"{path} is damaged: {UNFINISHED} should hold a table for each part.")
    for key in ("missing", "norms"):
        if not isinstance(result[key], list) or not all(isinstance(v, str) for v in result[key]):
            raise UserError(f"{path} is damaged: {key} should be a list of names.")
    for key, known in (("scope", SCOPES), ("baseline", result["norms"])):
        if result[key] not in [*known]:
            raise UserError(f"{path} is damaged: {key} should be one of {', '.join(known)}.")
    return result


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
