"""Pages of figures and tables: one file that loads nothing."""

import base64

from lapa2_interp.page import Section, page, picture, write_page
from lapa2_interp.plots import new_figure


def drawing(title="A"):
    figure = new_figure(3.0, 2.0)
    figure.subplots().set_title(title)
    return figure


def test_a_picture_is_the_same_twice_and_as_wide_as_its_inches():
    [drawn] = picture(drawing(), 112)
    assert [drawn] == picture(drawing(), 112) != picture(drawing("B"), 112)
    kind, _, data = drawn["source"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert b"</svg>" in base64.b64decode(data)
    both = picture(drawing(), 112, narrow=1.5)
    assert both[0] == drawn != both[1]
    assert [image["width"] for image in both] == [336, 168]


def test_findings_stand_first_and_details_are_folded():
    html = page("T", ["One <b>.", "Two."], [Section("S", "text", drawing())], {"a": "b"}, ["More."])
    lead, _, rest = html.partition("<details>")
    assert "<p>One &lt;b&gt;.</p><p>Two.</p>" in lead
    assert "<p>More.</p></details>" in rest
    assert "<details>" not in page("T", ["One."], [], {})


def test_a_page_is_written(tmp_path):
    assert write_page(tmp_path / "page.html", lambda: "new").read_text() == "new"
