"""Pages of figures and tables: one file that loads nothing."""

import base64

import pytest

from lapa2_interp._util.errors import RunError
from lapa2_interp._util.page import Section, page, picture, write_page
from lapa2_interp._util.plots import new_figure


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


def test_what_is_no_place_for_a_page_is_refused_before_it_is_made(tmp_path):
    def never():
        raise AssertionError

    with pytest.raises(RunError, match="is a folder; give a file, such as"):
        write_page(tmp_path, never)
    with pytest.raises(RunError, match="ends in .html; found page.txt, give page.html"):
        write_page(tmp_path / "page.txt", never)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write .*; choose another file"):
        write_page(tmp_path / "file" / "page.html", lambda: "")
    assert write_page(tmp_path / "page.html", lambda: "new").read_text() == "new"
