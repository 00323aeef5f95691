"""Variables that Kubernetes sets for the services of a namespace, and nobody has asked for.

A service called `loco-peer` brings `LOCO_PEER_SERVICE_HOST`, `LOCO_PEER_PORT=tcp://...` and more
into every pod beside it. They are no settings of ours, and are passed over.
"""

import re
from typing import Final

_NAMES: Final = re.compile(
    r"\w+_SERVICE_HOST|\w+_SERVICE_PORT(_\w+)?|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
_PORT_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """Whether an environment variable is one of these."""
    link = name.endswith("_PORT") and _PORT_VALUE.match(value)
    return bool(link or _NAMES.fullmatch(name))
