"""Reports: a page that needs no other file, a section of a card that is replaced and nothing else."""

import base64
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("scipy", reason="reports of GLUE need scipy (pip install -e .[train])")

from matplotlib.figure import Figure

from neobert_hf.evaluation.report import Section, write_card_section, write_page

ROWS = [{"task": "sst2", "score": "88.1 <b>"}, {"task": "cola", "score": "20.5"}]


class Cells(HTMLParser):
    """The text of all cells, and the sources of all images and links."""

    def __init__(self):
        super().__init__()
        self.cells, self.sources, self.is_in_cell = [], [], False

    def handle_starttag(self, tag, attributes):
        self.is_in_cell = tag in ("td", "th")
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        if self.is_in_cell and data.strip():
            self.cells.append(data.strip())


@pytest.fixture
def figure(tmp_path):
    Figure().savefig(tmp_path / "figure.png")
    return tmp_path / "figure.png"


def test_a_page_has_every_cell_and_its_figures_inside(tmp_path, figure):
    page = write_page(tmp_path / "new/report", "A & B", [Section("One", "1 < 2", ROWS, figure), Section("Two", "x")])
    content = page.read_text("utf-8")
    found = Cells()
    found.feed(content)
    assert found.cells == ["task", "score", "sst2", "88.1 <b>", "cola", "20.5"]
    (source,) = found.sources
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == figure.read_bytes()
    assert "<h1>A &amp; B</h1>" in content and "1 &lt; 2" in content


def test_a_card_keeps_everything_but_its_evaluation(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n\n# Model\n\nText.\n", "utf-8")
    for score in ("1.0", "2.0"):
        write_card_section(card, [Section("GLUE", "Mean.", [{"task": "sst2", "score": score}])])
        content = card.read_text("utf-8")
        assert re.findall(r"\| sst2 +\| +(\S+) \|", content) == [score.rstrip("0").rstrip(".")]
        assert content.startswith("---\nlicense: mit\n---") and "# Model\n\nText.\n" in content
    card.write_text(content + "\n## Licence\n\nMIT.\n", "utf-8")
    write_card_section(card, [Section("GLUE", "Mean.", ROWS)])
    content = card.read_text("utf-8")
    assert content.count("## Evaluation") == 1 and content.endswith("\n## Licence\n\nMIT.\n") and "20.5" in content
