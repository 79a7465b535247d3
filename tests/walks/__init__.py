"""Programs that were written from the pages alone, as a new user would."""
