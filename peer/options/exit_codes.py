"""How loco-peer ends, as the shell sees it: the closed list."""

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    """Done, or ended gracefully on the first SIGINT or SIGTERM."""
    FAILURE = 1
    """Any other failure."""
    USAGE = 2
    """Wrong usage, an invalid run spec, or a home, device or model that cannot be used."""
    REFUSED = 3
    """The swarm refused us; the reason is printed."""
    NO_DAEMON = 4
    INTERRUPTED = 130
    """A second signal, SIGINT, ended us at once."""
    TERMINATED = 143
    """A second signal, SIGTERM, ended us at once."""
