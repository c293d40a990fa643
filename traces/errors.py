"""The one exception that every command turns into a single line and an exit code, 2 unless it says otherwise."""

from typing import ClassVar


class InputError(Exception):
    """What the user gave cannot be used; the message names the file or flag, what is wrong and what to do."""

    exit_code: ClassVar[int] = 2
