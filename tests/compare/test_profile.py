"""What Amdahl's law says about given profiles."""

import pytest

from compare import profile
from compare.sentences import above_ceiling


def found(step_ms: float, norm_ms: float | None, busy_ms: float, **other: float) -> dict:
    return {
        "step_ms": step_ms,
        "busy_ms": busy_ms,
        "norm_ms": norm_ms,
        "forward_ms": norm_ms and norm_ms / 4,
        "backward_ms": norm_ms and 3 * norm_ms / 4,
        "kernels": {"norm": {"norm": norm_ms} if norm_ms else {}, "other": other},
        "fused": False,
    }


def test_prediction_and_ceiling():
    profiles = {"eager": found(100, 25, 100, matmul=75), "triton": found(81, 5, 80, matmul=75)}
    judged = profile.judge(profiles, "eager")
    assert judged["eager"]["norm_share"] == 0.25
    assert judged["eager"]["amdahl_predicted"] is None
    assert judged["triton"]["norm_share"] == pytest.approx(5 / 81)
    assert judged["triton"]["amdahl_predicted"] == pytest.approx(1 / (0.75 + 0.25 / 5))
    assert judged["triton"]["amdahl_ceiling"] == pytest.approx(4 / 3)


def flag(profiles: dict, *speedup: float) -> str | None:
    """What the report says of triton's speedup: its median and lower end, if it was measured."""
    result = {"baseline": "eager", "profile": profile.judge(profiles, "eager")}
    if speedup:
        variant = {"speedup": dict(zip(("median", "low"), speedup, strict=True))}
        result["speed"] = {"variants": {"eager": {}, "triton": variant}}
    assert above_ceiling(result, "eager") is None
    return above_ceiling(result, "triton")


def test_above_the_ceiling_the_report_says_where_the_time_went():
    profiles = {
        "eager": found(100, 25, 98, matmul=60, cast=13),
        "triton": found(70, 5, 69, matmul=60, cast=4),
    }
    assert flag(profiles, 1.33, 1.32) is None
    said = flag(profiles, 1.4, 1.39)
    assert "1.400x is above the ceiling of 1.333x" in said
    assert "64.00 ms a step instead of 73.00" in said
    assert "that of cast, 4.00 ms instead of 13.00" in said
    assert "waiting 1.00 ms instead of 2.00" in said


def test_an_interval_that_begins_below_the_ceiling_may_be_noise():
    profiles = {"eager": found(100, 25, 98), "triton": found(70, 5, 69)}
    assert "may be noise" in flag(profiles, 1.4, 1.2)


def test_the_profiles_own_step_times_stand_in_for_a_missing_speed():
    profiles = {"eager": found(100, 25, 100, a=75), "triton": found(70, 5, 70, a=65)}
    assert "1.429x" in flag(profiles)


def test_a_share_is_at_most_one():
    profiles = {"eager": found(10, 19, 20), "triton": found(10, 5, 10)}
    assert profile.judge(profiles, "eager")["eager"]["norm_share"] == 0.95


def test_a_norm_that_cannot_be_told_apart_has_no_share():
    profiles = {"eager": found(100, None, 100, fused=99), "triton": found(99, 5, 99)}
    judged = profile.judge(profiles, "eager")
    assert judged["eager"]["norm_share"] is None
    assert judged["triton"]["norm_share"] == pytest.approx(5 / 99)
    for name in ("amdahl_predicted", "amdahl_ceiling", "note"):
        assert judged["triton"][name] is None
    assert flag(profiles, 2.0, 1.9) is None


def test_a_fused_norm_is_said_to_be_so():
    profiles = {"eager": found(100, 6, 100) | {"fused": True}, "triton": found(99, 5, 99)}
    judged = profile.judge(profiles, "eager")
    assert judged["eager"]["norm_share"] == 0.06
    assert judged["eager"]["note"] == profile.FUSED
    assert judged["triton"]["note"] is None


def test_all_kernels_are_listed_the_longest_first():
    norms = {"a": 2.0, "b": 0.5}
    listed = profile.from_the_top({"norm": norms, "other": {f"c{i}": i + 1.0 for i in range(20)}})
    assert [kernel["ms"] for kernel in listed] == sorted([*range(1, 21), 2.0, 0.5], reverse=True)
    assert listed[0] == {"kernel": "c19", "ms": 20.0, "norm": False}
    assert [kernel for kernel in listed if kernel["norm"]] == [
        {"kernel": name, "ms": ms, "norm": True} for name, ms in norms.items()
    ]


def test_every_norm_is_profiled(settings, in_this_process):
    judged = profile.run(settings, lambda *_: None)
    assert set(judged) == {"eager", "aten"}
    for norm in judged.values():
        assert 0 < norm["norm_share"] < 1
        assert norm["forward_ms"] > 0
        assert norm["backward_ms"] > 0
