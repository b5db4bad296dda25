"""The report of made-up results: what it says, what it shows, and what it must not say."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from compare import report, sections, sentences
from model.summary import NO_FINDING
from tests.compare.sample import sample, scaling

AA = {"low": 0.995, "high": 1.005}
PARTS = ("speed", "profile", "memory", "parity")
PNG = b"\x89PNG\r\n\x1a\n"


def spread(median: float, half: float = 0.004) -> dict:
    return {"median": median, "low": median - half, "high": median + half}


def without(result: dict, *parts: str) -> dict:
    """The result of a run that was interrupted before these parts."""
    left = {key: value for key, value in result.items() if key not in parts}
    return left | {"missing": list(parts)}


def with_speedups(over_eager: float, over_compiled: float) -> dict:
    result = without(sample(), "memory")
    triton = result["speed"]["variants"]["triton"]
    triton["speedup"] |= spread(over_eager)
    triton["vs"] = {"eager": spread(over_eager), "compiled": spread(over_compiled)}
    return result


# --- sentences ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("median", "low", "high", "expected"),
    [
        (1.33, 1.32, 1.34, "faster"),
        (0.75, 0.74, 0.76, "slower"),
        (1.001, 0.996, 1.008, "no measurable difference"),
        (1.003, 1.001, 1.004, "no measurable difference"),  # inside what the A/A arm got
        (1.01, 0.99, 1.03, "no measurable difference"),  # outside of it, but reaches 1
    ],
)
def test_verdict_of_a_speedup(median, low, high, expected):
    assert sentences.verdict({"median": median, "low": low, "high": high}, AA) == expected


def test_headline_of_a_complete_scope():
    assert sentences.headline(sample("eager")) == (
        "With an eager model and a bfloat16 stream, triton is 1.33x [1.33, 1.34] faster than eager "
        "and 1.008x [1.004, 1.012] faster than compiled, and saves 3.5 GiB of peak memory; the "
        "loss curves agree."
    )
    assert sentences.headline(sample("compiled")) == (
        "With a compiled model and a bfloat16 stream, triton is not measurably faster or slower "
        "than eager (0.999x [0.995, 1.003]) or compiled (1.001x [0.997, 1.005]), and saves 20 MiB "
        "of peak memory; the loss curves agree."
    )


@pytest.mark.parametrize(
    ("over_eager", "over_compiled", "expected"),
    [
        (1.25, 0.9, "is 1.250x [1.246, 1.254] faster than eager and slower than compiled (0.9"),
        (
            0.9,
            0.8,
            "slower than eager (0.900x [0.896, 0.904]) and compiled (0.800x [0.796, 0.804])",
        ),
        (1.25, 1.001, "faster than eager and not measurably faster or slower than compiled (1.001"),
        (1.001, 1.1, "is 1.100x [1.096, 1.104] faster than compiled and not measurably faster or"),
    ],
)
def test_headline_says_which_way_each_comparison_fell(over_eager, over_compiled, expected):
    assert expected in sentences.headline(with_speedups(over_eager, over_compiled))


@pytest.mark.parametrize(
    ("triton_gib", "expected"),
    [
        (26.11, "triton saves 3.5 GiB of peak memory"),
        (29.61, "triton needs the same peak memory"),
        (29.56, "triton saves 51 MiB of peak memory"),
        (30.01, "triton needs 0.4 GiB more peak memory"),
    ],
)
def test_headline_compares_memory(triton_gib, expected):
    result = without(sample(), "speed")
    result["memory"]["triton"]["peak_allocated_gib"] = triton_gib
    assert f"speed was not measured; {expected}; " in sentences.headline(result)


@pytest.mark.parametrize(
    ("verdict", "failed", "missed", "expected"),
    [
        ("pass", [], [], "; the loss curves agree."),
        ("inconclusive", [], [], "; whether the loss curves agree is inconclusive."),
        ("fail", ["op"], [], "; parity fails for the norm alone."),
        (
            "fail",
            ["float32", "training"],
            ["dw zero"],
            "; parity fails for training in float32 and training as configured, and its check "
            "missed a known fault (dw zero).",
        ),
        (
            "fail",
            [],
            ["wrong eps", "dw zero"],
            "; parity is not shown, as its check missed a known fault (wrong eps and dw zero).",
        ),
    ],
)
def test_headline_gives_the_verdict_on_parity(verdict, failed, missed, expected):
    result = without(sample(), "speed")
    result["parity"]["verdict"] = verdict
    for tier in failed:
        result["parity"]["tiers"][tier]["verdict"] = "fail"
    for fault in missed:
        result["parity"]["controls"][fault] |= {"caught": False, "tier": None}
    assert sentences.headline(result).endswith(expected)


def test_headline_names_what_was_not_measured():
    headline = sentences.headline(without(sample(), *PARTS))
    for gap in ("speed was not measured", "memory was not measured", "parity was not checked"):
        assert gap in headline
    assert not re.search(r"faster|slower|saves|agree", headline)


def test_headline_of_a_cpu_has_no_speed():
    headline = sentences.headline(sample(cpu=True))
    assert "no speed is a finding on a CPU; the loss curves agree" in headline
    assert not re.search(r"\dx|faster|slower", headline)


def test_headline_is_about_the_norm_that_parity_checked():
    result = without(sample(), "memory")
    result["parity"]["candidate"] = "compiled"
    assert "stream, compiled is 1.32x" in sentences.headline(result).replace("; memory", "")


def test_launches_set_the_pace_below_95_percent_busy():
    result = sample()
    variants = result["speed"]["variants"]
    for norm, busy in {"eager": 0.95, "compiled": None, "triton": 0.9499}.items():
        variants[norm]["busy"] = busy
    assert "busy only 95.0% of the time with triton: there launches" in sentences.pace(result)
    variants["triton"]["busy"] = 0.95
    assert sentences.pace(result) is None


def test_what_held_the_clocks_back_is_said():
    result = sample()
    assert sentences.held_back(result) is None  # a GPU that does not say
    moments = [("1650", "0x0000000000000004"), ("1980", "0x0000000000000001")]
    result["environment"]["clocks"] = {
        f"process {number}": {"clocks.sm": mhz, "clocks_event_reasons.active": active}
        for number, (mhz, active) in enumerate(moments)
    }
    assert sentences.held_back(result) == (
        "The GPU's clocks were held back by its power limit: 1650 to 1980 MHz, which makes step "
        "times scatter."
    )
    result["environment"]["clocks"].pop("process 0")  # idle is no reason
    assert sentences.held_back(result) is None


def test_headline_says_what_several_devices_do():
    result = sample() | {"scaling": {"ddp-2": scaling("ddp"), "fsdp-2": scaling("fsdp")}}
    assert sentences.headline(result).endswith(
        "of peak memory; 2 devices under ddp do 1.95 times the work of one with triton; 2 devices "
        "under fsdp do 1.95 times the work of one with triton; the loss curves agree."
    )
    assert "devices" not in sentences.headline(result | {"cpu": True})


def graphs() -> dict:
    """Results of scope graphs, in which speed alone is measured."""
    return without(sample("compiled"), "profile", "memory") | {"scope": "graphs", "missing": []}


def test_headline_of_cuda_graphs():
    assert sentences.headline(graphs()).startswith(
        "With a compiled model, CUDA graphs and a bfloat16 stream, triton is not measurably"
    )
    assert "memory" not in sentences.headline(graphs())


# --- table --------------------------------------------------------------------------------------


def test_the_headline_table(tmp_path):
    write([sample(), without(sample("compiled"), "memory")], tmp_path)
    text = (tmp_path / report.MARKDOWN).read_text()
    lines = next(block for block in text.split("\n\n") if block.startswith("| ")).splitlines()
    assert len(lines) == 2 + 6
    assert len({line.count("|") for line in lines}) == 1
    triton = sample()["speed"]["variants"]["triton"]
    assert lines[4] == (
        f"| eager model, bfloat16 stream | triton | {triton['step_ms']['p50']:.2f} "
        f"| 1.33x [1.33, 1.34] | {triton['tokens_per_s']:,.0f} | 26.12 |"
    )
    assert lines[5].split(" | ")[3] == "baseline"
    assert all(line.endswith("| n/a |") for line in lines[5:])


# --- page ---------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The text of a page, the addresses it refers to, and whether its tags match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.addresses, self._open = "", [], []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for key, value in attributes if key in ("src", "href", "srcset")]
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)
        assert tag not in ("script", "link", "iframe")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += f" {data.strip()}" if data.strip() else ""


def write(results: list[dict], folder: Path) -> tuple[Page, str]:
    """The HTML page and the Markdown of a report."""
    report.write(results, folder)
    html = (folder / "report.html").read_text()
    assert not re.search(r"url\(|@import", html)
    return Page(html), (folder / "report.md").read_text()


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, *write([sample("eager"), sample("compiled")], folder)


def test_page_is_one_file_with_every_picture_in_it(complete):
    folder, page, markdown = complete
    pictures = sorted(folder.glob("*.png"))
    assert [picture.name.partition("-")[0] for picture in pictures] == [
        *("losses", "memory", "memory", "profile", "profile", "speed", "speed"),
    ]
    prefix = "data:image/png;base64,"
    assert all(address.startswith(prefix) for address in page.addresses)
    embedded = [base64.b64decode(address.removeprefix(prefix)) for address in page.addresses]
    assert sorted(embedded) == sorted(picture.read_bytes() for picture in pictures)
    assert all(picture.startswith(PNG) for picture in embedded)
    assert set(re.findall(r"\]\((.*?)\)", markdown)) == {picture.name for picture in pictures}


def test_nothing_but_the_report_is_left_in_the_folder(complete):
    folder, *_ = complete
    assert {path.suffix for path in folder.iterdir()} == {".html", ".md", ".png"}
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("scope", ["eager", "compiled"])
def test_page_has_the_numbers_of_the_results(complete, scope):
    _, page, markdown = complete
    result = sample(scope)
    expected = [f"{limit:.3f}" for limit in result["speed"]["aa"].values()][1:]
    for norm, variant in result["speed"]["variants"].items():
        expected += [f"{variant['step_ms'][p]:.2f}" for p in ("p10", "p50", "p90")]
        expected += [f"{variant['first_call_s'][cache]:.2f}" for cache in ("cold", "warm")]
        expected += [f"{variant['host_us']:.0f}", f"{variant['busy']:.1%}"]
        memory, profile = result["memory"][norm], result["profile"][norm]
        expected += [f"{memory[peak]:.2f}" for peak in ("peak_allocated_gib", "peak_reserved_gib")]
        expected += [f"{memory['saved_bytes_per_norm'] / 2**20:.2f}", str(memory["largest_batch"])]
        expected += [f"{profile['norm_share']:.1%}", f"{profile['forward_ms']:.2f}"]
    expected += ["1.321", "1.402", result["environment"]["git_revision"]]
    for text in (page.text, markdown):
        words = set(re.split(r"[ |\[\],;\n]+", text))
        assert [number for number in expected if number not in words] == []
        assert result["command"] in text


def test_page_shows_parity_and_its_controls(complete):
    _, page, markdown = complete
    for text in (page.text, markdown):
        for shown in ("0.00121", "0.00134", "0.903", "0.0002 [-0.0011, 0.0015] apart", "+/-0.0042"):
            assert shown in text
        for fault, control in sample()["parity"]["controls"].items():
            caught = {"op": "the norm alone and training in float32"}
            by = caught.get(control["tier"], "training in float32")
            row = f"{fault} yes {by} {control['detail']}"
            assert row in re.sub(r"[ |]+", " ", text)


def test_page_flags_a_speedup_above_the_ceiling_and_an_idle_gpu(complete):
    _, page, markdown = complete
    for text in (page.text, markdown):
        assert "triton: Measured 1.333x is above the ceiling of 1.302x, so that not only" in text
        assert "busy only 93.1% of the time with compiled" in text


def test_complete_gpu_results_have_no_banner(complete):
    _, page, markdown = complete
    for text in (page.text, markdown):
        assert NO_FINDING not in text
        assert "Missing for" not in text
        assert "Not measured" not in text


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_said_to_be_missing(part, tmp_path):
    page, markdown = write([without(sample(), part)], tmp_path)
    picture = {"parity": "losses"}.get(part, part)
    assert not list(tmp_path.glob(f"{picture}-*.png"))
    assert len(list(tmp_path.glob("*.png"))) == len(PARTS) - 1
    for text in (page.text, markdown):
        assert f"Missing for the eager model, bfloat16 stream: {part}." in text
        assert text.count("Not measured.") == 1


def test_page_of_cuda_graphs(tmp_path):
    page, markdown = write([sample("compiled"), graphs()], tmp_path)
    for text in (page.text, markdown):
        assert "Compiled model, CUDA graphs, bfloat16 stream" in text
        assert text.count("Not measured with CUDA graphs") == 2
        assert "The graphs are recorded in the second step" in text
        assert "Missing for" not in text
    assert (tmp_path / "speed-sample-bfloat16-graphs.png").exists()


@pytest.mark.parametrize("scope", ["eager", "compiled"])
def test_page_has_a_table_for_several_devices(scope, tmp_path):
    result = sample(scope) | {"scaling": {"fsdp-2": scaling("fsdp")}}
    page, markdown = write([result], tmp_path)
    for text in (page.text, markdown):
        assert "2 devices, fsdp" in text
        assert "Each device has a batch of 32 sequences of its own" in text
        assert ("Each block is compiled by itself" in text) == (scope == "compiled")
        row = re.sub(r"[ |]+", " ", text)
        assert "triton 75.00 436,907 76.42 76.92 1 851,968 97.5% [97.3%, 97.7%]" in row


def test_a_run_without_any_part_has_a_page(tmp_path):
    page, _ = write([without(sample(), *PARTS)], tmp_path)
    assert "Missing for the eager model, bfloat16 stream: speed, profile, memory and parity." in (
        page.text
    )
    assert not re.search(r"\d\.\d+x", page.text.partition("Words")[0])


def test_parity_that_the_scopes_share_is_shown_once(tmp_path):
    page, _ = write([sample("eager"), sample("compiled"), sample(stream_dtype="float32")], tmp_path)
    assert page.text.count("Loss curves: triton against eager") == 2  # one for each stream dtype


def test_cpu_banner(tmp_path):
    page, markdown = write([sample(cpu=True)], tmp_path)
    for text in (page.text, markdown):
        assert NO_FINDING in text
        assert "none on a CPU" in text
        assert "faster" not in text.partition("Words")[0]


def test_text_of_results_is_escaped(tmp_path):
    result = without(sample(), *PARTS)
    result["environment"]["gpu"] = "<b>GPU</b> | &"
    result["command"] = "python -m compare --norms 'eager,<i>mine</i>'"
    page, markdown = write([result], tmp_path)
    assert "<b>GPU</b> | &" in page.text
    assert result["command"] in page.text
    assert len({line.count("|") for line in markdown.splitlines() if "GPU</b>" in line}) <= 2


def test_cpu_results_have_neither_peaks_nor_a_busy_share(tmp_path):
    result = sample(cpu=True)
    for norm in result["norms"]:
        unknown = dict.fromkeys(result["memory"][norm])
        result["memory"][norm] = unknown | {"saved_bytes_per_norm": 3 * 2**20}
        result["speed"]["variants"][norm]["busy"] = None
    page, _ = write([result], tmp_path)
    assert not list(tmp_path.glob("memory-*.png"))
    assert "triton n/a n/a n/a 3.00 n/a n/a" in page.text


def test_a_norm_that_is_fused_into_the_model_has_no_time_of_its_own(tmp_path):
    result = without(sample("compiled"), "speed", "memory")
    unknown = dict.fromkeys(("norm_share", "forward_ms", "backward_ms", "amdahl_predicted"))
    result["profile"]["compiled"] |= unknown | {"note": "fused with what is around it"}
    page, _ = write([result], tmp_path)
    assert "compiled: fused with what is around it" in page.text
    assert "compiled n/a n/a n/a 61.30" in page.text


def test_diverged_training_is_shown(tmp_path):
    result = without(sample(), "speed", "profile", "memory")
    training = result["parity"]["tiers"]["training"]
    training |= {"verdict": "fail", "ratio": None, "rms_difference": None}
    training["final_difference"] = dict.fromkeys(("mean", "low", "high"))
    for curves in training["curves"].values():
        curves["candidate"][100:] = [None] * (len(curves["candidate"]) - 100)
    result["parity"]["verdict"] = "fail"
    page, _ = write([result], tmp_path)
    assert "parity fails for training as configured" in page.text
    assert "n/a apart (RMS), null runs 0.00101; it is n/a times the largest" in page.text


def test_curves_without_noise_are_measured_by_float32(tmp_path):
    result = without(sample(), "speed", "profile", "memory")
    training = result["parity"]["tiers"]["training"]
    training |= {"largest_null": 0.0, "resolution": 6e-7, "rms_difference": 3e-7, "ratio": 0.5}
    page, _ = write([result], tmp_path)
    assert "0.5 times float32's resolution of a loss, 6e-07" in page.text
    assert "largest null run's" not in page.text


def test_curves_that_agree_are_not_called_inconclusive_for_their_end(tmp_path):
    result = without(sample(), "speed", "profile", "memory")
    training = result["parity"]["tiers"]["training"]
    training |= {"verdict": "inconclusive", "verdicts": {"curves": "pass", "end": "inconclusive"}}
    page, _ = write([result], tmp_path)
    assert "1.5 are allowed. pass training as configured: end" in page.text


def test_missed_control_stands_out(tmp_path):
    result = without(sample(), "speed", "profile", "memory")
    result["parity"]["controls"]["dw zero"] |= {"caught": False, "tier": None, "tiers": {}}
    result["parity"]["verdict"] = "fail"
    page, _ = write([result], tmp_path)
    assert "dw zero NO no tier dw: 1" in page.text


def test_norms_of_users_are_drawn_and_named(tmp_path):
    result = sample()
    for part in ("speed", "profile", "memory"):
        owner = result[part]["variants"] if part == "speed" else result[part]
        owner["mypkg.norm:make"] = owner.pop("triton")
    result["norms"] = ["eager", "compiled", "mypkg.norm:make"]
    result["parity"]["candidate"] = "mypkg.norm:make"
    page, _ = write([result], tmp_path)
    assert "mypkg.norm:make is 1.33x [1.33, 1.34] faster than eager" in page.text


def test_results_of_two_streams_stand_side_by_side(tmp_path):
    measured = ("speed", "profile", "memory")
    streams = [without(sample(stream_dtype=s), *measured) for s in ("bfloat16", "float32")]
    page, _ = write(streams, tmp_path)
    assert "With an eager model and a float32 stream" in page.text
    assert len(list(tmp_path.glob("losses-*.png"))) == 2


def test_results_of_two_names_say_which_they_are_of(tmp_path):
    page, _ = write([sample() | {"name": name} for name in ("small", "large")], tmp_path)
    for name in ("small", "large"):
        assert f"{name}: With an eager model and a bfloat16 stream, triton is" in page.text
        assert page.text.count(f"{name}: eager model, bfloat16 stream") > len(sample()["norms"])
    assert len(list(tmp_path.glob("losses-*.png"))) == 2
    assert "small: With" not in write([sample() | {"name": "small"}], tmp_path)[0].text


def test_two_results_of_the_same_scope_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two results are of sample with the eager model"):
        report.write([sample(), sample()], tmp_path)
    with pytest.raises(ValueError, match="no results"):
        report.write([], tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_longest_kernels_are_shown_and_all_of_the_norm():
    result = sample()
    kernels = [{"kernel": f"k{i}", "ms": 20.0 - i, "norm": i == 19} for i in range(20)]
    result["profile"]["triton"]["top"] = kernels
    shown = sections.sections([result])
    tables = [t for section in shown for t in section.tables if "with triton" in t.fold]
    assert [row[0] for row in tables[0].rows] == [*(f"k{i}" for i in range(12)), "k19"]
