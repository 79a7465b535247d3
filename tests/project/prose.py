"""Habits of prose, which tests count in pages, docstrings and comments."""

import re


def habits_in(texts, habits):
    """Returns the sentences that have one of the habits, with its name."""
    return [
        (habit, text[max(0, found.start() - 40) : found.end() + 40])
        for text in texts
        for habit, pattern in habits.items()
        for found in re.finditer(pattern, text)
    ]
