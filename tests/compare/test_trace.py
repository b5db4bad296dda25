"""Attribution of work to norms: in traces written by hand, and in one of a real step."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from compare.profile import figures, marked_norms
from compare.setup import batches
from compare.timing import ready_step
from compare.trace import OPERATORS, RANGE, Work, attribute, gpu_intervals, read_trace

MAIN, AUTOGRAD, STREAM = 1, 2, 7  # threads


def operator(name: str, ts: float, dur: float, tid: int = MAIN, number=None, backward=False):
    args = {} if number is None else {"Sequence number": number, "Fwd thread id": int(backward)}
    return {"cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def node(name: str, ts: float, dur: float, number: int):
    return operator(
        f"autograd::engine::evaluate_function: {name}", ts, dur, AUTOGRAD, number, backward=True
    )


def norm_range(ts: float, dur: float):
    return {"cat": "user_annotation", "name": RANGE, "ts": ts, "dur": dur, "tid": MAIN, "args": {}}


def kernel(name: str, launched: float, ts: float, dur: float, tid: int = MAIN, cat="cuda_runtime"):
    args = {"correlation": kernel.count}
    kernel.count += 1
    return [
        {"cat": cat, "name": "launch", "ts": launched, "dur": 1, "tid": tid, "args": args},
        {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": STREAM, "args": args},
    ]


kernel.count = 1


def phases(events, scope="eager"):
    return {work.name: work.phase for work in attribute(events, scope)}


def test_gpu_work_belongs_to_the_range_it_was_launched_in():
    events = [
        operator("aten::linear", 0, 10, number=1),
        *kernel("matmul", launched=5, ts=100, dur=50),
        norm_range(20, 30),
        operator("aten::mul", 22, 10, number=2),
        *kernel("norm forward", launched=25, ts=150, dur=7, cat="cuda_driver"),
        operator("aten::linear", 60, 10, number=3),
        *kernel("second matmul", launched=62, ts=157, dur=50),
        node("MmBackward0", 100, 10, number=3),
        *kernel("matmul backward", launched=105, ts=210, dur=50, tid=AUTOGRAD),
        node("MulBackward0", 120, 10, number=2),
        *kernel("norm backward", launched=125, ts=260, dur=9, tid=AUTOGRAD),
        # Launched by another thread in the time of a norm's range.
        *kernel("elsewhere", launched=25, ts=300, dur=1, tid=AUTOGRAD),
    ]
    assert phases(events) == {
        "matmul": None,
        "norm forward": "forward",
        "second matmul": None,
        "matmul backward": None,
        "norm backward": "backward",
        "elsewhere": None,
    }
    assert (150, 157) in gpu_intervals(events)


def test_an_operator_without_a_node_does_not_claim_the_next_one():
    # The cast at the range's end makes no node, and shows the number that the matmul's node gets.
    events = [
        norm_range(0, 20),
        operator("aten::mul", 1, 5, number=5),
        operator("aten::to", 10, 5, number=6),
        operator("aten::mm", 30, 5, number=6),
        node("MmBackward0", 50, 10, number=6),
        *kernel("matmul backward", launched=55, ts=100, dur=50, tid=AUTOGRAD),
        node("MulBackward0", 60, 10, number=5),
        *kernel("norm backward", launched=65, ts=150, dur=9, tid=AUTOGRAD),
    ]
    assert phases(events) == {"matmul backward": None, "norm backward": "backward"}


def test_a_node_of_several_inside_one_operator_belongs_too():
    events = [
        norm_range(0, 20),
        operator("aten::rms_norm", 1, 15, number=5),  # makes nodes 5, 6 and 7
        operator("aten::mm", 30, 5, number=8),
        *(node(f"n{number}", 100 - 10 * number, 8, number) for number in (5, 6, 7, 8)),
        *(
            event
            for number in (5, 6, 7, 8)
            for event in kernel(f"k{number}", 101 - 10 * number, 200 + number, 1, tid=AUTOGRAD)
        ),
    ]
    assert phases(events) == {"k5": "backward", "k6": "backward", "k7": "backward", "k8": None}


def test_in_a_compiled_model_our_operators_are_known():
    events = [
        operator("CompiledFunction", 0, 100),
        operator(f"{OPERATORS}forward", 10, 10),
        *kernel("fused", launched=5, ts=200, dur=1),
        *kernel("ours", launched=15, ts=201, dur=1),
        operator(f"{OPERATORS}backward", 120, 10, tid=AUTOGRAD),
        *kernel("ours, backward", launched=125, ts=202, dur=1, tid=AUTOGRAD),
    ]
    expected = {"fused": None, "ours": "forward", "ours, backward": "backward"}
    assert phases(events, "compiled") == expected


def test_in_a_compiled_model_the_sum_of_partial_sums_is_the_norms():
    events = [
        operator("aten::sum", 0, 10),
        *kernel("sum elsewhere", launched=5, ts=200, dur=1),
        node("CompiledFunctionBackward", 100, 50, number=3),
        *kernel("matmul backward", launched=105, ts=210, dur=20, tid=AUTOGRAD),
        operator("aten::sum", 120, 10, tid=AUTOGRAD),
        *kernel("second stage of dw", launched=125, ts=230, dur=2, tid=AUTOGRAD),
    ]
    expected = {"sum elsewhere": None, "matmul backward": None, "second stage of dw": "backward"}
    assert phases(events, "compiled") == expected


FUSED = {  # kernels of a compiled GPT, as Inductor names them
    "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0": "forward",
    "triton_per_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_t_0": "forward",
    "triton_per_fused__to_copy_add_div_expand_mul_pow_sum_view_3": "backward",
    "triton_red_fused__to_copy_mul_sum_12": "backward",
    "triton_poi_fused__to_copy_add_cat_mul_slice_stack_transpose_5": None,
    "triton_poi_fused__unsafe_view_gelu_gelu_backward_view_2": None,
    "triton_red_fused__log_softmax__to_copy__unsafe_view_prepare_softmax_online_sum_9": None,
    "reduce_kernel_sum": None,  # not Inductor's
    "_rms_norm_forward_kernel": "forward",  # a norm's own
    "_rms_norm_reduce_kernel": "backward",
}


def test_in_a_compiled_model_others_are_known_by_the_operations_in_a_kernels_name():
    events = [e for i, name in enumerate(FUSED) for e in kernel(name, i, 100 + i, 1)]
    assert phases(events, "compiled") == FUSED
    assert set(phases(events, "eager").values()) == {None}


def test_without_a_gpu_an_operators_own_time_is_its_work():
    events = [
        operator("caller", 0, 100),
        operator("first", 10, 20),
        operator("inner", 15, 5),
        operator("second", 30, 10),
        operator("later", 200, 10),
    ]
    own = {}
    for work in attribute(events, "eager"):
        own[work.name] = own.get(work.name, 0) + work.end - work.start
    assert own == {"caller": 70, "first": 15, "inner": 5, "second": 10, "later": 10}


def test_figures_count_overlaps_once():
    work = [
        Work("forward", 0, 2000, "forward"),
        Work("backward", 2000, 6000, "backward"),
        Work("reduce", 5000, 7000, "backward"),  # its launch overlaps with what it waits for
        Work("matmul", 7000, 17000, None),
    ]
    found = figures(work, steps=2)
    assert found["forward_ms"] == 1
    assert found["backward_ms"] == 2.5
    assert found["norm_ms"] == 3.5
    assert found["busy_ms"] == 8.5
    assert found["kernels"]["other"] == {"matmul": 5}


@pytest.mark.parametrize("norm", ["eager", "triton"])
def test_a_real_step(settings, norm):
    if norm == "triton" and torch.cuda.is_available():
        pytest.skip("the settings name the CPU, for which the kernels are not interpreted here")
    data = batches(settings, 1, 0)
    step = ready_step(settings, norm, data, warmup_steps=1)
    with (
        marked_norms(step.lit, "eager"),
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        step(data[0])
    work = attribute(read_trace(profiler), "eager")
    names = {phase: {w.name for w in work if w.phase == phase} for phase in ("forward", "backward")}
    others = {w.name for w in work if w.phase is None}
    if norm == "eager":
        assert "aten::rsqrt" in names["forward"] - others
        assert any("RsqrtBackward" in name for name in names["backward"])
    else:
        assert "_RMSNorm" in names["forward"] - others
        assert any("_RMSNormBackward" in name for name in names["backward"])
    for name in ("aten::mm", "aten::gelu", "aten::embedding", "aten::_fused_adamw_"):
        assert name not in names["forward"] | names["backward"]
    assert "aten::mm" in others


def test_marks_leave_with_their_block(settings):
    data = batches(settings, 1, 0)
    step = ready_step(settings, "eager", data, warmup_steps=1)
    with marked_norms(step.lit, "eager"):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(data[0])
    assert not any(event["name"] == RANGE for event in read_trace(profiler))
    assert torch.is_grad_enabled()
