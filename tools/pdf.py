"""Print the built site to one file, `_build/book.pdf`, with headless Chromium: `make pdf`.

The chapters' articles are joined into one page, in the order of the contents, so that links between chapters become
links inside the file. A printed solution is unfolded; the folded code of figures is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from bs4 import BeautifulSoup

from tools.environment import ROOT
from tools.lint import contents

HTML = ROOT / "_build" / "html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MAC_BROWSER = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"


def find_browser() -> str | None:
    """Return the browser that `CHROME` names, or the first known one that is installed."""
    candidates = [os.environ["CHROME"]] if os.environ.get("CHROME") else [*BROWSERS, MAC_BROWSER]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def joined(pages: list[str]) -> str:
    """Return one HTML page with the articles of `pages`, names as in _toc.yml, all in one folder.

    Every id gets its page's name in front, because chapters share section names; links follow.
    """
    names = [Path(page).name for page in pages]
    whole = BeautifulSoup((HTML / f"{pages[0]}.html").read_text(encoding="utf-8"), "html.parser")
    for script in whole.find_all("script"):
        if "mathjax" not in script.get("src", "") and "MathJax" not in script.text:
            script.decompose()
    articles = []
    for page, name in zip(pages, names, strict=True):
        soup = BeautifulSoup((HTML / f"{page}.html").read_text(encoding="utf-8"), "html.parser")
        article = soup.find("article")
        for unwanted in article.select("details.hide.above-input, a.headerlink, script, .prev-next-footer"):
            unwanted.decompose()
        for element in article.find_all(id=True):
            element["id"] = f"{name}--{element['id']}"
        for link in article.find_all("a", href=True):
            target, _, anchor = link["href"].partition("#")
            linked = name if not target else target.removesuffix(".html")
            if linked in names:
                link["href"] = f"#{linked}--{anchor}" if anchor else f"#{linked}"
        article["id"] = name
        article["style"] = "break-before: page"
        articles.append(article)
    del articles[0]["style"]
    whole.title.string = whole.title.string.rpartition("— ")[2]  # the book's title without the page's
    body = whole.body
    body.clear()
    for article in articles:
        body.append(article)
    return str(whole)


def main() -> int:
    browser = find_browser()
    if browser is None:
        named = os.environ.get("CHROME")
        problem = f"CHROME names {named!r}, which is not a program" if named else "no Chromium or Chrome is installed"
        print(f"{problem}: install one (Debian: apt-get install chromium), or set CHROME", file=sys.stderr)
        return 1
    pages = contents(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
    source = HTML / Path(pages[0]).parent / "print.html"
    source.write_text(joined(pages), encoding="utf-8")
    pdf = ROOT / "_build" / "book.pdf"
    pdf.unlink(missing_ok=True)
    print(f"printing {len(pages)} pages of the site with {Path(browser).name}", flush=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        command += ["--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
        command += ["--no-pdf-header-footer", "--generate-pdf-document-outline", "--virtual-time-budget=60000"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--no-sandbox")  # Chromium refuses to run as root with it
        command += [f"--print-to-pdf={pdf}", source.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            print("Chromium did not finish within 300 s", file=sys.stderr)
            return 1
        finally:
            source.unlink()
    if not pdf.exists():
        print(f"Chromium wrote no file (exit status {done.returncode}):\n{done.stderr}", file=sys.stderr)
        return 1
    print(f"the book: {pdf}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
