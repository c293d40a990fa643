"""The one exception that every command turns into a single line and exit code 2."""


class InputError(Exception):
    """What the user gave cannot be used; the message names the file or flag, what is wrong and what to do."""
