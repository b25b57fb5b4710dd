"""Errors that the person who gave the input can correct.

Only the standard library is imported: the command line, the notebooks and the calculator page
run this file unchanged.
"""

from __future__ import annotations


class InputError(ValueError):
    """Input that its author can correct.

    `errors` holds one line per problem. A line names the field, shows the value and says what is
    allowed. `str(error)` is those lines joined, so that an uncaught one still reads well.
    """

    def __init__(self, *errors: str):
        super().__init__("\n".join(errors))
        self.errors = list(errors)


def did_you_mean(given: str, known) -> str:
    """The end of an error line that suggests the names nearest to `given`, or "" if none is near.

    >>> did_you_mean("lama-3.1-8B", ["llama-3.1-8b", "gpt2-1.5b"])
    '; did you mean llama-3.1-8b?'
    >>> did_you_mean("xyz", ["llama-3.1-8b"])
    ''
    """
    import difflib  # here, because it is slow to import in the browser and seldom needed

    near = difflib.get_close_matches(given.lower(), known, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
