"""Errors that a user can act on.

Every message is one line: what was found, what was needed, the next command. The command line prints it
without a traceback and exits with :attr:`HoverlensError.exit_status`.
"""

from __future__ import annotations


class HoverlensError(Exception):
    """The work itself failed (exit status 1)."""

    exit_status = 1


class BadInput(HoverlensError):
    """A file, argument or question that cannot be used (exit status 2)."""

    exit_status = 2


class Cancelled(HoverlensError):
    """The caller asked to stop; nothing was answered."""

    exit_status = 130
