"""Eight small texts, for a corpus that a test can train on."""

from pathlib import Path


def small_texts(folder: Path, times: int) -> str:
    """Write texts of so many sentences; the source that a run spec names them by."""
    folder.mkdir(exist_ok=True)
    for name in "abcdefgh":
        (folder / f"{name}.txt").write_text(f"{name} says hello to the world again. " * times)
    return f"text:{folder}/*.txt"
