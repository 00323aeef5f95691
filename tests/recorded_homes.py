"""The homes in tests/homes, unpacked; what each is of is written down here."""

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "homes"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A home, and where its checkpoint stands."""

    name: str
    run_id: str
    part: str
    step: int

    def unpack(self, where: Path) -> Path:
        """The home, in a new folder of this one."""
        home = where / self.name
        with tarfile.open(FOLDER / f"{self.name}.tar.gz") as archive:
            archive.extractall(home, filter="data")
        return home


RECORDED: Final = (
    Recorded("diloco-a", "c9e6826f56067bbc307fe773ce890561", "model", 880),
    Recorded("diloco-b", "c9e6826f56067bbc307fe773ce890561", "model", 860),
    Recorded("pairs-a", "befd532b2df1531f51452472407daecf", "model", 1071),
    Recorded("pairs-b", "befd532b2df1531f51452472407daecf", "model", 1068),
    Recorded("stages-a", "55bc81747579c01e5d8699c33f681103", "stage/0", 96),
    Recorded("stages-b", "55bc81747579c01e5d8699c33f681103", "stage/1", 83),
)
