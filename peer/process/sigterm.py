"""A SIGTERM that comes before the daemon heeds signals (signals.py), at its start.

It ends the process. In a container that is process 1, for which the kernel knows no default: what
it has no handler for is lost. So there is one from the first line on, and none comes between an
`exec` and that.
"""

import os
import signal

from peer.options.exit_codes import ExitCode


def end_on_sigterm() -> None:
    """From now on SIGTERM ends the process at once, also one that was held back."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.TERMINATED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def hold_back_sigterm() -> None:
    """Keep SIGTERM for `end_on_sigterm` of the program that this process is about to become."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
