"""Writes the errors and messages of `mistakes.md` again: `python -m docs.mistakes`, after a change.

A new mistake is a new row of the page, with a line of code in its first cell.
"""

from testbed.mistakes import FIRST_ERROR, PAGE, ROW, names


def error_of(code: str) -> Exception:
    """Returns the error that a line of code raises."""
    try:
        eval(code, dict(names()))
    except (AssertionError, TypeError, ValueError) as error:
        return error
    raise RuntimeError(f"{code} raised nothing")


def in_markdown(message: str) -> str:
    """Returns a message as a cell of the page has it."""
    words = message.replace("|", "\\|").replace("*", "\\*").replace("__", "\\_\\_")
    return words.replace("\n", " ")


def row(code: str) -> str:
    """Returns the row of a line of code."""
    error = error_of(code)
    return f"| `{code}` | {type(error).__name__} | {in_markdown(str(error))} |"


def rewritten(page: str) -> str:
    """Returns the page with the errors and messages that its lines of code raise."""
    before, heading, errors = page.partition(FIRST_ERROR)
    return before + heading + ROW.sub(lambda found: row(found[1]), errors)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
