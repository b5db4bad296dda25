"""Made-up results of a comparison, in the form of results.json. None of it was measured."""

import numpy as np

SHAPE = {"processes": 3, "rounds": 30, "steps": 500}
STEP_MS = {
    "eager": {"eager": 100.0, "compiled": 75.6, "triton": 75.0},
    "compiled": {"eager": 61.2, "compiled": 61.3, "triton": 61.25},
}
NORM_MS = {
    "eager": {"eager": (11.3, 17.4), "compiled": (1.3, 1.9), "triton": (1.2, 1.5)},
    "compiled": {"eager": (1.3, 1.7), "compiled": (1.3, 1.7), "triton": (1.2, 1.4)},
}
ALLOCATED_GIB = {
    "eager": {"eager": 29.61, "compiled": 26.13, "triton": 26.12},
    "compiled": {"eager": 13.92, "compiled": 13.92, "triton": 13.90},
}


def sample(scope: str = "eager", stream_dtype: str = "bfloat16", cpu: bool = False) -> dict:
    """Complete results of one scope; parity is the same in all, as a run has it."""
    command = "python -m compare --config configs/gpt2-small.yaml"
    return {
        "name": "sample",
        "scope": scope,
        "stream_dtype": stream_dtype,
        "baseline": "eager",
        "norms": ["eager", "compiled", "triton"],
        "config": {
            "model": {"n_layer": 12, "n_head": 12, "n_embd": 768, "stream_dtype": stream_dtype},
            "data": {"source": "kjv", "tokenizer": "gpt2", "context": 1024, "batch_size": 32},
            "precision": "bf16-mixed",
            "seed": 1337,
        },
        "command": command,
        "environment": {
            "gpu": "n/a" if cpu else "Sample GPU",
            "driver": "n/a" if cpu else "570.00",
            "cpu": "sample-cpu",
            "python": "3.12.3",
            "torch": "2.11.0",
            "triton": "3.6.0",
            "lightning": "2.6.6",
            "git_revision": "0123456789abcdef0123456789abcdef01234567",
            "date": "2026-01-01T00:00:00+00:00",
            "clocks": {"start": {"clocks.sm": "1980"}, "end": {"clocks.sm": "1965"}},
        },
        "missing": [],
        "cpu": cpu,
        "speed": speed(scope),
        "profile": profile(scope),
        "memory": memory(scope),
        "parity": parity(),
    }


def interval(median: float, half: float = 0.004) -> dict:
    return {"median": median, "low": median - half, "high": median + half}


def speed(scope: str) -> dict:
    times = STEP_MS[scope]
    rng = np.random.default_rng(0)
    variants = {}
    for norm, ms in times.items():
        samples = ms * np.exp(
            rng.normal(0, 0.003, (SHAPE["processes"], SHAPE["rounds"]))
            + rng.normal(0, 0.002, (SHAPE["processes"], 1))
        )
        p10, p50, p90 = np.percentile(samples, [10, 50, 90])
        variants[norm] = {
            "step_ms": {"p10": p10, "p50": p50, "p90": p90},
            "first_call_s": {"cold": 41.25, "warm": 6.5}
            if norm == "compiled"
            else {"cold": 2.75, "warm": 1.5},
            "host_us": {"eager": 512.4, "compiled": 361.2, "triton": 148.9}[norm],
            "busy": 0.992 if scope == "compiled" else {"compiled": 0.931}.get(norm, 0.987),
            "tokens_per_s": 32 * 1024 / p50 * 1000,
            "vs": {other: interval(times[other] / ms) for other in times if other != norm},
            "samples_ms": samples.tolist(),
        }
        if norm != "eager":
            speedup = times["eager"] / ms
            variants[norm] |= {
                "speedup": {"vs": "eager", **interval(speedup), "difference": scope == "eager"},
                "processes": [interval(speedup + shift, 0.005) for shift in (-0.003, 0.001, 0.004)],
            }
    return {
        "rounds": SHAPE["rounds"],
        "block_steps": 10,
        "variants": variants,
        "aa": {"median": 0.9998, "low": 0.9952, "high": 1.0041},
    }


def scaling(strategy: str) -> dict:
    """An entry of "scaling": two devices, 96% and 97.5% of twice the work."""
    variants = {}
    for norm, efficiency in {"eager": 0.96, "compiled": 0.97, "triton": 0.975}.items():
        one = STEP_MS["eager"][norm]
        step = one / efficiency
        variants[norm] = {
            "one": {"step_ms": one, "tokens_per_s": 32 * 1024 / one * 1000},
            "rank_ms": [step - 0.5, step],
            "slowest_rank": 1,
            "step_ms": step,
            "tokens_per_s": 2 * 32 * 1024 / step * 1000,
            "efficiency": interval(efficiency, 0.002),
        }
    about = {"strategy": strategy, "devices": 2, "batch_per_device": 32, "clocks": None}
    return about | {"rounds": SHAPE["rounds"], "block_steps": 4, "variants": variants}


def profile(scope: str) -> dict:
    ceilings = {"eager": None, "compiled": 1.402, "triton": 1.302 if scope == "eager" else 1.402}
    return {
        norm: {
            "norm_share": sum(NORM_MS[scope][norm]) / ms,
            "forward_ms": NORM_MS[scope][norm][0],
            "backward_ms": NORM_MS[scope][norm][1],
            "step_ms": ms,
            "busy_ms": ms - 1,
            "amdahl_predicted": None if norm == "eager" else 1.321,
            "amdahl_ceiling": ceilings[norm],
            "top": [
                {"kernel": "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "ms": 8.91, "norm": False},
                {"kernel": f"{norm}_rms_norm_backward_kernel", "ms": 4.56, "norm": True},
            ],
        }
        for norm, ms in STEP_MS[scope].items()
    }


def memory(scope: str) -> dict:
    return {
        norm: {
            "peak_allocated_gib": gib,
            "peak_reserved_gib": gib + 1.25,
            "retries": 0,
            "repeat_equal": True,
            "saved_bytes_per_norm": 50_462_720 * (3 if norm == "eager" else 1),
            "largest_batch": 152 if norm == "eager" else 168,
        }
        for norm, gib in ALLOCATED_GIB[scope].items()
    }


def cheap_tier(*cases: tuple[str, float, float]) -> dict:
    found = [{"case": case, "error": error, "limit": limit} for case, error, limit in cases]
    worst = max(found, key=lambda case: case["error"] / case["limit"])
    return {
        "verdict": "pass",
        "detail": f"{worst['case']}: {worst['error']:.2g}, where {worst['limit']:.2g} is allowed",
        "cases": found,
    }


def parity() -> dict:
    tiers = {
        "op": cheap_tier(("y of norm, RMS error", 1.7e-3, 1.1e-2), ("dw", 2.1e-7, 6.2e-7)),
        "float32": cheap_tier(("loss of step 0", 9e-8, 1e-6), ("gradient of wte", 3.1e-7, 1e-5)),
    }
    return {
        "candidate": "triton",
        "reference": "eager",
        "tiers": {
            **tiers,
            "training": {
                "verdict": "pass",
                "verdicts": {"curves": "pass", "end": "pass"},
                "steps": SHAPE["steps"],
                "seeds": [1337, 1338, 1339, 1340, 1341],
                "rms_difference": 0.00121,
                "rms_null": 0.00101,
                "largest_null": 0.00134,
                "resolution": 1.3e-6,
                "ratio": 0.903,
                "limit": 1.5,
                "final_difference": {"mean": 0.0002, "low": -0.0011, "high": 0.0015},
                "window": 20,
                "margin": 0.0042,
                "curves": {str(seed): curves(seed) for seed in range(1337, 1342)},
            },
        },
        "verdict": "pass",
        "norms": {"compiled": tiers, "triton": tiers},
        "controls": {
            "wrong eps": caught("float32", "loss of step 1: 3e-4, where 1e-6 is allowed"),
            "dx without its projection term": caught("op", "dx: 0.94, where 1e-2 is allowed"),
            "dw zero": caught("op", "dw: 1, where 2e-7 is allowed"),
            "dw summed in bf16": caught("op", "dw: 7e-3, where 4e-7 is allowed"),
        },
    }


def caught(tier: str, detail: str) -> dict:
    verdicts = {"op": "pass", "float32": "fail", tier: "fail"}
    return {"caught": True, "tier": tier, "tiers": verdicts, "detail": detail}


def curves(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    steps = np.arange(SHAPE["steps"])
    loss = 3.2 + 7.6 * np.exp(-steps / 60) + rng.normal(0, 0.06, steps.size)

    def noisy() -> list[float]:
        drift = np.cumsum(rng.normal(0, 1e-4, steps.size)) + rng.normal(0, 2e-3, steps.size)
        return np.round(loss + drift, 5).tolist()

    return {"reference": np.round(loss, 5).tolist(), "candidate": noisy(), "null": noisy()}
