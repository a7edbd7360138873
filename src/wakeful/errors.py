"""The one exception a user is meant to read."""


class WakefulError(ValueError):
    """Something the user can mend: the message says what is wrong and what to do.

    The command line prints it as one line and exits with status 1; any other exception is a bug
    and keeps its traceback.
    """


class Interrupted(WakefulError):
    """Work was stopped from outside and saved what it had; the message says how to go on."""
