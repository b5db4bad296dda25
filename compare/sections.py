"""What stands on the report's page: sections of sentences, figures and tables, made of results."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from matplotlib.figure import Figure as Drawing

from compare import plots, sentences
from compare.sentences import setup, times

NOT_AVAILABLE = "n/a"
CASES_SHOWN = 8
LONGEST = 12  # kernels of a step that are shown beside those of the norm

Plot = Callable[[dict, dict[str, str]], Drawing]  # of a result and the norms' colours


@dataclass(frozen=True)
class Table:
    """Rows of text cells, of which the first `labels` columns name the row.

    `fold` names a table that opens on demand; `prose` cells are sentences rather than numbers.
    """

    header: list[str]
    rows: list[list[str]]
    labels: int = 1
    fold: str = ""
    prose: bool = False


@dataclass(frozen=True)
class Figure:
    """A picture that is drawn from a result: its PNG's file name and its caption."""

    name: str
    plot: Plot
    result: dict = field(repr=False)
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading of level 2 or 3."""

    title: str
    level: int = 3
    sentences: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    code: str = ""


def sections(results: list[dict]) -> list[Section]:
    """The page below its headlines: each scope, then parity, the environment, how to reproduce."""
    page = []
    for result in results:
        page += _scope(result)
    checked = {(r["name"], r["stream_dtype"]): r for r in results if r.get("parity")}
    for result in checked.values():  # the scopes have it in common
        page += _parity(result)
    if not checked:
        page.append(_not_measured("Loss curves", level=2))
    return [*page, _environment(results), _reproduce(results)]


def _scope(result: dict) -> list[Section]:
    """The figures of a scope side by side, then the tables of each part."""
    where = setup(result)
    speed = f"Step times and speedups, {where}. Grey: what a copy of {result['baseline']} gets."
    profile = f"What the norm's kernels take of a step, {where}."
    memory = f"Peak memory over whole steps, {where}."
    parts = {
        "speed": ("Step time", _speed, plots.step_times, speed),
        "profile": ("Where the time goes", _profile, plots.time_parts, profile),
        "memory": ("Memory", _memory, plots.memory, memory),
    }
    figures, details = [], []
    for part, (title, section, plot, caption) in parts.items():
        if part not in sentences.parts(result["scope"]):
            details.append(Section(title, sentences=[sentences.NOT_WITH_GRAPHS[part]]))
            continue
        if not result.get(part):
            details.append(_not_measured(title))
            continue
        details.append(section(result))
        if part != "memory" or not result["cpu"]:  # a CPU has no peaks
            figures.append(_figure(part, plot, result, caption))
    details += [_scaling(result, found) for found in result.get("scaling", {}).values()]
    return [Section(_heading(where), 2, figures=figures), *details]


def _heading(where: str) -> str:
    return where if ":" in where else where[0].upper() + where[1:]


def overview(results: list[dict]) -> Table:
    """The headline table: a line a scope and norm."""
    baselines = sentences.enumeration(list(dict.fromkeys(r["baseline"] for r in results)))
    header = ["model", "norm", "ms a step", f"speedup over {baselines}, 95% interval"]
    header += ["tokens/s", "peak memory, GiB"]
    rows = [
        [setup(result), *_overview_cells(result, norm)]
        for result in results
        for norm in result["norms"]
    ]
    return Table(header, rows, labels=2)


def _overview_cells(result: dict, norm: str) -> list[str]:
    variant = result.get("speed", {}).get("variants", {}).get(norm, {})
    memory = result.get("memory", {}).get(norm, {})
    return [
        norm,
        number(variant.get("step_ms", {}).get("p50"), ".2f"),
        _speedup(result, norm),
        number(variant.get("tokens_per_s"), ",.0f"),
        number(memory.get("peak_allocated_gib"), ".2f"),
    ]


# --- speed and profile ------------------------------------------------------------------------


def _speed(result: dict) -> Section:
    speed, baseline = result["speed"], result["baseline"]
    variants, aa = speed["variants"], speed["aa"]
    text = [
        f"{speed['rounds']} rounds in each process; in every round each norm runs "
        f"{speed['block_steps']} steps, in shuffled order. A second copy of {baseline} against "
        f"{baseline} itself, the A/A arm, comes out at [{aa['low']:.3f}, {aa['high']:.3f}]."
    ]
    text += filter(None, (sentences.pace(result), sentences.held_back(result)))
    if result["scope"] == "graphs":
        text.append(
            "The graphs are recorded in the second step: the first call's seconds are without that."
        )
    tables = [Table(_SPEED_HEADER, [_speed_row(result, norm) for norm in variants])]
    if len(variants) > 2:
        tables.append(_pairs(variants))
    return Section("Step time", sentences=text, tables=tables)


_SPEED_HEADER = [
    *("norm", "p10, ms", "p50, ms", "p90, ms", "speedup, 95% interval", "finding"),
    *("medians of processes", "tokens/s", "first call cold, s", "warm, s", "host, us a step"),
]


def _speed_row(result: dict, norm: str) -> list[str]:
    variant = result["speed"]["variants"][norm]
    medians = [process["median"] for process in variant.get("processes", [])]
    return [
        norm,
        *(number(variant["step_ms"][p], ".2f") for p in ("p10", "p50", "p90")),
        _speedup(result, norm),
        _finding(result, norm),
        f"{min(medians):.3f} to {max(medians):.3f}" if medians else "",
        number(variant["tokens_per_s"], ",.0f"),
        *(number(variant["first_call_s"][cache], ".2f") for cache in ("cold", "warm")),
        number(variant["host_us"], ",.0f"),
    ]


def _speedup(result: dict, norm: str) -> str:
    speedup = result.get("speed", {}).get("variants", {}).get(norm, {}).get("speedup")
    if norm == result["baseline"]:
        return "baseline"
    return times(speedup) if speedup else NOT_AVAILABLE


def _finding(result: dict, norm: str) -> str:
    speed = result["speed"]
    speedup = speed["variants"][norm].get("speedup")
    if norm == result["baseline"] or not speedup:
        return ""
    return "none on a CPU" if result["cpu"] else sentences.verdict(speedup, speed["aa"])


def _pairs(variants: dict[str, dict]) -> Table:
    """Every norm's speedup over every other one."""
    rows = [
        [norm, *(times(s[other]) if other in s else "" for other in variants)]
        for norm, s in ((n, sentences.speedups(variant)) for n, variant in variants.items())
        if s
    ]
    return Table(["norm", *(f"over {norm}" for norm in variants)], rows)


def _scaling(result: dict, found: dict) -> Section:
    """What several devices do, of one entry of "scaling"."""
    devices, batch = found["devices"], found["batch_per_device"]
    text = [
        f"Each device has a batch of {batch} sequences of its own, also the one that runs alone, "
        f"beforehand (weak scaling). {found['rounds']} rounds in one process a device; in every "
        f"round each norm runs {found['block_steps']} steps, in shuffled order."
    ]
    if result["scope"] == "compiled":
        text.append(_COMPILED_ON_SEVERAL[found["strategy"]])
    header = ["norm", "one device, ms", "tokens/s", "fastest rank, ms", "slowest rank, ms"]
    header += ["slowest rank", f"tokens/s of {devices}", "efficiency, 95% interval"]
    rows = [_scaling_row(norm, variant) for norm, variant in found["variants"].items()]
    title = f"{devices} devices, {found['strategy']}"
    return Section(title, sentences=text, tables=[Table(header, rows)])


_COMPILED_ON_SEVERAL = {
    "ddp": "torch.compile splits the model's graph where gradients are exchanged (ddp); that of "
    "the device that runs alone is whole.",
    "fsdp": "Each block is compiled by itself, as are output and loss (fsdp); the model of the "
    "device that runs alone is one graph.",
}


def _scaling_row(norm: str, variant: dict) -> list[str]:
    efficiency = variant["efficiency"]
    median, low, high = (number(efficiency[key], ".1%") for key in ("median", "low", "high"))
    return [
        norm,
        number(variant["one"]["step_ms"], ".2f"),
        number(variant["one"]["tokens_per_s"], ",.0f"),
        number(min(variant["rank_ms"]), ".2f"),
        number(variant["step_ms"], ".2f"),
        str(variant["slowest_rank"]),
        number(variant["tokens_per_s"], ",.0f"),
        f"{median} [{low}, {high}]",
    ]


def _profile(result: dict) -> Section:
    profile = result["profile"]
    text = [
        f"{norm}: {remark}"
        for norm, found in profile.items()
        for remark in (sentences.above_ceiling(result, norm), found.get("note"))
        if remark
    ]
    header = ["norm", "norm's share of the step", "forward, ms", "backward, ms", "step, ms"]
    header += ["GPU busy", "Amdahl predicts", "Amdahl's ceiling", "measured speedup"]
    kernels = [_kernels(norm, found["top"]) for norm, found in profile.items() if found["top"]]
    rows = [_profile_row(result, norm) for norm in profile]
    return Section("Where the time goes", sentences=text, tables=[Table(header, rows), *kernels])


def _profile_row(result: dict, norm: str) -> list[str]:
    found = result["profile"][norm]
    busy = result.get("speed", {}).get("variants", {}).get(norm, {}).get("busy")
    return [
        norm,
        number(found["norm_share"], ".1%"),
        *(number(found[part], ".2f") for part in ("forward_ms", "backward_ms", "step_ms")),
        number(busy, ".1%"),
        *(number(found[part], ".3f") for part in ("amdahl_predicted", "amdahl_ceiling")),
        _speedup(result, norm),
    ]


def _kernels(norm: str, top: list[dict]) -> Table:
    listed = top[:LONGEST] + [kernel for kernel in top[LONGEST:] if kernel["norm"]]
    rows = [[k["kernel"], f"{k['ms']:.3f}", "yes" if k["norm"] else ""] for k in listed]
    header = ["kernel", "ms", "part of the norm"]
    return Table(
        header, rows, fold=f"Longest kernels of a step with {norm}, and all of the norm", prose=True
    )


# --- memory -----------------------------------------------------------------------------------


def _memory(result: dict) -> Section:
    memory = result["memory"]
    text = [
        f"{norm}: a second process measured another peak; take its figures as approximate."
        for norm, found in memory.items()
        if found["repeat_equal"] is False
    ]
    text += [
        f"{norm}, largest batch: {found['largest_batch_note']}"
        for norm, found in memory.items()
        if "largest_batch_note" in found
    ]
    header = ["norm", "peak allocated, GiB", "peak reserved, GiB"]
    header += [f"less than {result['baseline']}, GiB", "saved for backward by a norm, MiB"]
    header += ["largest batch", "retries"]
    rows = [_memory_row(result, norm) for norm in memory]
    return Section("Memory", sentences=text, tables=[Table(header, rows)])


def _memory_row(result: dict, norm: str) -> list[str]:
    found, baseline = result["memory"][norm], result["memory"][result["baseline"]]
    peak, saved = found["peak_allocated_gib"], found["saved_bytes_per_norm"]
    return [
        norm,
        number(peak, ".2f"),
        number(found["peak_reserved_gib"], ".2f"),
        number(peak and baseline["peak_allocated_gib"] - peak, ".2f"),
        number(saved / 2**20, ".2f"),
        number(found["largest_batch"], ",d"),
        number(found["retries"], "d"),
    ]


# --- parity -----------------------------------------------------------------------------------


def _parity(result: dict) -> list[Section]:
    """What was found in the eager model; it is the same for all scopes."""
    parity = result["parity"]
    candidate, reference = parity["candidate"], parity["reference"]
    where = setup(result | {"scope": "eager"})
    caption = (
        f"{candidate} against {reference}, {where}. The grey band spans the null runs of "
        "all seeds: the noise that the order of summation alone makes."
    )
    tiers = Table(["tier", "found", "verdict"], _tier_rows(parity["tiers"]), prose=True)
    return [
        Section(
            f"Loss curves: {candidate} against {reference}",
            level=2,
            sentences=[f"{_heading(where)}: {sentences.parity(parity)}."],
            figures=[_figure("losses", plots.losses, result, caption)],
            tables=[tiers, *_closest(parity["tiers"]), _norms(parity["norms"])],
        ),
        _controls(parity["controls"]),
    ]


def _tier_rows(tiers: dict) -> list[list[str]]:
    training, final = tiers["training"], tiers["training"]["final_difference"]
    rows = [
        [sentences.TIERS[name], tiers[name]["detail"], tiers[name]["verdict"]]
        for name in ("op", "float32")
    ]
    rms, null, ratio = (number(training[k], ".3g") for k in ("rms_difference", "rms_null", "ratio"))
    largest, resolution = training["largest_null"], training["resolution"]
    yardstick = f"the largest null run's {number(largest, '.3g')}"
    if _known(largest) and largest < resolution:
        yardstick = f"float32's resolution of a loss, {resolution:.3g}, below which null runs stay"
    mean, low, high = (number(final[end], ".3g") for end in ("mean", "low", "high"))
    curves = (
        f"{training['steps']} steps, {len(training['seeds'])} seeds: smoothed losses {rms} apart "
        f"(RMS), null runs {null}; it is {ratio} times {yardstick}; {training['limit']} are "
        "allowed."
    )
    end = (
        f"Final validation losses {mean} [{low}, {high}] apart; the interval has to lie within "
        f"+/-{number(training['margin'], '.3g')}."
    )
    name, verdicts = sentences.TIERS["training"], training["verdicts"]
    rows.append([f"{name}: curves", curves, verdicts["curves"]])
    return [*rows, [f"{name}: end", end, verdicts["end"]]]


def _closest(tiers: dict) -> list[Table]:
    """The cases of the op and float32 tiers that come closest to their limit."""
    return [
        Table(
            ["case", "error", "limit"],
            [
                [case["case"], number(case["error"], ".2e"), number(case["limit"], ".2e")]
                for case in sorted(tiers[name]["cases"], key=_of_limit, reverse=True)[:CASES_SHOWN]
            ],
            fold=f"Cases closest to their limit: {sentences.TIERS[name]}",
            prose=True,
        )
        for name in ("op", "float32")
    ]


def _of_limit(case: dict) -> float:
    """Error over limit; infinite for an error that is not a number."""
    return case["error"] / case["limit"] if _known(case["error"]) else math.inf


def _norms(norms: dict) -> Table:
    """The tiers that every norm went through."""
    names = ("op", "float32")
    rows = [
        [norm, *(f"{tiers[name]['verdict']}: {tiers[name]['detail']}" for name in names)]
        for norm, tiers in norms.items()
    ]
    header = ["norm", *(sentences.TIERS[name] for name in names)]
    return Table(
        header, rows, fold="Every norm in the tiers that take no long training", prose=True
    )


def _controls(controls: dict) -> Section:
    rows = [
        [fault, "yes" if found["caught"] else "NO", _caught_by(found), found["detail"]]
        for fault, found in controls.items()
    ]
    return Section(
        "Is the check itself any good?",
        sentences=["Norms with a known fault went through the same check; each must be caught."],
        tables=[Table(["fault", "caught", "by", "how"], rows, prose=True)],
    )


def _caught_by(found: dict) -> str:
    tiers = [sentences.TIERS[name] for name, verdict in found["tiers"].items() if verdict == "fail"]
    return sentences.enumeration(tiers) or "no tier"


# --- the rest ---------------------------------------------------------------------------------


def _environment(results: list[dict]) -> Section:
    table = Table(["", ""], _record([result["environment"] for result in results]), prose=True)
    return Section("Environment", 2, tables=[table])


def _reproduce(results: list[dict]) -> Section:
    commands = dict.fromkeys(result["command"] for result in results)
    settings = _record([result["config"] for result in results])
    return Section(
        "Reproduce",
        2,
        ["results.json has every raw sample, and this page is made from it alone."],
        tables=[Table(["", ""], settings, fold="Settings that the command came to", prose=True)],
        code="\n".join(commands),
    )


def _record(records: list[dict]) -> list[list[str]]:
    """A line a key, with each value that it has in any of the nested records."""
    flat = [_flatten(record) for record in records]
    keys = dict.fromkeys(key for record in flat for key in record)
    return [
        [key, "; ".join(dict.fromkeys(record.get(key, NOT_AVAILABLE) for record in flat))]
        for key in keys
    ]


def _flatten(environment: dict, prefix: str = "") -> dict[str, str]:
    flat = {}
    for key, value in environment.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key} ")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def _not_measured(title: str, level: int = 3) -> Section:
    return Section(title, level, ["Not measured."])


def _figure(kind: str, plot: Plot, result: dict, caption: str) -> Figure:
    name = f"{kind}-{result['name']}-{result['stream_dtype']}-{result['scope']}.png"
    return Figure(name, plot, result, caption)


def number(value: float | None, spec: str) -> str:
    """The value in a format, "n/a" for None and for what is not finite."""
    return f"{value:{spec}}" if _known(value) else NOT_AVAILABLE


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
