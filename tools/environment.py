"""The environment of every kernel of the book, whoever starts it: `make execute`, or pytest with nbval."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "chapters"

CELL_TIMEOUT_S = 300

VARIABLES = {
    # A chapter uses two threads on every machine: several ranks may share the cores, and sums keep their order.
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    # Models are built from their configuration; nothing is fetched.
    "HF_HUB_OFFLINE": "1",
    # Notices differ between versions of a library, and a page shows none of them.
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning,ignore:IProgress not found",
}


def apply() -> None:
    """Set the variables for this process and its children; a value that the caller has set is kept.

    `PYTHONPATH` gets the repository's root, because a kernel starts in `chapters/` and `utils` need not be installed.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
