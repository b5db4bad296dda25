"""What a comparison found, in sentences: pure functions of a results.json's contents."""

from compare.statistics import Interval, differs

# Bits of nvidia-smi's clocks_event_reasons.active that hold back a GPU at work, as NVML names them.
HOLDS_BACK = {
    0x04: "its power limit",
    0x08: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature",
    0x80: "the power supply",
}
BUSY_ENOUGH = 0.95  # of the step's time; below it the GPU waits for launches
TIERS = {
    "op": "the norm alone",
    "float32": "training in float32",
    "training": "training as configured",
}
NO_DIFFERENCE = "no measurable difference"
PARTS = ("speed", "profile", "memory", "parity")
MODELS = {
    "eager": "eager model",
    "compiled": "compiled model",
    "graphs": "compiled model, CUDA graphs",
}
NOT_WITH_GRAPHS = {
    "profile": "Not measured with CUDA graphs: they replay the kernels of the compiled model.",
    "memory": "Not measured with CUDA graphs: a replay uses memory that was set aside when the "
    "graph was recorded, in which PyTorch sees no peak.",
}


def parts(scope: str) -> tuple[str, ...]:
    """The parts of a whole comparison that there are in a scope."""
    return tuple(part for part in PARTS if scope != "graphs" or part not in NOT_WITH_GRAPHS)


def told_apart(results: list[dict]) -> list[dict]:
    """The results; where they are of several names, sentences about each begin with its name."""
    if len({result["name"] for result in results}) == 1:
        return results
    return [result | {"prefix": f"{result['name']}: "} for result in results]


def setup(result: dict) -> str:
    """What the scope is: "eager model, bfloat16 stream"."""
    return f"{result.get('prefix', '')}{MODELS[result['scope']]}, {result['stream_dtype']} stream"


def candidate(result: dict) -> str:
    """The norm that the headline is about: parity's, else triton, else the last one."""
    norms = result["norms"]
    named = result.get("parity", {}).get("candidate")
    return next((norm for norm in (named, "triton") if norm in norms), norms[-1])


def headline(result: dict) -> str:
    """The scope in one sentence: speed with intervals, memory and parity, as far as measured."""
    norm = candidate(result)
    if result["cpu"]:
        findings = ["no speed is a finding on a CPU"]
    else:
        findings = _speed_and_memory(result, norm)
        findings += [scaling(found, norm) for found in result.get("scaling", {}).values()]
    if "parity" in result:
        findings.append(parity(result["parity"]))
    elif "parity" in result["missing"]:
        findings.append("parity was not checked")
    article = "an" if result["scope"] == "eager" else "a"
    setting = [*MODELS[result["scope"]].split(", "), f"a {result['stream_dtype']} stream"]
    prefix = result.get("prefix", "")
    return f"{prefix}With {article} {enumeration(setting)}, {'; '.join(findings)}."


def _speed_and_memory(result: dict, norm: str) -> list[str]:
    speed, memory = _speed(result, norm), _memory(result, norm)
    if speed and memory:
        return [f"{norm} {speed}, and {memory}"]
    found = [f"{norm} {speed}" if speed else "speed was not measured"]
    if "memory" in parts(result["scope"]):
        found.append(f"{norm} {memory}" if memory else "memory was not measured")
    return found


def _speed(result: dict, norm: str) -> str | None:
    """ "is 1.33x [1.32, 1.34] faster than eager and slower than ..."; None if not measured."""
    variant = result.get("speed", {}).get("variants", {}).get(norm, {})
    groups: dict[str, list[str]] = {"faster": [], "slower": [], NO_DIFFERENCE: []}
    for other, speedup in speedups(variant).items():
        found = verdict(speedup, result["speed"]["aa"])
        interval = times(speedup)
        groups[found].append(
            f"{interval} faster than {other}" if found == "faster" else f"{other} ({interval})"
        )
    phrases = groups["faster"]
    if groups["slower"]:
        phrases.append(f"slower than {enumeration(groups['slower'])}")
    if groups[NO_DIFFERENCE]:
        others = enumeration(groups[NO_DIFFERENCE], "or")
        phrases.append(f"not measurably faster or slower than {others}")
    return f"is {enumeration(phrases)}" if phrases else None


def speedups(variant: dict) -> dict[str, dict]:
    """A norm's speedup over every other one, the baseline first."""
    speedup = variant.get("speedup")
    return ({speedup["vs"]: speedup} if speedup else {}) | variant.get("vs", {})


def verdict(speedup: dict, aa: dict) -> str:
    """faster, slower or "no measurable difference", by the rule of `statistics.differs`."""
    interval = Interval(speedup["median"], speedup["low"], speedup["high"])
    if not differs(interval, Interval(1.0, aa["low"], aa["high"])):
        return NO_DIFFERENCE
    return "faster" if interval.median > 1 else "slower"


def _memory(result: dict, norm: str) -> str | None:
    """ "saves 3.5 GiB of peak memory" against the baseline; None if not measured."""
    memory = result.get("memory", {})
    if not {norm, result["baseline"]} <= memory.keys():
        return None
    saved = memory[result["baseline"]]["peak_allocated_gib"] - memory[norm]["peak_allocated_gib"]
    amount = size(abs(saved))
    if float(amount.split()[0]) == 0:
        return "needs the same peak memory"
    return f"saves {amount} of peak memory" if saved > 0 else f"needs {amount} more peak memory"


def scaling(found: dict, norm: str) -> str:
    """ "2 devices under ddp do 1.92 times the work of one with triton", of one entry."""
    times = found["devices"] * found["variants"][norm]["efficiency"]["median"]
    return (
        f"{found['devices']} devices under {found['strategy']} do {times:.2f} times the work of "
        f"one with {norm}"
    )


def parity(parity: dict) -> str:
    """The verdict on the loss curves, and whether a known fault slipped through the check."""
    failed = [TIERS[name] for name, tier in parity["tiers"].items() if tier["verdict"] == "fail"]
    missed = [fault for fault, found in parity["controls"].items() if not found["caught"]]
    slipped = f"its check missed a known fault ({enumeration(missed)})"
    if failed:
        sentence = f"parity fails for {enumeration(failed)}"
        return f"{sentence}, and {slipped}" if missed else sentence
    if missed:
        return f"parity is not shown, as {slipped}"
    if parity["verdict"] == "inconclusive":
        return "whether the loss curves agree is inconclusive"
    return "the loss curves agree"


def pace(result: dict) -> str | None:
    """For which norms launches, not kernels, set the pace; None if for none of them."""
    variants = result.get("speed", {}).get("variants", {})
    waiting = [
        f"{variant['busy']:.1%} of the time with {norm}"
        for norm, variant in variants.items()
        if variant.get("busy") is not None and variant["busy"] < BUSY_ENOUGH
    ]
    if not waiting:
        return None
    return (
        f"The GPU was busy only {enumeration(waiting)}: there launches, not kernels, set the pace, "
        "and the norm's share of kernel time does not predict the step."
    )


def held_back(result: dict) -> str | None:
    """What kept the GPU below its highest clock while it was timed; None if nothing did."""
    moments = result["environment"].get("clocks", {}).values()
    masks = [clocks.get("clocks_event_reasons.active", "") for clocks in moments]
    active = [int(mask, 16) for mask in masks if mask.startswith("0x")]
    reasons = [why for bit, why in HOLDS_BACK.items() if any(bit & mask for mask in active)]
    if not reasons:
        return None
    megahertz = sorted(int(clocks["clocks.sm"]) for clocks in moments)
    return (
        f"The GPU's clocks were held back by {enumeration(list(dict.fromkeys(reasons)))}: "
        f"{megahertz[0]} to {megahertz[-1]} MHz, which makes step times scatter."
    )


def missing(results: list[dict]) -> list[str]:
    """A sentence for each scope with parts that were not measured."""
    sentences = []
    for result in results:
        absent = [part for part in parts(result["scope"]) if part not in result]
        absent += [part for part in result["missing"] if part not in PARTS]
        if absent:
            sentences.append(f"Missing for the {setup(result)}: {enumeration(absent)}.")
    return sentences


# --- numbers ----------------------------------------------------------------------------------


def times(interval: dict) -> str:
    """ "1.33x [1.32, 1.34]": a speedup with its interval, to a third decimal where close to 1 or
    where two would not tell the interval's ends apart."""
    low, high = f"{interval['low']:.2f}", f"{interval['high']:.2f}"
    digits = 3 if abs(interval["median"] - 1) < 0.05 or low == high else 2
    low, high = f"{interval['low']:.{digits}f}", f"{interval['high']:.{digits}f}"
    return f"{interval['median']:.{digits}f}x [{low}, {high}]"


def size(gib: float) -> str:
    """GiB to a tenth, MiB below that."""
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.0f} MiB"


def enumeration(words: list[str], conjunction: str = "and") -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def above_ceiling(result: dict, norm: str) -> str | None:
    """Where the time went that the norm's share does not account for, if its speedup over the
    baseline is above Amdahl's ceiling. Where it was not measured, the profile's step times say it.
    """
    base, found = result["profile"][result["baseline"]], result["profile"][norm]
    variants, ceiling = result.get("speed", {}).get("variants", {}), found["amdahl_ceiling"]
    ratio = base["step_ms"] / found["step_ms"]
    speedup = variants.get(norm, {}).get("speedup") or {"median": ratio, "low": ratio}
    if norm == result["baseline"] or not ceiling or speedup["median"] <= ceiling:
        return None
    sentence = f"Measured {speedup['median']:.3f}x is above the ceiling of {ceiling:.3f}x"
    if speedup["low"] <= ceiling:
        return f"{sentence}, but its interval begins below that: it may be noise."
    outside = [
        p["busy_ms"] - (p["forward_ms"] or 0) - (p["backward_ms"] or 0) for p in (base, found)
    ]
    idle = [max(0.0, p["step_ms"] - p["busy_ms"]) for p in (base, found)]
    before, after = (
        {kernel["kernel"]: kernel["ms"] for kernel in p["top"] if not kernel["norm"]}
        for p in (base, found)
    )
    saved = {name: ms - after.get(name, 0.0) for name, ms in before.items()}
    most = max(saved, key=saved.get)
    return (
        f"{sentence}, so that not only the norms changed: work outside of them takes "
        f"{outside[1]:.2f} ms a step instead of {outside[0]:.2f}, waiting {idle[1]:.2f} ms instead "
        f"of {idle[0]:.2f}. The largest change is that of {most[:80]}, {after.get(most, 0.0):.2f} "
        f"ms instead of {before[most]:.2f}."
    )
