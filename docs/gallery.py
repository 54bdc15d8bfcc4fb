"""Gallery of results: a page per packaged study whose results are stored in ``pages/gallery/STUDY``.

``python docs/gallery.py STUDY STORE [PICTURE]`` writes that folder from an output folder of vitlab:

- ``results.parquet``, ``history.parquet``: the final values and the curves, see :func:`vitlab.results` and
  :func:`vitlab.history`;
- ``report.json``: the answers, the table of arms, the notes and the provenance of the report;
- ``plan.json``: the arms, the seeds and the analysis;
- ``figures.html``: the figures of the report, the first ones if all are too large for a page;
- ``attention.png`` or ``labels.png``: a picture of ``vitlab explain`` that has all arms, if one is given.

This is also a hook of MkDocs, which makes the pages from these files, from the header of the study and from its finding
in the table of ``pipelines/README.md`` each time the site is built.  :func:`pages` needs only vitlab, so that tests can
read the pages without building the site.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.planning.packaged import packaged_studies
from vitlab.report.comparison import COLUMNS
from vitlab.report.formats import escape_markdown, markdown_table
from vitlab.report.report import Report
from vitlab.report.sections import all_sections

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    from vitlab.report import Report

FOLDER = Path(__file__).parent / "pages" / "gallery"
TABLE = Path(__file__).parents[1] / "pipelines" / "README.md"
FIGURES = ("arms", "main_effects", "blocks", "curves", "scaling")  #: of the report, in the order of the page
MAX_RANK = 6  #: of the columns of the table of arms; the others are in report.json
MAX_FIGURES = 200_000  #: bytes of all figures of a page; without the last ones, if they are more
PICTURES = {
    "attention": (
        "What models look at",
        "A test image and, for every arm, the attention of its first seed to it",
        "Attention rolled out over all blocks",
    ),
    "labels": (
        "What models predict",
        "A test image, its true labels and, for every arm, the labels that its first seed predicts",
        "Predicted labels of the pixels",
    ),
}  #: by the name of a file: the title, a description, and the caption
DOWNLOADS = {
    "results.parquet": "final values, one row per training",
    "history.parquet": "curves, one row per measurement",
    "report.json": "the table of arms with all columns",
    "plan.json": "arms, seeds and analysis",
}


# -- hooks of MkDocs --------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages under "Results"."""
    assert config.nav is not None
    (section,) = [entry for entry in config.nav if "Results" in entry]
    index, *studies = pages()
    section["Results"] = [{"All studies": index}, {"By name": [{Path(path).stem: path} for path in studies]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those that are written by hand, in place of their stand-ins in the repository."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        if stored := files.get_file_from_path(path):
            files.remove(stored)
        files.append(File.generated(config, path, content=text))
    return files


# -- pages ------------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Return Markdown by path: the index, and a page for every study with stored results."""
    stored = [name for name in packaged_studies() if (FOLDER / name / "report.json").is_file()]
    generated = {"gallery/index.md": "\n".join(_index(stored))}
    generated |= {f"gallery/{name}.md": "\n".join(_page(name)) for name in stored}
    # MkDocs does not know these escapes of GitHub.
    return {path: re.sub(r"\\([<|~$&])", lambda char: f"&#{ord(char[1])};", text) for path, text in generated.items()}


def document(study: str) -> Report:
    """Return the stored report of a study; columns that the table of arms had not then are None."""
    doc: dict[str, Any] = json.loads((FOLDER / study / "report.json").read_text(encoding="utf-8"))
    return Report.from_json(doc | {"arms": [dict.fromkeys(COLUMNS) | row for row in doc["arms"]]})


def read_header(file: Path) -> dict[str, str]:
    """Return the entries of the comment at the top of a packaged study, such as ``Cost``, by their first word."""
    entries: dict[str, str] = {}
    name = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if (match := re.fullmatch(r"# (?:(\w+))? +(.*)", line)) is None:
            break
        name = match[1] or name
        entries[name] = f"{entries[name]} {match[2]}" if match[1] is None else match[2]
    return entries


def command(study: str) -> str:
    """Return the command that runs a packaged study."""
    match = re.search(
        rf"(?:\w+=\S+ )?vitlab run {study}\b(?: --set \S+)*", read_header(packaged_studies()[study])["Run"]
    )
    assert match is not None, f"{study}: the header names no command after 'Run'"
    return match[0]


def finding(study: str) -> str:
    """Return what a packaged study found, in one sentence without a full stop, from the table of the studies."""
    match = re.search(rf"(?m)^\| `{re.escape(study)}\.yaml` \|[^|]*\| ([^|]*) \|", TABLE.read_text(encoding="utf-8"))
    assert match is not None, f"{study}: no row in {TABLE}"
    return match[1]


def _index(stored: list[str]) -> Iterator[str]:
    yield "# Results\n"
    yield (
        "The studies that come with vitlab, what they found, and what they cost on 2 CPU cores. A page has the "
        "sentences, figures and numbers of the report, and the files that they come from.\n"
    )
    for name in stored:
        report, head = document(name), read_header(packaged_studies()[name])
        yield f"## [{name}]({name}.md)\n"
        yield f"{escape_markdown(report.question)}\n"
        yield f"{_finding(name)}\n"
        yield f"Cost: {escape_markdown(_first(head['Cost']))}\n"
    yield "## Without a page\n"
    yield (
        "No results of these studies are stored here yet. Where the header of a study (`vitlab show study NAME`) has "
        "numbers, they are of a run whose results were not kept. The header has the command to run it on your "
        "data and GPU.\n"
    )
    for name, head in ((name, read_header(file)) for name, file in packaged_studies().items() if name not in stored):
        state = "numbers are in the header" if "Found" in head else finding(re.sub("/.*", "/*", name))
        cost = escape_markdown(_first(head["Cost"]))
        yield f"- `{name}`: {escape_markdown(head['Question'])} {state[0].upper()}{state[1:]}. Cost: {cost}"
    yield ""


def _page(study: str) -> Iterator[str]:
    report, head = document(study), read_header(packaged_studies()[study])
    analysis = report.analysis
    figures = re.findall(r"<figure>.*?</figure>", (FOLDER / study / "figures.html").read_text(encoding="utf-8"))
    yield f"# {study}\n"
    yield f"**{escape_markdown(report.question)}**\n"
    yield f"{_finding(study)}\n"
    yield f"{figures[0]}\n"
    yield "## Comparisons\n"
    if report.overview:
        yield f"{report.overview}\n"
    yield from (f"- {escape_markdown(answer)}" for answer in report.answers)
    yield ""
    columns = all_sections()["arms"].table((), report).columns
    yield from markdown_table([c for c in columns if c.rank <= MAX_RANK and not c.title.startswith("test ")])
    yield f"\n{analysis.metric}, {analysis.direction}, at the {analysis.at} evaluation.\n"
    yield from (f"{figure}\n" for figure in figures[1:])
    for kind, (title, alternative, caption) in PICTURES.items():
        if (FOLDER / study / f"{kind}.png").is_file():
            picture = f"{study}/{kind}.png"
            yield f"## {title}\n"
            yield f"[![{alternative}]({picture})]({picture})\n"
            yield (
                f"{caption}, for one seed and one test image (`vitlab explain`): an illustration, on which no number "
                "of this page rests.\n"
            )
    for name, title in (("Expect", "Expected"), ("Found", "Findings in full")):
        if name in head:
            yield f"## {title}\n\n{_papers(escape_markdown(head[name]))}\n"
    for name in ("blocks", "scaling", "heads", "tuning"):
        part = all_sections()[name]
        if table := report.table(name):
            lines = [f"## {part.heading}\n", f"{escape_markdown(table.caption)}\n", *markdown_table(table.columns), ""]
            yield "\n".join(lines)
    if report.notes:
        yield "\n".join(["## Notes\n", *(f"- {escape_markdown(note)}" for note in report.notes), ""])
    yield f"## How it was made\n\n```sh\n{command(study)}\n```\n"
    seeds = sorted({row["planned"] for row in report.arms})
    yield f"- Seeds: {' or '.join(map(str, seeds))} per arm"
    yield f"- Cost: {escape_markdown(head['Cost'])}"
    yield from (
        f"- {name}: {escape_markdown(text)}" for name, text in report.provenance_lines if name != "To reproduce"
    )
    yield ""
    yield from (f"- [{name}]({study}/{name}): {meaning}" for name, meaning in DOWNLOADS.items())
    yield ""


def _finding(study: str) -> str:
    sentence = finding(study)
    return f"**Found:** {sentence[0].upper()}{sentence[1:]}."


def _first(text: str) -> str:
    """Return the first sentence of an entry of a header, as 'vitlab list studies' prints it."""
    return text.partition("  ")[0]


def _papers(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


# -- from an output folder --------------------------------------------------------------------------------------------


def store_results(study: str, out: Path, picture: Path | None = None) -> Path:
    """Write the files of a study into the gallery, and return their folder.

    Args:
        study: the name of a packaged study.
        out: the output folder in which it has been run.
        picture: a picture of ``vitlab explain`` that has all arms beside each other.
    """
    from vitlab.report import collect_report, frame
    from vitlab.report.api import open_study
    from vitlab.store.files import write_bytes

    plan, store = open_study(study, out=out)
    content = collect_report(plan, store)
    doc = content.to_json()
    del doc["trials"], doc["state"]
    doc["made"] |= {"place": "In any folder", "command": command(study)}
    folder = FOLDER / study
    arms_alone = plan.to_json() | {"prerequisites": []}
    for name, data, indent in (("report.json", doc, 1), ("plan.json", arms_alone, None)):
        write_bytes(folder / name, without_places(json.dumps(data, indent=indent, ensure_ascii=False)).encode())
    history = frame.history(plan, store)
    write_bytes(folder / "results.parquet", frame.results(plan, store).to_parquet(index=False))
    write_bytes(folder / "history.parquet", history.drop(columns=["time"]).to_parquet(index=False))
    pictures = [figure.encode() for figure in _figures(content)]
    while len(pictures) > 1 and sum(map(len, pictures)) > MAX_FIGURES:
        pictures.pop()
    write_bytes(folder / "figures.html", b"".join(pictures))
    if picture is not None:
        shutil.copyfile(picture, folder / ("labels.png" if "labels" in picture.name else "attention.png"))
    return folder


def _figures(content: Report) -> Iterator[str]:
    """Yield the figures of the report as elements of a page."""
    from vitlab.report.drawing import svg_to_element

    for name in FIGURES:
        if drawing := content.figures.get(name):
            picture = f'<div class="picture">{svg_to_element(drawing.svg, name, drawing.caption)}</div>'
            figure = f"<figure>{picture}<figcaption>{escape(drawing.caption)}</figcaption></figure>"
            yield " ".join(figure.split()) + "\n"


def without_places(text: str) -> str:
    """Replace folders of the machine, such as that of the data, by ``FOLDER``."""
    return re.sub(r"(data\.root=|\"root\": \")[^\s\",]+", r"\1FOLDER", text)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python docs/gallery.py STUDY STORE [PICTURE], with the name of a packaged study")
    print(store_results(sys.argv[1], Path(sys.argv[2]), *map(Path, sys.argv[3:4])))
