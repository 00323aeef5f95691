"""Options of pytest that leave out tests of benches which nothing has changed for since a commit.

`.ci/run` uses it: these tests take minutes, and most changes are of what no bench imports. A test
stays if a module has changed that it imports, however indirectly; where it starts processes, or if
anything has changed beside modules, whatever has changed.

    python -m tests.unchanged_benches COMMIT
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = ROOT / "tests" / "bench"
PACKAGES: Final = ("bench", "demo", "peer", "protocol", "simulation")
NO_BENCH_READS: Final = ("docs/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
OTHER_TESTS: Final = ("tests/e2e/", "tests/peer/", "tests/protocol/", "tests/pins/")
STARTS_PROCESSES: Final = ("mark.e2e", "subprocess")


def imported(path: Path) -> set[str]:
    """Names that it imports, and those that may be modules in what it imports from."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def reached(graph: grimp.ImportGraph, start: set[str]) -> set[str]:
    """Modules that are run where these are imported, the packages in which they lie too."""
    found, queue = set(start), list(start)
    while queue:
        name = queue.pop()
        beyond = {name.rpartition(".")[0], *graph.find_modules_directly_imported_by(name)}
        new = (beyond & graph.modules) - found
        found |= new
        queue += new
    return found


def unchanged(changed: Iterable[str]) -> list[Path]:
    """Test files that cannot see that these files, named from the root, have changed."""
    modules = set[str]()
    for name in changed:
        if name.endswith(".py") and name.startswith(tuple(f"{each}/" for each in PACKAGES)):
            modules.add(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        elif not name.startswith((*NO_BENCH_READS, *OTHER_TESTS)):
            return []
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    if not modules <= graph.modules:
        return []  # one is gone
    shared = set[str]().union(*(imported(p) for p in TESTS.glob("*.py") if p.name[:5] != "test_"))

    def sees(path: Path) -> bool:
        if any(each in path.read_text() for each in STARTS_PROCESSES):
            return True
        return bool(modules & reached(graph, (imported(path) | shared) & graph.modules))

    return [path for path in sorted(TESTS.glob("test_*.py")) if not sees(path)]


def main(commit: str) -> None:
    command = ["git", "diff", "--name-only", "--no-renames", commit]
    ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    print(*(f"--ignore={path.relative_to(ROOT)}" for path in unchanged(ran.stdout.splitlines())))


if __name__ == "__main__":
    main(sys.argv[1])
