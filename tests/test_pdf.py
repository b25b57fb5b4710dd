"""Joining the pages of the site into one that is printed."""

from __future__ import annotations

import pytest

pytest.importorskip("bs4", reason="comes with the packages of the site")

from tools import pdf

PAGE = """<html><head><title>{title} &#8212; The Book</title><script src="search.js"></script>
<script src="../_static/../mathjax/tex-svg-full.js"></script></head>
<body><nav>menu</nav><article><section id="recap"><h1>{title}<a class="headerlink" href="#recap">#</a></h1>
{body}</section></article></body></html>"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    (tmp_path / "chapters").mkdir()
    first = (
        '<a href="02_b.html#recap">there</a> <a href="#recap">here</a> <a href="https://example.org/02_b.html">out</a>'
    )
    second = '<details class="hide above-input">code</details><a href="01_a.html">back</a>'
    (tmp_path / "chapters" / "01_a.html").write_text(PAGE.format(title="One", body=first))
    (tmp_path / "chapters" / "02_b.html").write_text(PAGE.format(title="Two", body=second))
    monkeypatch.setattr(pdf, "HTML", tmp_path)
    return pdf.BeautifulSoup(pdf.joined(["chapters/01_a", "chapters/02_b"]), "html.parser")


def test_pages_follow_each_other_without_menus_and_folded_code(site):
    assert [heading.get_text() for heading in site.find_all("h1")] == ["One", "Two"]
    assert not site.find("nav") and not site.find("details") and not site.select(".headerlink")
    assert site.title.string == "The Book"


def test_links_between_pages_lead_to_ids_inside_the_file(site):
    targets = [link["href"] for link in site.find_all("a")]
    assert targets == ["#02_b--recap", "#01_a--recap", "https://example.org/02_b.html", "#01_a"]
    ids = [element["id"] for element in site.find_all(id=True)]
    assert len(ids) == len(set(ids)) and {"02_b--recap", "01_a--recap", "01_a"} <= set(ids)


def test_formulas_are_the_only_script(site):
    assert ["mathjax" in script["src"] for script in site.find_all("script")] == [True]


def test_a_browser_that_does_not_exist_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("CHROME", "no-such-browser")
    assert pdf.main() == 1
    assert capsys.readouterr().err.splitlines() == [
        "CHROME names 'no-such-browser', which is not a program: "
        "install one (Debian: apt-get install chromium), or set CHROME"
    ]
