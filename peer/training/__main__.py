"""The child processes of peer/training/process.py; not for people.

python -m peer.training train --socket FD --slow FD --codes FD
python -m peer.training create --socket FD --weights FD
"""

import argparse
import signal
import sys

from .channel import SocketChannel


def main() -> int:
    """Run one child. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m peer.training", description=__doc__)
    parser.add_argument("task", choices=("train", "create"))
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--weights", type=int, default=-1)
    parser.add_argument("--slow", type=int, default=-1)
    parser.add_argument("--codes", type=int, default=-1)
    arguments = parser.parse_args()
    # Ctrl+C goes to the whole terminal; it is the daemon's to handle, which then stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The channel first: it ends this process when the daemon goes, also during the slow imports
    # below.
    channel = SocketChannel(arguments.socket)
    from . import child

    if arguments.task == "create":
        return child.create(channel, arguments.weights)
    return child.train(channel, arguments.slow, arguments.codes)


if __name__ == "__main__":
    sys.exit(main())
