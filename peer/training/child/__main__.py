"""The child processes of peer/training/child_process.py; not for people.

python -m peer.training.child SOCKET_FD
"""

import signal
import sys

from peer.runtime.imports import large_imports
from peer.training.pipe import SocketChannel


def main() -> int:
    # Ctrl+C goes to the whole terminal, and a service manager may tell all processes to end: the
    # daemon needs us for a last checkpoint, and then stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The channel first: it ends this process when the daemon goes, also during the slow imports.
    channel = SocketChannel(int(sys.argv[1]))
    with large_imports():
        from . import tasks

    return tasks.serve(channel)


if __name__ == "__main__":
    sys.exit(main())
