"""report.html, report.md and their pictures, made of nothing but the contents of results.json."""

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from compare import plots, sentences
from compare.sections import NOT_AVAILABLE, Section, Table, overview, sections
from model.files import replacing
from model.summary import NO_FINDING

HTML, MARKDOWN = "report.html", "report.md"
GLOSSARY = {
    "Eager model, compiled model": "Whether the whole model runs op by op or through "
    "torch.compile. Figures of the two are never compared with each other.",
    "CUDA graphs": "The compiled model's launches, recorded once and replayed as a whole: for "
    "steps so short that the host cannot launch their kernels fast enough.",
    "p10, p50, p90": "A tenth, half and nine tenths of the steps took no longer.",
    "Speedup": "The baseline's step time divided by the norm's: at 1.33x the baseline takes a "
    "third longer.",
    "Bootstrap interval": "Draw as many rounds as were measured from them at random, with "
    "repetition, and take the median speedup: 95% of such medians lie in the interval. It is "
    "widened where the medians of the processes are further apart than their rounds explain.",
    "A/A arm": "A second copy of the baseline, timed against the baseline. Both run the same code: "
    "a speedup inside their interval, or one whose own interval reaches 1, is no measurable "
    "difference.",
    "First call": "Seconds of the first step of a fresh process, compilation included, with an "
    "empty (cold) and a filled (warm) compile cache. Never part of the step time.",
    "Scaling efficiency": "Tokens/s of n devices over n times the tokens/s of one; 100% if "
    "exchanging gradients (ddp), and with fsdp weights as well, costs no time. The slowest rank's "
    "median step counts. The interval spans the quotients of both medians' intervals.",
    "Host time": "Microseconds that the CPU needs to queue a step. They show in the step time only "
    "where the GPU waits for them.",
    "Amdahl": "If a part p of the step runs s times as fast, the step runs 1 / ((1 - p) + p / s) "
    "times as fast, and at most 1 / (1 - p) times, the ceiling. A measured speedup above the "
    "ceiling means that something outside the norm changed as well.",
    "Allocated, reserved": "Bytes of live tensors, and bytes that PyTorch's allocator holds for "
    "them, at their peak over whole steps.",
    "Null run": "The reference trained again with the rows of each batch permuted. Only the order "
    "of summation changes, so its drift is the noise of rounding.",
    "Equivalence": "The 90% interval of the final difference has to lie inside the margin, half a "
    "standard deviation between seeds. An interval too wide for that is inconclusive, not a pass.",
    "Negative control": "A norm with a known fault: a check that lets it pass proves nothing.",
}


def write(results: list[dict], folder: Path) -> None:
    """Write report.html, report.md and their PNGs to a folder, made if it is not there.

    Args:
        results: The contents of a results.json for each scope.

    Raises:
        ValueError: without results, or if two of them have the same name, scope and stream dtype.
    """
    _check(results)
    results = sentences.told_apart(results)
    folder.mkdir(parents=True, exist_ok=True)
    colors = plots.norm_colors(norm for result in results for norm in result["norms"])
    page = {
        "title": f"{' and '.join(dict.fromkeys(r['name'] for r in results))}: norms compared",
        "subtitle": _subtitle(results[0]),
        "banner": NO_FINDING if any(result["cpu"] for result in results) else "",
        "headlines": [sentences.headline(result) for result in results],
        "missing": sentences.missing(results),
        "overview": overview(results),
        "sections": sections(results),
        "glossary": GLOSSARY,
    }
    for figure in (figure for section in page["sections"] for figure in section.figures):
        plots.save(figure.plot, figure.result, colors, folder / figure.name)
    _write_text(folder / HTML, _html(page, colors, folder))
    _write_text(folder / MARKDOWN, _markdown(page))


def _check(results: list[dict]) -> None:
    if not results:
        raise ValueError("there are no results to report")
    seen = set()
    for result in results:
        key = (result["name"], result["scope"], result["stream_dtype"])
        if key in seen:
            raise ValueError(
                f"two results are of {key[0]} with the {sentences.setup(result)}: "
                "a report holds one of each"
            )
        seen.add(key)


def _subtitle(result: dict) -> str:
    environment = result["environment"]
    gpu, cpu = environment.get("gpu", NOT_AVAILABLE), environment.get("cpu", NOT_AVAILABLE)
    versions = [f"{p} {environment[p]}" for p in ("torch", "triton") if p in environment]
    date = environment.get("date", NOT_AVAILABLE).partition("T")[0]
    return ", ".join([f"CPU {cpu}" if result["cpu"] else gpu, *versions, date])


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


# --- HTML and Markdown --------------------------------------------------------------------------


def _html(page: dict, colors: dict[str, str], folder: Path) -> str:
    def embedded(name: str) -> str:
        return f"data:image/png;base64,{base64.b64encode((folder / name).read_bytes()).decode()}"

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.jinja")
    return template.render(page, colors=colors, embedded=embedded)


def _markdown(page: dict) -> str:
    blocks = [f"# {page['title']}", page["subtitle"]]
    if page["banner"]:
        blocks.append(f"> **{page['banner']}**")
    blocks.append("\n".join(f"- {sentence}" for sentence in page["headlines"] + page["missing"]))
    blocks.append(_markdown_table(page["overview"]))
    for section in page["sections"]:
        blocks += _markdown_section(section)
    blocks += ["## Words", *(f"**{word}.** {text}" for word, text in page["glossary"].items())]
    return "\n\n".join(blocks) + "\n"


def _markdown_section(section: Section) -> list[str]:
    blocks = [f"{'#' * section.level} {section.title}", *section.sentences]
    if section.code:
        blocks.append(f"```\n{section.code}\n```")
    blocks += [f"![{figure.caption}]({figure.name})" for figure in section.figures]
    for table in section.tables:
        blocks += [f"{table.fold}:"] if table.fold else []
        blocks.append(_markdown_table(table))
    return blocks


def _markdown_table(table: Table) -> str:
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
