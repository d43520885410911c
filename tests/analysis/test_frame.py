"""Numbers keep their sources in tables, figures, texts and the report."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sp_bench import methods
from sp_bench.analysis import report
from sp_bench.analysis.figure import (
    Canvas,
    Figure,
    Panels,
    colours,
    labelled,
    log2_ticks,
    markers,
    new_figure,
    sources,
)
from sp_bench.analysis.number import (
    Number,
    command,
    count,
    derived,
    formula,
    least,
    mean,
    median,
    most,
    of_record,
    tally,
    total,
    written,
)
from sp_bench.analysis.paper_tables import of_paper
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.table import Table, columns
from sp_bench.cli.compose import Composer
from sp_bench.plan import Method
from tests.support.made_records import made

COUNTED = Number(8.0, "computed", (formula("volume", "2 n & more", "eq. 1"),))
PRINTED = of_paper(4.0, "ring_explainer", "row 3, a < b")
MISSING = Number(None, "simulated", (formula("none", "x", "y"),), "unsupported: 3 ranks")
AWKWARD = r"50% of a_b & c|d <e> {f} $g$ #h \i ~j ^k"


def table(**changes: Any) -> Table:
    rows = [["mesh", COUNTED, PRINTED], [AWKWARD, MISSING, PRINTED]]
    heads = columns("method; ours | GB | .2f; paper | GB")
    return Table(**{"name": "volumes", "title": "Volumes", "columns": heads, "rows": rows, **changes})


def figure(name: str = "line") -> Figure:
    canvas, axes = new_figure()
    axes[0, 0].plot([1, 2], [COUNTED.known, PRINTED.known], label=labelled("mesh", COUNTED.kind))
    axes[0, 0].legend()
    return Figure(name, "A line", canvas, sources([COUNTED, PRINTED]))


def test_a_derived_number_has_all_sources_and_is_ours() -> None:
    ratio = COUNTED.over(PRINTED)
    assert (ratio.value, ratio.kind) == (2.0, "computed")
    assert ratio.sources == (*COUNTED.sources, *PRINTED.sources)
    assert derived(max, COUNTED, MISSING).value is None
    assert derived(max, COUNTED, MISSING).why == MISSING.why
    assert (MISSING.text(), COUNTED.times(0.5).text(".1f")) == ("-", "4.0")
    assert [written(x) for x in (19862.3, 1234.56, 0.00001234, 2.5e9)] == ["19860", "1235", "1.234e-05", "2.5e+09"]
    with pytest.raises(ValueError, match="3 ranks"):
        MISSING.known  # noqa: B018


def test_measured_and_simulated_do_not_mix() -> None:
    one = of_record(made("a", mode="measure", step_ms_median=2.0), "step_ms_median")
    for other in (made("b"), made("c", mode="alone", step_ms_median=2.0)):
        with pytest.raises(ValueError, match="don't make one number"):
            one.over(of_record(other, "step_ms_median"))
    with pytest.raises(ValueError, match="without a source"):
        Number(1.0, "computed", ())
    with pytest.raises(ValueError, match="kind=guessed"):
        Number(1.0, "guessed", COUNTED.sources)


@pytest.mark.parametrize(
    ("mode", "field", "kind"),
    [
        ("simulate", "step_ms_median", "simulated"),
        ("simulate", "comm_bytes_per_gpu", "computed"),
        ("measure", "step_ms_median", "measured"),
        ("measure", "comm_bytes_per_gpu", "measured"),
        ("measure", "comm_bytes_expected", "computed"),
        ("measure", "peak_mem_bytes_expected", "computed"),
    ],
)
def test_a_number_of_a_record_says_what_it_is(mode: str, field: str, kind: str) -> None:
    number = of_record(made(mode=mode), field)
    assert (number.kind, number.sources[0].id) == (kind, "3fa2c0de")


def test_two_cells_of_a_paper_are_two_sources() -> None:
    other = of_paper(5.0, "ring_explainer", "row 4, a < b")
    assert PRINTED.sources[0].id != other.sources[0].id
    assert PRINTED.sources[0].text == "analysis/studies/ring/ring_explainer.csv row 3, a < b"


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=mesh", "method.tile=[16,16]"],
        ["method=usp", "gpus=16", "kv_heads=8", "causal=false", "wire_dtype=float32"],
        ["method=ring", "cluster=h20", "cluster.intra.bytes_per_s=1e11"],
        ["stragglers.ranks={3:1.5}", "stragglers.jitter=0.05"],
        ["mask=document", "data=long", "data.longest=0.5"],
        ["mask=document", "data=magi_attention", "method=ring", "method.layout=blocks"],
        ["mask=document", "data=lengths", "data.lengths=[1000,24]"],
    ],
)
def test_a_records_command_makes_the_same_config(overrides: list[str]) -> None:
    with Composer() as composer:
        config = composer.compose(overrides)
    arguments = command(json.loads(json.dumps(config))).split()
    assert command(config).split() == arguments, "a record that was just made has the command of one that is read"
    with Composer() as composer:
        assert composer.compose(arguments) == config
    assert len(arguments) <= len(overrides) + 1


def test_markdown_holds_its_columns() -> None:
    lines = [line for line in table().to_markdown().splitlines() if line.startswith("|")]
    assert lines[0] == "| method | ours (GB) | paper (GB) |"
    assert lines[2] == "| mesh | 8.00 | 4 |"
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [4] * len(lines)
    assert "ours: simulated or computed; paper: as printed." in table().to_markdown()


def test_latex_escapes() -> None:
    text = table().to_latex()
    awkward = r"50\% of a\_b \& c|d <e> \{f\} \$g\$ \#h \textbackslash{}i \textasciitilde{}j \textasciicircum{}k"
    assert rf"{awkward} & - & 4 \\" in text
    assert r"\begin{tabular}{lrr}" in text
    assert r"\caption{Volumes. ours: simulated or computed; paper: as printed.}" in text


def test_html_escapes_and_links() -> None:
    page = table(title="a < b").to_html()
    assert "<caption>a &lt; b</caption>" in page
    assert "c|d &lt;e&gt;" in page
    assert '<a href="#source-volume" title="computed: 2 n &amp; more [eq. 1]">8.00</a>' in page
    assert "3 ranks" in page


def test_csv_has_values_and_sources() -> None:
    head, first, second = csv.reader(io.StringIO(table().to_csv()))
    assert head == ["method", "ours (GB)", "ours: source", "paper (GB)", "paper: source"]
    assert first == ["mesh", "8.0", "volume", "4.0", PRINTED.sources[0].id]
    assert second[0] == AWKWARD
    assert second[1] == ""


def test_a_table_of_names_has_no_legend() -> None:
    plain = table(columns=columns("method"), rows=[["mesh"]])
    assert plain.to_markdown().rstrip().endswith("| mesh |")
    assert r"\caption{Volumes.}" in plain.to_latex()
    with pytest.raises(ValueError, match="1 cells for 3 columns"):
        table(rows=[["mesh"]])


def test_long_tables_fold_in_a_report_only() -> None:
    long = table(rows=[["mesh", COUNTED, PRINTED]] * 5, shown_rows=2)
    assert "<summary>3 more rows</summary>" in long.to_html()
    assert long.to_html().count("<tr>") == 7
    assert len(long.to_csv().splitlines()) == 6


def test_a_figure_is_three_files_the_same_each_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        figure().save(tmp_path / folder)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["line.pdf", "line.png", "line.svg"]
    for ending in ("svg", "pdf", "png"):
        assert (tmp_path / "a" / f"line.{ending}").read_bytes() == (tmp_path / "b" / f"line.{ending}").read_bytes()
    assert "mesh (computed)" in (tmp_path / "a" / "line.svg").read_text()
    assert figure().sources == (*COUNTED.sources, *PRINTED.sources)


def test_a_page_shows_the_picture_that_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn once."""
    drawn, shown = list[str](), figure()
    draw = Canvas.savefig
    monkeypatch.setattr(Canvas, "savefig", lambda *args, **keys: drawn.append(keys["format"]) or draw(*args, **keys))
    shown.save(tmp_path)
    (picture,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', shown.to_html())
    assert base64.b64decode(picture) == (tmp_path / "line.svg").read_bytes()
    assert sorted(drawn) == ["pdf", "png", "svg"]


def test_a_method_looks_the_same_in_every_figure() -> None:
    assert colours(["mesh", "ring"])["mesh"] == colours(["mesh"])["mesh"]
    assert markers(["mesh", "ring"])["mesh"] == markers(["mesh"])["mesh"]
    for looks in (colours, markers):
        assert len(set(looks([*methods.REGISTRY]).values())) == len(methods.REGISTRY)
        assert len(set(looks(["ours", "mesh", "paper", "ring"]).values())) == 4
        assert list(looks(["paper", "mesh", "ring"])) == ["ring", "mesh", "paper"]


@pytest.mark.parametrize("base", [methods.REGISTRY["ring"], Method])
def test_a_method_without_a_colour_gets_a_free_one(base: type[Method], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing lists the methods' looks: a new one is drawn, and unlike all others, its own base among them."""
    monkeypatch.setitem(methods.REGISTRY, "newest", type("Newest", (base,), {"name": "newest"}))
    for looks in (colours, markers):
        found = looks(["ring", "newest", "mesh"])
        assert len(set(found.values())) == 3 and found["ring"] == looks(["ring"])["ring"]


def test_numbers_in_a_text_are_linked() -> None:
    found = text("a < b: {ratio:.1f} of {n}", ratio=COUNTED.over(PRINTED), n=PRINTED)
    assert str(found) == "a < b: 2.0 of 4"
    assert found.to_html().startswith('<p>a &lt; b: <a class="computed" href="#source-volume"')
    with pytest.raises(KeyError, match="no value for x"):
        text("{x}")
    with pytest.raises(ValueError, match="not in the text: y"):
        text("{x}", x=COUNTED, y=COUNTED)


def test_words_and_settings_of_a_text_have_no_source() -> None:
    found = text("{method} & {gpus} GPUs: {x:.1f}", method="mesh <1>", gpus=8, x=COUNTED)
    assert str(found) == "mesh <1> & 8 GPUs: 8.0"
    assert found.to_html().startswith("<p>mesh &lt;1&gt; &amp; 8 GPUs: <a ") and found.numbers == [COUNTED]


def test_a_section_as_markdown_leaves_out_its_figures() -> None:
    (section,) = study()
    assert section.to_markdown() == f"## Volumes & more\n\n2\n\n{table().to_markdown().strip()}"


def test_panels_draw_and_cite_the_numbers_that_there_are() -> None:
    panels = Panels()
    panels.line({1: COUNTED, 2: MISSING, 4: PRINTED}, "mesh")
    panels.line({1: MISSING}, "usp")
    log2_ticks(panels.first, [1, 4])
    panels.legend_below(2)
    (line,) = (line for line in panels.first.lines if np.size(line.get_xdata()))
    assert np.asarray(line.get_xdata()).tolist() == [1, 4] and line.get_label() == "mesh (computed)"
    assert panels.figure("f", "F").sources == (*COUNTED.sources, *PRINTED.sources)
    assert [tick.get_text() for tick in panels.first.get_xticklabels()] == ["1", "4"]


def test_summaries_of_numbers() -> None:
    numbers = [COUNTED, PRINTED]
    assert [f(numbers).value for f in (least, most, mean, median, total, count)] == [4, 8, 6, 6, 12, 2]
    assert count(numbers, lambda value: value > 5).value == 1
    assert tally(3, [COUNTED, MISSING]).value == 3 and most([COUNTED, MISSING]).value is None
    assert most(numbers).sources == (*COUNTED.sources, *PRINTED.sources) and count(numbers).kind == "computed"


def study() -> list[Section]:
    return [Section("Volumes & more", text("{x}", x=COUNTED.over(PRINTED)), table(), figure(), figure("volumes"))]


def targets(page: str) -> tuple[list[str], list[str]]:
    """The targets of a page's links, and the ids in the page."""
    return re.findall(r"href=[\"']#([^\"']*)", page), re.findall(r"\bid=[\"']([^\"']*)", page)


def test_every_link_of_a_report_has_its_target() -> None:
    page = report.page("Title", {'Study & "one"': study()}, "about")
    links, ids = targets(page)
    assert len(links) == 13
    assert set(links) <= set(ids)
    assert len(ids) == len(set(ids))


def test_a_report_needs_nothing_outside_itself() -> None:
    page = report.page("Title", {"Study": study()}, "about")
    assert set(re.findall(r'(?:src|href)=["\']([a-z]+:)', page)) == {"data:"}
    assert not re.search(r"https?://|file:|@import|url\(|<script", page)
    pictures = re.findall(r"data:image/svg\+xml;base64,([^\"]*)", page)
    assert len(pictures) == 2
    for picture in pictures:
        assert not re.search(rb"href=\"(?!#)|<script", base64.b64decode(picture))


def test_names_in_a_report_are_not_used_twice() -> None:
    other = Number(1.0, "computed", (formula("volume", "another", "eq. 2"),))
    with pytest.raises(ValueError, match="two sources are called volume"):
        report.page("Title", {"a": study(), "b": [Section("b", text("{x}", x=other))]}, "about")
    with pytest.raises(ValueError, match="used twice: table volumes, figure line, figure volumes"):
        report.page("Title", {"a": study(), "b": study()}, "about")


def test_a_report_is_written_with_its_parts(tmp_path: Path) -> None:
    report.write(tmp_path / "report.html", "Title", {"Study": study()}, "about")
    assert len(list((tmp_path / "tables").iterdir())) == 4
    assert len(list((tmp_path / "figures").iterdir())) == 6
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")
