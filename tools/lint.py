"""Check what every chapter must have: `python -m tools.lint [chapters/03_activations.ipynb ...]`.

A rule is a generator over one notebook (the parsed JSON) that yields `(cell index or None, what to do)`. The rules of
the whole book (labels used twice, table of contents) are in `lint_book`.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.environment import ROOT

TAGS = {
    "hide-input",
    "hide-output",
    "live",
    "nbval-ignore-output",
    "raises-exception",
    "recorded",
    "remove-cell",
    "remove-input",
}
# A cell that shows no code, or folds it, may be longer.
UNSEEN_CODE = {"hide-input", "remove-cell", "remove-input"}
MAX_CODE_LINES = 15
MAX_OUTPUT_BYTES = 500_000

LEADS = ("Question.", "Goals.", "Prerequisites.", "Time.", "Runs on.")
CLOSING_SECTIONS = ("Exercises", "Recap", "Further reading")

UNIX_PATH = re.compile(r"(?<![\w.:/-])/(?:home|root|work|tmp|Users|mnt)(?=[/\s\"'`)]|$)")
WINDOWS_PATH = re.compile(r"\b[A-Z]:\\{1,2}[A-Z]")
FENCE = re.compile(r"^\s*(?:`{3,}|:{3,})\{(exercise|exercise-start|solution|solution-start)\}[ \t]*(\S*)", re.M)
END_FENCE = re.compile(r"^\s*(?:`{3,}|:{3,})\{(exercise|solution)-end\}", re.M)
LABEL_OPTION = re.compile(r"^\s*:label:\s*(\S+)", re.M)


@dataclass(frozen=True)
class Finding:
    """One thing to mend. `cell` counts from 1 over all cells; None means the whole notebook."""

    notebook: str
    cell: int | None
    rule: str
    message: str

    def __str__(self) -> str:
        place = self.notebook if self.cell is None else f"{self.notebook}, cell {self.cell}"
        return f"{place}: {self.message} [{self.rule}]"


Findings = Iterator[tuple["int | None", str]]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def tags(cell: dict) -> set[str]:
    return set(cell["metadata"].get("tags", []))


def code_cells(notebook: dict) -> list[tuple[int, dict]]:
    return [(i, c) for i, c in enumerate(notebook["cells"]) if c["cell_type"] == "code"]


def markdown_cells(notebook: dict) -> list[tuple[int, dict]]:
    return [(i, c) for i, c in enumerate(notebook["cells"]) if c["cell_type"] == "markdown"]


def output_texts(cell: dict) -> Iterator[str]:
    """Yield every text that a reader sees below the cell."""
    for output in cell.get("outputs", []):
        yield "".join(output.get("text", ""))
        yield "\n".join(output.get("traceback", []))
        for mime, data in output.get("data", {}).items():
            if mime.startswith("text/"):
                yield "".join(data)


def images(cell: dict) -> list[dict]:
    return [o for o in cell.get("outputs", []) if any(mime.startswith("image/") for mime in o.get("data", {}))]


# --- file format ---------------------------------------------------------------------------------


def format_version(notebook: dict) -> Findings:
    version = notebook.get("nbformat"), notebook.get("nbformat_minor")
    if version != (4, 5):
        yield None, f"is nbformat {version[0]}.{version[1]}; save it as 4.5 (`make execute` does)"
    seen: set[str] = set()
    for i, cell in enumerate(notebook["cells"]):
        if not cell.get("id"):
            yield i, "has no id; re-execute the chapter to get one"
        elif cell["id"] in seen:
            yield i, f"has the id {cell['id']!r} of an earlier cell; delete the id and re-execute"
        seen.add(cell.get("id", ""))


def kernel(notebook: dict) -> Findings:
    name = notebook["metadata"].get("kernelspec", {}).get("name")
    if name != "python3":
        yield None, f"names the kernel {name!r}; it must be 'python3'"


def execution_counts(notebook: dict) -> Findings:
    """nbval runs a cell without a count and compares nothing, so a gap is a hole in the tests."""
    for expected, (i, cell) in enumerate(code_cells(notebook), 1):
        if not source(cell).strip():
            yield i, "is an empty code cell; delete it"
        if cell.get("execution_count") != expected:
            yield i, f"has execution count {cell.get('execution_count')}, not {expected}; run `make execute`"
            return


# --- outputs -------------------------------------------------------------------------------------


def errors(notebook: dict) -> Findings:
    for i, cell in code_cells(notebook):
        if "raises-exception" in tags(cell):
            continue
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield i, f"ends in {output.get('ename')}; mend it, or tag it raises-exception if that is the lesson"


def stderr(notebook: dict) -> Findings:
    for i, cell in code_cells(notebook):
        for output in cell["outputs"]:
            if output.get("name") == "stderr":
                first = "".join(output["text"]).strip().splitlines()[:1]
                yield i, f"wrote to stderr ({' '.join(first)[:80]}); silence its cause, other versions write other text"


def machine_paths(notebook: dict) -> Findings:
    for i, cell in enumerate(notebook["cells"]):
        texts = [source(cell), *output_texts(cell)]
        found = next((m for text in texts if (m := UNIX_PATH.search(text))), None)
        if not found and cell["cell_type"] == "code":
            found = next((m for text in texts if (m := WINDOWS_PATH.search(text))), None)
        if found:
            yield i, f"holds the path of one machine ({found.group()}…); print a name relative to the repository"


def addresses(notebook: dict) -> Findings:
    for i, cell in code_cells(notebook):
        if any(re.search(r" at 0x[0-9a-f]{6,}", text) for text in output_texts(cell)):
            yield i, "shows an object's memory address, which differs in every run; print what matters instead"


def output_size(notebook: dict) -> Findings:
    for i, cell in code_cells(notebook):
        size = len(json.dumps(cell["outputs"]))
        if size > MAX_OUTPUT_BYTES:
            yield i, f"has {size:,} bytes of output; at most {MAX_OUTPUT_BYTES:,}: draw fewer points or print less"


# --- code ----------------------------------------------------------------------------------------


def plain_python(notebook: dict) -> Findings:
    for i, cell in code_cells(notebook):
        try:
            ast.parse(source(cell))
        except SyntaxError as error:
            magic = re.search(r"^\s*[!%]\S+|=\s*[!%]\w+", source(cell), re.M)
            if magic:
                yield i, f"uses {magic.group().strip()!r}; call Python instead, so that the cell is the same everywhere"
            else:
                yield i, f"is not plain Python (line {error.lineno}: {error.msg})"


def semicolons(notebook: dict) -> Findings:
    """Jupyter hides the value of a line that ends in a semicolon, nbval does not, and the comparison fails."""
    for i, cell in code_cells(notebook):
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(source(cell)).readline))
        except (tokenize.TokenError, IndentationError, SyntaxError):
            continue  # reported by plain_python
        skip = (tokenize.COMMENT,)
        tokens = [token for token in tokens if token.type not in skip]
        ends = (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER)
        if any(a.string == ";" and b.type in ends for a, b in zip(tokens, tokens[1:], strict=False)):
            yield (
                i,
                "has a line that ends in a semicolon; assign the value to a name, or call a helper that returns None",
            )


def child_output(notebook: dict) -> Findings:
    """What a child process writes by itself is stored by Jupyter but not seen by nbval."""
    for i, cell in code_cells(notebook):
        starts = re.search(r"\bsubprocess\.(run|call|check_call|Popen)\b|\bos\.system\b", source(cell))
        if starts and "capture_output=True" not in source(cell):
            yield i, f"lets {starts.group()} write to the page; use utils.launch, or capture_output=True and print"


def cell_length(notebook: dict) -> Findings:
    for i, cell in code_cells(notebook):
        lines = [line for line in source(cell).splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if len(lines) > MAX_CODE_LINES and not tags(cell) & UNSEEN_CODE:
            yield i, f"has {len(lines)} lines of code, at most {MAX_CODE_LINES}; split it, or tag plotting hide-input"


# --- tags and figures ----------------------------------------------------------------------------


def tag_vocabulary(notebook: dict) -> Findings:
    for i, cell in enumerate(notebook["cells"]):
        unknown = sorted(tags(cell) - TAGS)
        if unknown:
            yield i, f"has the tag {', '.join(unknown)}; the tags are {', '.join(sorted(TAGS))}"


def live_cells(notebook: dict) -> Findings:
    """What a live cell prints depends on the machine; the next cell must say what does not, and is compared."""
    cells = code_cells(notebook)
    for position, (i, cell) in enumerate(cells):
        live, ignored = "live" in tags(cell), "nbval-ignore-output" in tags(cell)
        if live != ignored:
            have, lack = ("live", "nbval-ignore-output") if live else ("nbval-ignore-output", "live")
            yield i, f"has the tag {have} without {lack}; a cell has both or neither"
        if not live:
            continue
        following = cells[position + 1][1] if position + 1 < len(cells) else None
        if following is None or "nbval-ignore-output" in tags(following):
            yield i, "is live and no compared code cell follows; add one that asserts what must hold on every machine"
        elif "assert" not in source(following) or not following["outputs"]:
            yield i, "is live, and the code cell after it must assert what holds everywhere and print a fixed line"


def figures(notebook: dict) -> Findings:
    for i, cell in code_cells(notebook):
        shown = images(cell)
        if not shown:
            continue
        if len(shown) > 1:
            yield i, f"shows {len(shown)} figures; one a cell, so that each has its own caption and number"
        mystnb = cell["metadata"].get("mystnb", {})
        figure = mystnb.get("figure", {})
        if not figure.get("caption", "").strip():
            yield i, "shows a figure without a caption; set mystnb.figure.caption in the cell's metadata"
        if not figure.get("name", "").startswith("fig-"):
            yield i, "shows a figure without a name; set mystnb.figure.name to 'fig-…' in the cell's metadata"
        if not mystnb.get("image", {}).get("alt", "").strip():
            yield i, "shows a figure without alternative text; set mystnb.image.alt in the cell's metadata"


# --- the shape of the page -----------------------------------------------------------------------


def opening(notebook: dict) -> Findings:
    first = notebook["cells"][0] if notebook["cells"] else None
    if first is None or first["cell_type"] != "markdown" or not re.search(r"^# \S", source(first), re.M):
        yield 0, "must be Markdown with the title (`# …`) as its first heading"
        return
    before_sections = ""
    for _, cell in markdown_cells(notebook):
        head, *section = re.split(r"^## ", source(cell), maxsplit=1, flags=re.M)
        before_sections += head + "\n"
        if section:
            break
    for lead in LEADS:
        if f"**{lead}**" not in before_sections:
            yield None, f"does not say `**{lead}**` before its first section"


def closing(notebook: dict) -> Findings:
    text = "\n".join(source(cell) for _, cell in markdown_cells(notebook))
    headings = re.findall(r"^## +(.+?)\s*$", text, re.M)
    missing = [section for section in CLOSING_SECTIONS if section not in headings]
    if missing:
        yield None, f"lacks the section {', '.join(f'`## {section}`' for section in missing)}"
    elif headings[-3:] != list(CLOSING_SECTIONS):
        yield None, f"must end with the sections {', '.join(CLOSING_SECTIONS)}, in this order"


def exercises(notebook: dict) -> Findings:
    """Every exercise has a collapsed solution, and a cell of the solution checks its answer."""
    asked: dict[str, int] = {}
    solved: set[str] = set()
    open_block: tuple[str, int] | None = None
    checked = True
    for i, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            checked = True
            continue
        text = source(cell)
        events = sorted([*FENCE.finditer(text), *END_FENCE.finditer(text)], key=lambda match: match.start())
        for number, match in enumerate(events):
            kind = match.group(1)
            stop = events[number + 1].start() if number + 1 < len(events) else len(text)
            body = text[match.start() : stop]
            if match.re is END_FENCE:
                if open_block is None or open_block[0] != kind:
                    yield i, f"ends a {kind} that was not started"
                elif kind == "solution" and not checked:
                    yield open_block[1], "starts a solution that no code cell checks; add one before its end"
                open_block = None
            elif kind.startswith("exercise"):
                label = LABEL_OPTION.search(body)
                if not label or not label.group(1).startswith("ex-"):
                    yield i, "has an exercise without `:label: ex-…`"
                else:
                    asked[label.group(1)] = i
            else:
                solved.add(match.group(2))
                if not re.search(r"^\s*:class:.*\bdropdown\b", body, re.M):
                    yield i, f"shows the solution of {match.group(2)} unfolded; add `:class: dropdown`"
                if kind == "solution":
                    yield i, f"solves {match.group(2)} in one fence; use solution-start, a code cell, solution-end"
            if kind.endswith("-start"):
                if open_block is not None:
                    yield open_block[1], f"starts a {open_block[0]} that is not ended before the next one starts"
                open_block = (kind.removesuffix("-start"), i)
                checked = False
    if open_block is not None:
        yield open_block[1], f"starts a {open_block[0]} that is never ended"
    if not asked:
        yield None, "has no exercise"
    for label in sorted(asked.keys() - solved):
        yield asked[label], f"asks {label}, and no solution names it"
    for label in sorted(solved - asked.keys()):
        yield None, f"solves {label}, and no exercise has this label"


RULES = (
    format_version,
    kernel,
    execution_counts,
    errors,
    stderr,
    machine_paths,
    addresses,
    output_size,
    plain_python,
    semicolons,
    child_output,
    cell_length,
    tag_vocabulary,
    live_cells,
    figures,
    opening,
    closing,
    exercises,
)


def lint_notebook(notebook: dict, name: str) -> list[Finding]:
    """Return everything to mend in one notebook, given as parsed JSON."""
    return [
        Finding(name, None if cell is None else cell + 1, rule.__name__, message)
        for rule in RULES
        for cell, message in rule(notebook)
    ]


def read(path: Path) -> dict:
    """Parse the notebook at `path`. Raises ValueError when it is not a notebook."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"], notebook["metadata"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is not a notebook: {error}") from error
    return notebook


def contents(toc: dict) -> list[str]:
    """Return every page that a parsed _toc.yml names, in order."""
    pages = [toc["root"]]

    def walk(node):
        if isinstance(node, dict):
            if "file" in node:
                pages.append(node["file"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(toc)
    return pages


def lint_book(root: Path) -> list[Finding]:
    """Return what is wrong between the chapters of the book at `root`: its contents, and labels used twice."""
    findings = []
    listed = contents(yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8")))
    present = {
        path.relative_to(root).with_suffix("").as_posix(): path.name
        for pattern in ("*.ipynb", "*.md")
        for path in sorted((root / "chapters").glob(pattern))
    }
    for page in sorted(present.keys() - set(listed)):
        findings.append(Finding(present[page], None, "toc", f"is not in the book; add `- file: {page}` to _toc.yml"))
    for page in sorted(set(listed) - present.keys()):
        findings.append(Finding("_toc.yml", None, "toc", f"names {page}, which does not exist"))

    first_use: dict[str, str] = {}
    for path in sorted((root / "chapters").glob("*.ipynb")):
        for i, cell in code_cells(read(path)):
            label = cell["metadata"].get("mystnb", {}).get("figure", {}).get("name")
            if label and label in first_use:
                message = f"names its figure {label!r} like {first_use[label]}; choose another name"
                findings.append(Finding(path.name, i + 1, "figure_names", message))
            elif label:
                first_use[label] = f"{path.name}, cell {i + 1}"
    return findings


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments] or sorted((ROOT / "chapters").glob("*.ipynb"))
    findings = [finding for path in paths for finding in lint_notebook(read(path), path.name)] + lint_book(ROOT)
    for finding in findings:
        print(finding)
    print(f"{len(paths)} notebooks, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
