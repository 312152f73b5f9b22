"""The one exception for a mistake that the user can mend."""


class UserError(Exception):
    """Bad input: the message says what was found, what was expected, where, and what to do.

    The command line prints the message alone, without a traceback, and exits with 2.
    """
