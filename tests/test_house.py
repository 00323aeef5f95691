"""The rules of the house (CONTRIBUTING.md), where no linter knows them."""

import ast
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 70
ROOMS = ("protocol", "peer", "simulation")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MEASURES = sorted(path for room in ("bench", "demo") for path in (ROOT / room).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def calls(tree: ast.Module) -> set[str]:
    """Dotted names of what is called, as written."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def mentioned(tree: ast.Module) -> set[str]:
    """Dotted names, called or handed on."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of the absolute imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names


def lines_of(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def unseeded_draws(tree: ast.Module) -> list[str]:
    """Uses of the random module other than a generator of one's own with a seed."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith("random.")
        and not (ast.unparse(node.func) == "random.Random" and node.args)
    ]


def test_there_is_code_to_check():
    assert len(SOURCES) > 20


# A rule is one test over all files, and says which break it: a test for each file and rule costs
# more than the rule.
def broken(paths: Iterable[Path], rule: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """What breaks a rule, by file; files that keep it are left out."""
    return {name_of(path): found for path in paths if (found := list(rule(path)))}


def too_long(path: Path) -> Iterator[str]:
    lines = len(text_of(path).splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{lines} lines"
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and lines_of(node) > MAX_FUNCTION_LINES
        ):
            yield f"{node.name}: {lines_of(node)} lines"


def test_files_and_functions_are_small():
    assert broken([*SOURCES, *MEASURES], too_long) == {}


def not_ascii_or_unfinished(path: Path) -> list[str]:
    return [
        *re.findall(r"[^\x00-\x7f]", text_of(path)),
        *re.findall(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", text_of(path)),
    ]


def test_source_is_ascii_and_finished():
    assert broken(SOURCES, not_ascii_or_unfinished) == {}


# Where the wall clock comes in.
WALL_CLOCK_DOORS = {"peer/network/directory.py"}
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}


def test_randomness_is_seeded():
    assert broken(SOURCES, lambda path: unseeded_draws(tree_of(path))) == {}


def test_the_wall_clock_has_no_other_door():
    assert {
        name_of(path) for path in SOURCES if mentioned(tree_of(path)) & WALL_CLOCKS
    } == WALL_CLOCK_DOORS


def executing_or_tracking(path: Path) -> list[str]:
    """What would make code of data, or hand a line to a shell; a tracker of shared memory."""
    return [
        *imported(tree_of(path)) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"},
        *calls(tree_of(path)) & {"torch.load", "torch.save", "eval", "exec", "compile"},
        *calls(tree_of(path)) & {"os.system", "os.popen", "subprocess.getoutput"},
        *re.findall(r"shell=True|trust_remote_code=True", text_of(path)),
        *(c for c in re.findall(r"np\.load\(.*", text_of(path)) if "allow_pickle=True" in c),
        *re.findall(r"^\s*(?:from|import) multiprocessing", text_of(path), re.MULTILINE),
    ]


def test_nothing_makes_code_of_data_and_no_shared_memory_tracker():
    assert broken(SOURCES, executing_or_tracking) == {}


# --- words ----------------------------------------------------------------------------------------

SPEECHLESS = re.compile(r"(Of|With whom|By|In which|As|To what)\b")
"""Beginnings of first lines that say what a thing belongs to, and not what it is or does."""


def docstrings(tree: ast.Module) -> list[str]:
    """Every docstring, those below constants and attributes among them."""
    return [
        " ".join(statement.value.value.split())
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])[)\"']* +\(?", text)


def ill_worded(tree: ast.Module) -> list[str]:
    """First lines that say no thing, and sentences that begin with "Who" and do not ask."""
    found = docstrings(tree)
    begun = [s for text in found for s in sentences(text) if re.match(r"(Who|Whoever)\b", s)]
    return [
        *(text[:80] for text in found if SPEECHLESS.match(text)),
        *(sentence[:80] for sentence in begun if not sentence.endswith("?")),
    ]


def test_docstrings_say_a_thing():
    assert broken([*SOURCES, *MEASURES], lambda path: ill_worded(tree_of(path))) == {}


def test_every_bound_of_the_protocol_is_enforced_somewhere():
    limits = ROOT / "protocol/limits.py"
    names = [
        node.target.id
        for node in tree_of(limits).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    elsewhere = "\n".join(text_of(path) for path in SOURCES if path != limits)
    assert names
    assert [name for name in names if not re.search(rf"\b{name}\b", elsewhere)] == []


# --- packaging ------------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*+]+", str(r.specifier)) for r in parsed), "one version each"
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in parsed}


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for: to build, run, test, lint and document."""
    groups = project()["dependency-groups"]
    lines = project()["project"]["dependencies"] + project()["build-system"]["requires"]
    lines += [line for name in ("test", "lint", "docs") for line in groups[name]]
    return [Requirement(line) for line in lines]


def closure(start: list[Requirement]) -> set[str]:
    """Names of everything that would be installed on this platform."""
    found: set[str] = set()
    queue = list(start)
    while queue:
        requirement = queue.pop()
        extras = requirement.extras or {""}
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate()
        if not applies or (name in found and not requirement.extras):
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            lines = []  # not for this platform
        for line in lines:
            child = Requirement(line)
            if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras):
                child.marker = None
                queue.append(child)
    return found


CUDA_PARTS = re.compile(r"(nvidia-|cuda-|triton$)")


def test_constraints_pin_everything_and_nothing_else():
    needed = {name for name in closure(wanted()) if not CUDA_PARTS.match(name)}
    assert needed - set(pins()) == set(), "not pinned"
    assert set(pins()) - needed - {"pip", "wheel"} == set(), "pinned, but nobody needs it"


def test_pins_are_inside_the_ranges_of_pyproject():
    outside = [str(r) for r in wanted() if pins()[canonicalize_name(r.name)] not in r.specifier]
    assert outside == []


def test_every_dependency_has_a_lower_bound():
    assert [str(r) for r in wanted() if ">=" not in str(r.specifier)] == []


def test_every_ignored_lint_rule_has_a_reason():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[tool.ruff.lint]")[1].split("[tool.ruff.lint.pydocstyle]")[0]
    rules = re.findall(r'^  "[A-Z]+\d*",.*$', section, re.MULTILINE)
    assert len(rules) > 10
    assert [rule for rule in rules if not re.search(r"# \S.{10,}$", rule)] == []


def test_no_process_of_ours_imports_from_the_folder_where_a_user_starts():
    """Somebody in a checkout of another version would run parts of that."""
    ours = re.compile(r'sys\.executable,\s*"(-\w)"')
    started = {name_of(path): ours.findall(text_of(path)) for path in (ROOT / "peer").rglob("*.py")}
    assert sum(map(len, started.values())) >= 3
    assert {name: flags for name, flags in started.items() if {*flags} - {"-P"}} == {}


# --- papers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md"]
)
def test_papers_exist(name):
    assert (ROOT / name).stat().st_size > 0


def test_changelog_knows_the_version():
    version = project()["project"]["version"]
    assert re.search(
        rf"^## \[(Unreleased|{re.escape(version)})\]", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE
    )


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs/decisions"
    decisions = {path.name for path in folder.glob("[0-9]*.md")}
    indexed = re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", text_of(folder / "README.md"))
    assert set(indexed) == decisions
    assert indexed == sorted(indexed)
    numbers = [name[:4] for name in decisions]
    assert len(numbers) == len(set(numbers))


def test_links_between_papers_lead_somewhere():
    papers = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{name_of(paper)}: {link}"
        for paper in papers
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(paper))
        if "://" not in link and not (paper.parent / link).exists()
    ]
    assert broken == []


def test_what_make_bench_runs_takes_the_options_that_it_gives():
    (names,) = re.findall(r"^BENCHES +\?= (.*)$", text_of(ROOT / "Makefile"), re.MULTILINE)
    sources = {name: text_of(ROOT / "bench" / f"{name}.py") for name in names.split()}
    assert [name for name, source in sources.items() if "options(" not in source] == []


def test_make_targets_named_in_the_papers_exist():
    makefile = text_of(ROOT / "Makefile")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    papers = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {
        t
        for paper in papers
        for t in re.findall(r"(?:`|^ {4})make ([a-z-]+)", text_of(paper), re.MULTILINE)
    }
    assert named <= targets
    assert re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split() == re.findall(
        r"^([a-z-]+):.*## ", makefile, re.MULTILINE
    )
