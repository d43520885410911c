"""Published training steps beside simulated ones: `python -m benchmarks.training_tables`.

All times of ours are simulated, with the figures of cluster files as they stand: nothing is fitted to what is judged
here. Striped Attention and TokenRing are the papers that this suite reproduces; the others were held out. Where an
error is large, it is stated and left. Tables with all cells, and every number's source, are in the report of
`python -m analysis.reproduce paper=striped,tokenring,training`.
"""

from __future__ import annotations

from benchmarks.reports import RESULTS, about, records_folder
from sp_bench import markdown
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.analysis.studies import training_tables
from sp_bench.analysis.studies.striped_training import training
from sp_bench.analysis.studies.tokenring_dit import dit

LEFT_OUT = ("striped-training",)
"""Tables that are too long for a page."""


def shown(section: Section) -> str:
    """A section's Markdown with its paragraphs wrapped."""
    parts = [part for part in section.parts if getattr(part, "name", None) not in LEFT_OUT]
    return markdown.filled(Section(section.title, *parts).to_markdown())


def main() -> None:
    runs = Runs(records_folder(__doc__, "training_tables"))
    of_papers = [("Striped Attention", training(runs)), ("TokenRing", dit(runs))]
    sections = [Section(f"{paper}: {found.title}", *found.parts) for paper, found in of_papers]
    sections += [make(runs) for make in training_tables.SECTIONS]
    text = "\n\n".join(
        [
            "# Training steps: published and simulated",
            "Made by `python -m benchmarks.training_tables`.",
            about(__doc__),
            *map(shown, sections),
        ]
    )
    (RESULTS / "training_tables.md").write_text(text.strip() + "\n")
    print(text)


if __name__ == "__main__":
    main()
