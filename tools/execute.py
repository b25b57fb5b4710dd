"""Run chapters and store their outputs: `python -m tools.execute [03 ...]`; without a number, all of them.

One notebook at a time, because a chapter may need the whole GPU. A notebook is written only when all its cells ran.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from tools import environment
from tools.notebook_files import write


def select(prefixes: list[str]) -> list[Path]:
    """Return the chapters whose file name starts with one of `prefixes`, in reading order.

    Raises ValueError for a prefix that fits no chapter.
    """
    chapters = sorted(environment.CHAPTERS.glob("*.ipynb"))
    for prefix in prefixes:
        if not any(path.name.startswith(prefix) for path in chapters):
            raise ValueError(f"no chapter starts with {prefix!r}; there are {', '.join(p.stem for p in chapters)}")
    return [path for path in chapters if not prefixes or path.name.startswith(tuple(prefixes))]


def execute(path: Path) -> None:
    """Run the notebook at `path` in a fresh kernel and write its outputs back.

    Raises CellExecutionError, CellTimeoutError or DeadKernelError; the file is then unchanged.
    """
    notebook = nbformat.read(path, as_version=4)
    started = {"cell": 0}

    def announce(cell, cell_index):
        if cell.cell_type == "code":
            started["cell"] = cell_index + 1
            print(f" {cell_index + 1}", end="", flush=True)

    client = NotebookClient(
        notebook,
        timeout=environment.CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        coalesce_streams=True,
        record_timing=False,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        on_cell_start=announce,
    )
    print(f"{path.name}, {len(notebook.cells)} cells:", end="", flush=True)
    begin = time.monotonic()
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(f" failed in cell {started['cell']}", flush=True)
        raise error
    write(notebook, path)
    print(f" done, {time.monotonic() - begin:.0f} s", flush=True)


def main(arguments: list[str]) -> int:
    environment.apply()
    try:
        chapters = select(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failed = False
    for path in chapters:
        try:
            execute(path)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{error}\n{path.name} is unchanged", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
