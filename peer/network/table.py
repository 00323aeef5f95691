"""The process of the directory's table; not for people.

python -m peer.network.table SOCKET_FD PEER_ID
"""

import signal
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Final

NOT_RUN: Final = ("hivemind", "hivemind.dht", "hivemind.utils")
"""Packages of hivemind whose modules we want, and not what their `__init__` imports: torch, scipy,
pydantic. With them this process takes 2.8 s of a processor and 188 MB, without them 0.2 and 21."""
UTILS: Final = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": ("get_dht_time",),
}
"""Names that these modules look for in `hivemind.utils`, and where they stand."""


def take_modules_alone() -> None:
    """Make hivemind's modules importable one by one."""
    for name in NOT_RUN:
        spec = find_spec(name)
        assert spec is not None
        sys.modules[name] = module = module_from_spec(spec)
        front, _, last = name.rpartition(".")
        if front:
            setattr(sys.modules[front], last, module)
    for source, names in UTILS.items():
        found = vars(import_module(f"hivemind.utils.{source}"))
        vars(sys.modules["hivemind.utils"]).update({name: found[name] for name in names})


def main() -> None:
    # Ctrl+C goes to the whole terminal, a service manager's SIGTERM to all processes: the daemon
    # ends us when it no longer needs the directory.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    take_modules_alone()
    from .dht_node import run_table

    run_table(int(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    main()
