"""Settings for `pytest tests/` and `pytest --nbval chapters/`."""

from __future__ import annotations

from tools import environment

environment.apply()


def pytest_configure(config):
    """Let `pytest --nbval chapters/` run the notebooks in this environment's kernel, with a limit for each cell.

    nbval's own limit is 2000 s, which is also how long it waits for a kernel that has died.
    """
    if not hasattr(config.option, "nbval_cell_timeout"):
        return
    if config.option.nbval_cell_timeout == 2000:
        config.option.nbval_cell_timeout = environment.CELL_TIMEOUT_S
    if not config.option.nbval_kernel_name:
        config.option.nbval_current_env = True


def pytest_collectstart(collector):
    """Leave stderr out of nbval's comparison: a library of another version warns of other things.

    A committed notebook has none (tests/test_notebooks.py), so there is nothing to compare with.
    """
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
