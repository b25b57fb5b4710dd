"""Write a new chapter in the shape of all the others: `python -m tools.new_chapter 05_topic "Title of the topic"`.

Each kind of cell but the recorded one is there, with its tags and metadata, and the page passes the lint as soon as
it is executed.
"""

from __future__ import annotations

import re
import sys

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools.environment import CHAPTERS
from tools.notebook_files import METADATA, write

OPENING = """\
(ch-SLUG)=
# TITLE

**Question.** What does the reader want to know, in one sentence?"""

GOALS = """\
**Goals.** After this chapter you can

- derive one number,
- measure the same number and explain the difference.

**Prerequisites.** {doc}`00_overview`. **Time.** 30 minutes. **Runs on.** Any machine."""

IMPORTS = """\
from utils import models, plots

plots.style()"""

PREDICTION = """\
## Two bytes a parameter

In {term}`bf16` a {term}`parameter` takes two bytes, so the parameters of Llama-3.1-8B take

```{math}
:label: eq-SLUG-parameters
M = 2 \\cdot P
```

bytes, where $P$ is the number of parameters."""

ARITHMETIC = """\
model = models.get("llama-3.1-8b")
parameter_bytes = 2 * model.parameters
print(f"{model.parameters:,} parameters, {parameter_bytes:,} bytes")"""

READING = """\
Equation {eq}`eq-SLUG-parameters` gives the bytes of the parameters alone; {numref}`fig-SLUG-parameters` shows how
they compare with a GPU.

:::{admonition} Takeaway
:class: takeaway
Two bytes a parameter is where the count starts, not where it ends.
:::"""

FIGURE = """\
import matplotlib.pyplot as plt

fig, ax = plt.subplots(figsize=(5.2, 1.8))
plots.stacked_terms(
    ax,
    {"Llama-3.1-8B": {"parameters": parameter_bytes}},
    capacities={"80 GiB": 80 * 2**30},
)"""

LIVE = """\
import torch

layer = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
held = sum(p.numel() * p.element_size() for p in layer.parameters())
print(f"{held:,} bytes, torch {torch.__version__}")"""

LIVE_CHECK = """\
assert held == 2 * 256 * 256
print("two bytes a parameter")"""

EXERCISES = """\
## Exercises

```{exercise}
:label: ex-SLUG-fp32

How many bytes do the same parameters take in {term}`fp32`?
```"""

SOLUTION_START = """\
```{solution-start} ex-SLUG-fp32
:class: dropdown
```

Four bytes a parameter, twice as many as in bf16."""

SOLUTION_CHECK = """\
assert 4 * model.parameters == 2 * parameter_bytes
print(f"{4 * model.parameters:,} bytes")"""

SOLUTION_END = """\
```{solution-end}
```"""

RECAP = """\
## Recap

- The number follows from the shapes.
- The measurement agrees, and where it does not, the chapter says why."""

FURTHER = """\
## Further reading

- {cite:t}`vaswani2017attention`: the architecture that every model here descends from."""


def chapter(slug: str, title: str) -> nbformat.NotebookNode:
    """Return a notebook without outputs.

    `slug` names the chapter in labels: `ch-<slug>`, `fig-<slug>-…`, `eq-<slug>-…`, `ex-<slug>-…`.
    """

    def text(source: str) -> nbformat.NotebookNode:
        return new_markdown_cell(source.replace("SLUG", slug).replace("TITLE", title))

    def code(source: str, **metadata) -> nbformat.NotebookNode:
        return new_code_cell(source, metadata=metadata)

    figure = {
        "figure": {"caption": "Parameters of Llama-3.1-8B in bf16 against one GPU.", "name": f"fig-{slug}-parameters"},
        "image": {"alt": "A bar of the parameter bytes and a line at 80 GiB."},
    }
    cells = [
        text(OPENING),
        text(GOALS),
        code(IMPORTS),
        text(PREDICTION),
        code(ARITHMETIC),
        text(READING),
        code(FIGURE, tags=["hide-input"], mystnb=figure),
        code(LIVE, tags=["live", "nbval-ignore-output"]),
        code(LIVE_CHECK),
        text(EXERCISES),
        text(SOLUTION_START),
        code(SOLUTION_CHECK),
        text(SOLUTION_END),
        text(RECAP),
        text(FURTHER),
    ]
    for number, cell in enumerate(cells):
        cell.id = f"{slug}-{number:02d}"
    return new_notebook(cells=cells, metadata=METADATA)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or not re.fullmatch(r"\d\d_[a-z][a-z0-9_]*", arguments[0]):
        print('usage: python -m tools.new_chapter 05_data_parallelism "Data parallelism"', file=sys.stderr)
        return 2
    name, title = arguments
    path = CHAPTERS / f"{name}.ipynb"
    if path.exists():
        print(f"{path.relative_to(CHAPTERS.parent)} exists already", file=sys.stderr)
        return 2
    write(chapter(name[3:].replace("_", "-"), title), path)
    print(f"wrote {path.relative_to(CHAPTERS.parent)}; add it to _toc.yml, then: make execute CHAPTER={name[:2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
