"""How a notebook is written to disk, so that two writers of the same content write the same bytes."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import nbformat

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

CELL_METADATA = ("tags", "mystnb")


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Drop what depends on the editor or the machine; keep sources, outputs, tags and figure metadata."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in CELL_METADATA if cell.metadata.get(key)})
        cell.setdefault("id", uuid4().hex[:8])
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Normalise and write atomically: a reader of `path` sees the old notebook or the new one."""
    normalise(notebook)
    unfinished = path.with_name(f".{path.name}.part")
    nbformat.write(notebook, unfinished)
    os.replace(unfinished, path)
