"""The chapters keep the rules of tools/lint.py, and every rule catches the notebook that breaks it."""

from __future__ import annotations

import copy
import json

import pytest

from tools import lint
from tools.environment import CHAPTERS, ROOT
from tools.execute import select
from tools.new_chapter import chapter
from tools.notebook_files import write

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="


# --- the chapters that are there -----------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CHAPTERS.glob("*.ipynb")), ids=lambda path: path.name)
def test_chapter(path):
    findings = lint.lint_notebook(lint.read(path), path.name)
    assert not findings, "\n" + "\n".join(map(str, findings))


def test_book():
    findings = lint.lint_book(ROOT)
    assert not findings, "\n" + "\n".join(map(str, findings))


# --- the rules -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> dict:
    """The template chapter as it lies on disk, with outputs as an execution leaves them."""
    path = tmp_path_factory.mktemp("book") / "05_example.ipynb"
    write(chapter("example", "An example"), path)
    notebook = json.loads(path.read_text())
    for count, (_, cell) in enumerate(lint.code_cells(notebook), 1):
        cell["execution_count"] = count
        if "print(" in lint.source(cell):
            cell["outputs"] = [stream("a line\n")]
    figure = by_tag(notebook, "hide-input")
    figure["outputs"] = [
        {"output_type": "display_data", "data": {"image/png": PIXEL, "text/plain": ["<Figure>"]}, "metadata": {}}
    ]
    return notebook


@pytest.fixture
def notebook(template) -> dict:
    return copy.deepcopy(template)


def stream(text: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": [text]}


def by_tag(notebook: dict, tag: str) -> dict:
    return next(cell for cell in notebook["cells"] if tag in lint.tags(cell))


def by_text(notebook: dict, text: str) -> dict:
    return next(cell for cell in notebook["cells"] if text in lint.source(cell))


def after(notebook: dict, cell: dict) -> dict:
    return notebook["cells"][notebook["cells"].index(cell) + 1]


def replace(notebook: dict, old: str, new: str) -> None:
    cell = by_text(notebook, old)
    cell["source"] = [lint.source(cell).replace(old, new)]


def findings(notebook: dict) -> list[tuple[str, str]]:
    return [(finding.rule, str(finding)) for finding in lint.lint_notebook(notebook, "05_example.ipynb")]


def first_code(notebook: dict) -> dict:
    return lint.code_cells(notebook)[0][1]


def test_the_template_passes(notebook):
    assert findings(notebook) == []


def set_source(text):
    def edit(notebook):
        first_code(notebook)["source"] = [text]

    return edit


def set_outputs(*outputs):
    def edit(notebook):
        first_code(notebook)["outputs"] = list(outputs)

    return edit


def set_tags(*tags):
    def edit(notebook):
        first_code(notebook)["metadata"]["tags"] = list(tags)

    return edit


def figure_without(*keys):
    def edit(notebook):
        entry = by_tag(notebook, "hide-input")["metadata"]["mystnb"]
        for key in keys[:-1]:
            entry = entry[key]
        del entry[keys[-1]]

    return edit


def swap(old, new):
    return lambda notebook: replace(notebook, old, new)


def drop_cell(text):
    return lambda notebook: notebook["cells"].remove(by_text(notebook, text))


def second_image(notebook):
    outputs = by_tag(notebook, "hide-input")["outputs"]
    outputs.append(copy.deepcopy(outputs[0]))


def live_at_the_end(notebook):
    live = copy.deepcopy(by_tag(notebook, "live"))
    live.update(id="another", execution_count=len(lint.code_cells(notebook)) + 1)
    notebook["cells"].append(live)


def two_live_cells(notebook):
    live = by_tag(notebook, "live")
    after(notebook, live)["metadata"]["tags"] = ["live", "nbval-ignore-output"]


def silent_check(notebook):
    after(notebook, by_tag(notebook, "live"))["outputs"] = []


def check_without_assert(notebook):
    after(notebook, by_tag(notebook, "live"))["source"] = ["print('fine')"]


def recap_last(notebook):
    notebook["cells"].append(notebook["cells"].pop(notebook["cells"].index(by_text(notebook, "## Recap"))))


def section_before_goals(notebook):
    goals = notebook["cells"].index(by_text(notebook, "**Goals.**"))
    notebook["cells"].insert(goals, {"cell_type": "markdown", "id": "early", "metadata": {}, "source": ["## Early"]})


SOLUTION_START = "```{solution-start} ex-example-fp32\n:class: dropdown\n```"
SOLUTION_IN_ONE_FENCE = "```{solution} ex-example-fp32\n:class: dropdown\nFour.\n```"

# rule, how to break it, what the message must say
BROKEN = [
    ("format_version", lambda nb: nb.update(nbformat_minor=4), "4.5"),
    ("format_version", lambda nb: nb["cells"][3].pop("id"), "cell 4: has no id"),
    ("format_version", lambda nb: nb["cells"][3].update(id=nb["cells"][2]["id"]), "cell 4: has the id"),
    ("kernel", lambda nb: nb["metadata"]["kernelspec"].update(name="cuda-env"), "'cuda-env'"),
    ("kernel", lambda nb: nb["metadata"].clear(), "'python3'"),
    ("execution_counts", lambda nb: first_code(nb).update(execution_count=None), "cell 3: has execution count None"),
    ("execution_counts", lambda nb: first_code(nb).update(execution_count=7), "execution count 7, not 1"),
    ("execution_counts", set_source("  \n"), "empty code cell"),
    ("errors", set_outputs({"output_type": "error", "ename": "KeyError", "evalue": "", "traceback": []}), "KeyError"),
    ("stderr", set_outputs(stream("FutureWarning: gone soon", "stderr")), "FutureWarning"),
    ("machine_paths", set_outputs(stream("saved to /home/ann/run.csv")), "/home"),
    *[
        ("machine_paths", set_source(f"open('/{top}/rows.csv')"), f"/{top}")
        for top in ("home", "root", "work", "tmp", "Users", "mnt")
    ],
    ("machine_paths", set_source(r"open('C:\\Users\\ann')"), "C:"),
    ("machine_paths", swap("The number follows", "In /home/ann the number follows"), "cell 14"),
    ("addresses", set_outputs(stream("<object at 0x7f3a12345678>")), "memory address"),
    ("output_size", set_outputs(stream("x" * 500_001)), "500,000"),
    ("plain_python", set_source("!nvidia-smi"), "'!nvidia-smi'"),
    ("plain_python", set_source("%matplotlib inline"), "'%matplotlib'"),
    ("plain_python", set_source("files = !ls"), "!ls"),
    ("plain_python", set_source("model?"), "not plain Python"),
    ("semicolons", set_source("ax = 1\nax;"), "semicolon"),
    ("semicolons", set_source("ax = 1;  # quiet"), "semicolon"),
    ("child_output", set_source("import subprocess\nsubprocess.run(['ls'])"), "subprocess.run"),
    ("child_output", set_source("import os\nos.system('ls')"), "os.system"),
    ("cell_length", set_source("x = 1\n" * 16), "16 lines"),
    ("tag_vocabulary", set_tags("slow"), "the tag slow"),
    ("tag_vocabulary", set_tags("nbval-skip"), "the tag nbval-skip"),
    ("live_cells", set_tags("live"), "live without nbval-ignore-output"),
    ("live_cells", set_tags("nbval-ignore-output"), "nbval-ignore-output without live"),
    ("live_cells", live_at_the_end, "no compared code cell follows"),
    ("live_cells", two_live_cells, "no compared code cell follows"),
    ("live_cells", silent_check, "print a fixed line"),
    ("live_cells", check_without_assert, "assert"),
    ("figures", figure_without("figure", "caption"), "caption"),
    ("figures", figure_without("figure", "name"), "fig-"),
    ("figures", figure_without("image", "alt"), "alternative text"),
    ("figures", lambda nb: by_tag(nb, "hide-input")["metadata"].pop("mystnb"), "caption"),
    ("figures", second_image, "2 figures"),
    ("opening", swap("# An example", "## An example"), "title"),
    ("opening", lambda nb: nb["cells"].pop(0), "title"),
    ("opening", swap("**Question.**", "Question."), "**Question.**"),
    ("opening", swap("**Goals.**", "Goals:"), "**Goals.**"),
    ("opening", swap("**Prerequisites.**", ""), "**Prerequisites.**"),
    ("opening", swap("**Time.**", ""), "**Time.**"),
    ("opening", swap("**Runs on.**", ""), "**Runs on.**"),
    ("opening", section_before_goals, "**Goals.**"),
    ("closing", swap("## Recap", "## Summary"), "`## Recap`"),
    ("closing", swap("## Further reading", "Reading"), "`## Further reading`"),
    ("closing", swap("## Exercises", "## Tasks"), "`## Exercises`"),
    ("closing", recap_last, "in this order"),
    ("exercises", drop_cell("{exercise}"), "has no exercise"),
    ("exercises", swap(":label: ex-example-fp32", ""), "without `:label: ex-…`"),
    ("exercises", swap("{solution-start} ex-example-fp32", "{solution-start} ex-other"), "no solution names it"),
    ("exercises", swap("{solution-start} ex-example-fp32", "{solution-start} ex-other"), "no exercise has this label"),
    ("exercises", swap(":class: dropdown", ""), "unfolded"),
    ("exercises", drop_cell("{solution-end}"), "never ended"),
    ("exercises", drop_cell("{solution-start}"), "not started"),
    ("exercises", drop_cell("assert 4 * model.parameters"), "no code cell checks"),
    (
        "exercises",
        swap("```{solution-start} ex-example-fp32\n:class: dropdown\n```", SOLUTION_IN_ONE_FENCE),
        "in one fence",
    ),
]


@pytest.mark.parametrize(("rule", "edit", "says"), BROKEN, ids=[f"{n}-{rule}" for n, (rule, *_) in enumerate(BROKEN)])
def test_a_broken_notebook_is_caught(notebook, rule, edit, says):
    edit(notebook)
    messages = [text for name, text in findings(notebook) if name == rule]
    assert any(says in text for text in messages), messages
    assert all(text.startswith("05_example.ipynb") for text in messages)


def test_every_rule_is_broken_once():
    assert {rule.__name__ for rule in lint.RULES} == {rule for rule, *_ in BROKEN}


ALLOWED = {
    "hidden plot code may be long": [set_source("x = 1\n" * 30), set_tags("hide-input")],
    "comments and blank lines are not code": [set_source("# why\n\n" * 20 + "x = 1")],
    "an error that is the lesson": [
        set_outputs({"output_type": "error", "ename": "RuntimeError", "evalue": "", "traceback": []}),
        set_tags("raises-exception"),
    ],
    "a path on the web": [swap("The number follows", "See https://example.org/tmp/page and a/home/b. It follows")],
    "a formula is no drive": [swap("The number follows", r"With $L:\Delta$ the number follows")],
    "a captured child": [set_source("import subprocess\nsubprocess.run(['ls'], capture_output=True)")],
    "a semicolon inside a string": [set_source("text = 'a;'")],
    "a remainder at the start of a line": [set_source("x = (7\n     % 2)")],
}


@pytest.mark.parametrize("edits", ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed(notebook, edits):
    for edit in edits:
        edit(notebook)
    assert findings(notebook) == []


# --- the book as a whole -------------------------------------------------------------------------


@pytest.fixture
def book(tmp_path, notebook):
    """A book of one chapter and a glossary, complete."""
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "05_example.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "chapters" / "glossary.md").write_text("# Glossary\n")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: chapters/05_example\n"
        "parts:\n- caption: Back\n  chapters:\n  - file: chapters/glossary\n"
    )
    return tmp_path


def test_a_complete_book_passes(book):
    assert lint.lint_book(book) == []


def test_a_chapter_outside_the_contents(book):
    (book / "chapters" / "stray.md").write_text("# Stray\n")
    (finding,) = lint.lint_book(book)
    assert finding.notebook == "stray.md" and "add `- file: chapters/stray` to _toc.yml" in finding.message


def test_contents_that_name_no_chapter(book):
    (book / "chapters" / "glossary.md").unlink()
    (finding,) = lint.lint_book(book)
    assert "_toc.yml: names chapters/glossary, which does not exist" in str(finding)


def test_two_figures_of_one_name(book, notebook):
    (book / "chapters" / "06_other.ipynb").write_text(json.dumps(notebook))
    findings = [str(finding) for finding in lint.lint_book(book)]
    assert any("06_other.ipynb, cell 7: names its figure 'fig-example-parameters' like 05" in text for text in findings)


def test_a_damaged_notebook_is_named(tmp_path):
    path = tmp_path / "07_broken.ipynb"
    path.write_text("{")
    with pytest.raises(ValueError, match="07_broken.ipynb is not a notebook"):
        lint.read(path)


# --- the tools -----------------------------------------------------------------------------------


def test_writing_twice_gives_the_same_bytes_and_no_editor_metadata(tmp_path):
    notebook = chapter("example", "An example")
    notebook.metadata["vscode"] = {"interpreter": "3.13.0"}
    notebook.cells[2].metadata.update({"scrolled": True, "execution": {"iopub.execute_input": "12:00"}})
    first, second = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    write(notebook, first)
    write(chapter("example", "An example"), second)
    assert first.read_bytes() == second.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_execute_refuses_a_chapter_that_does_not_exist():
    with pytest.raises(ValueError, match="no chapter starts with '99'"):
        select(["99"])
