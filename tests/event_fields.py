"""The fields of every event, as docs/events.md lists them."""

import re
from pathlib import Path

from peer.observe.event_names import EventName

_PAGE = (Path(__file__).resolve().parents[1] / "docs/events.md").read_text(encoding="utf-8")

FIELDS = {
    EventName(name): set(re.findall(r"(?:^|; )`(\w+)`: ", fields))
    for name, fields in re.findall(r"^\| `(\w+)` \| (.*) \|$", _PAGE, re.MULTILINE)
}
