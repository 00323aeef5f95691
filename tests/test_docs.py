"""What README and docs/ promise is there: links, options, exit codes, keys, lists, targets.

Their prose has one form: wrapped lines, and sentences with a subject.
"""

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cli_reference
import pytest
import typer.main
from console import commands_of, navigation, tried_pages
from pydantic import BaseModel

from peer.cli.app import app
from peer.cli.new import EXPLANATIONS
from peer.facts import PeerState
from peer.observe.problems import CONDITIONS, help_of
from peer.options.config import ENVIRONMENT_PREFIX, OPTIONS
from peer.options.exit_codes import ExitCode
from protocol.outcomes import RefusalReason, SkipReason
from protocol.run.run_spec import EnsembleSection, ExpertSection, RunSpec, SyncSection
from protocol.run.sections import AdapterSection, OptimizerSection
from protocol.run.ways import WAYS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = {"CHANGELOG.md", "log.md"}
"""Pages of entries that stay as they were written."""
PROSE = [ROOT / "CONTRIBUTING.md", *(page for page in PAGES if page.name not in HISTORY)]
PROSE_COLUMNS = 100
OTHER_PROGRAMS = {"--build-arg", "--gpus", "--build", "--no-build-isolation", "--group"} | {
    *("--syn", "--dport", "--connlimit-above"),
    *("--image", "--disk", "--env", "--args", "--bid", "--user", "--stop-timeout"),
    *("--logdir", "--append"),
}


PROGRAMS_OF_OURS = sorted(
    path for room in ("demo", "bench") for path in (ROOT / room).rglob("*.py")
)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def section(path: Path, title: str) -> str:
    """The text below a heading, to the next one of any level."""
    _, found, rest = text_of(path).partition(f"\n## {title}\n")
    assert found, f"{name_of(path)} has no section {title!r}"
    return rest.partition("\n## ")[0]


def without_code(text: str) -> str:
    """The text with its fenced and indented code left empty; the lines keep their numbers."""
    text = re.sub(
        r"^```.*?^```$", lambda c: "\n" * c[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
    )
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def too_wide(text: str) -> list[str]:
    """Lines of prose beyond the limit that could be broken; tables and pictures cannot."""
    return [
        f"line {number}: {line}"
        for number, line in enumerate(without_code(text).splitlines(), 1)
        if len(line) > PROSE_COLUMNS
        and not line.startswith(("|", "!["))
        and " " in re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip()
    ]


def sentences(text: str) -> list[str]:
    """The sentences of the prose, of headings, of list items and of the cells of tables."""
    block = r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[|#])|\|"
    parts = [" ".join(part.split()) for part in re.split(block, without_code(text))]
    bare = [re.sub(r"^(?:[-*]|\d+\.|#+) |\*\*|^\d{4}\. ", "", part) for part in parts]
    return [s for part in bare for s in re.split(r"(?<=[.!?])[)\"']* +\(?", part) if s]


def first_column(text: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def commands() -> Mapping[str, Any]:
    return typer.main.get_group(app).commands


def real_options() -> set[str]:
    return {o for c in commands().values() for p in c.params for o in p.opts} | {
        "--help",
        "--version",
    }


def defaults(model: BaseModel, prefix: str = "") -> dict[str, str]:
    """Every key of the run spec to its default, as docs/run-spec.md writes it."""
    found: dict[str, str] = {}
    for name, value in model:
        if isinstance(value, BaseModel):
            found |= defaults(value, f"{prefix}{name}.")
        else:
            shown = "none" if value is None else f"`{json.dumps(value)}`"
            found[prefix + name] = shown
    return found


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_prose_is_wrapped(page):
    assert too_wide(text_of(page)) == []


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_who_begins_no_sentence_but_a_question(page):
    begun = [s for s in sentences(text_of(page)) if re.match(r"(Who|Whoever)\b", s)]
    assert [sentence for sentence in begun if not sentence.endswith("?")] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page))
    missing = [
        target
        for target in targets
        if not target.startswith("http") and not (page.parent / target).resolve().exists()
    ]  # fmt: skip
    assert missing == []


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_files_and_tests_that_are_named_are_there(page):
    text = text_of(page)
    named = re.findall(r"`((?:bench|demo|deploy|peer|protocol|simulation|tests)/[\w./-]+\w)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    tests = "".join(text_of(path) for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests] == []


def is_test(path: Path, name: str) -> bool:
    return path.is_file() and f"\ndef {name}(" in text_of(path).replace("\nasync def", "\ndef")


def test_every_promise_names_tests_that_are_there():
    promised = section(ROOT / "docs/security.md", "Promised")
    promises = re.findall(r"^- .*?(?=^- |\Z)", promised, re.MULTILINE | re.DOTALL)
    assert len(promises) > 10
    named = {promise: re.findall(r"`(tests/\S+)::(test_\w+)`", promise) for promise in promises}
    assert [promise for promise, tests in named.items() if not tests] == []
    tests = {(path, name) for tests in named.values() for path, name in tests}
    assert [test for test in sorted(tests) if not is_test(ROOT / test[0], test[1])] == []


def anchors(page: Path) -> set[str]:
    """What links may name behind a page: its headings, as forges turn them into anchors."""
    headings = re.findall(r"^#+ (.+)$", without_code(text_of(page)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_condition_and_message_that_people_see_is_explained():
    page = ROOT / "docs/troubleshooting.md"
    sections = re.findall(r"^## ([a-z-]+)$", text_of(page), re.MULTILINE)
    assert sorted(sections) == sorted(CONDITIONS)
    assert {help_of(name) for name in sections} <= {f"{page.name}#{at}" for at in anchors(page)}
    code = "".join(text_of(path) for path in (ROOT / "peer").rglob("*.py"))
    messages = first_column(section(page, "Messages"))
    assert [message for message in messages if message not in code] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_headings_lead_to_one(page):
    targets = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text_of(page))
    missing = [
        f"{name}#{anchor}"
        for name, anchor in targets
        if anchor not in anchors((page.parent / name).resolve() if name else page)
    ]
    assert missing == []


def test_index_and_site_list_every_page_alike():
    index = ROOT / "docs/index.md"
    linked = re.findall(r"^## (.+)|^- .*?\]\((.+?)\)", text_of(index), re.MULTILINE)
    sections = [title or (index.parent / name) for title, name in linked]
    listed = [each for title, pages in navigation().items() for each in (title, *pages)]
    assert sections == listed[2:]  # the index itself comes first
    pages = {*index.parent.glob("*.md"), *index.parent.glob("recipes/*.md")}
    assert pages <= set(listed)


def test_every_decision_and_result_is_listed():
    results = set(re.findall(r"\(results/([\w-]+\.md)", text_of(ROOT / "docs/results.md")))
    assert {p.name for p in (ROOT / "docs/results").glob("*.md")} <= results
    listed = set(re.findall(r"\]\(([^)]+)\)", text_of(ROOT / "docs/decisions/README.md")))
    assert {p.name for p in (ROOT / "docs/decisions").glob("0*.md")} <= listed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_exists(page):
    text = text_of(page)
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - OTHER_PROGRAMS
    used -= {
        option
        for path in PROGRAMS_OF_OURS
        for option in re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text_of(path))
    }
    used -= {"--data"} if "Not there yet" in text else set()
    assert used <= real_options()
    called = set(re.findall(r"(?:^ {4}|`|\$ )loco-peer ([a-z]+)\b(?! \()", text, re.MULTILINE))
    assert called <= set(commands())


def test_readme_calls_only_targets_that_make_has():
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    called = set(re.findall(r"^ {4}make ([a-z-]+)", text_of(ROOT / "README.md"), re.MULTILINE))
    assert {"demo", "test"} <= called <= targets


def test_every_exit_code_is_explained():
    page = ROOT / "docs/running.md"
    cells = re.findall(r"^\| ([\d, ]+) \|", section(page, "Exit codes"), re.MULTILINE)
    assert {int(code) for cell in cells for code in cell.split(",")} == {int(c) for c in ExitCode}


def test_every_key_of_the_run_spec_is_documented_with_its_default():
    page = text_of(ROOT / "docs/run-spec.md")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", page, re.MULTILINE)
    every: dict[str, str] = {}
    for method in reversed(list(WAYS)):  # the default's own last
        every |= defaults(RunSpec(sync=SyncSection(method=method)))
    every |= defaults(RunSpec(optimizer=OptimizerSection(name="muon"))) | {
        "optimizer.name": every["optimizer.name"]
    }
    every |= defaults(EnsembleSection(), "ensemble.")
    every |= defaults(AdapterSection(), "adapter.")
    for name, field in ExpertSection.model_fields.items():
        is_section = isinstance(field.default, BaseModel)
        has_none = field.default is None or field.is_required() or is_section
        every[f"experts.{name}"] = "none" if has_none else f"`{json.dumps(field.default)}`"
    of_ways = (f"sync.{row.section}" for row in WAYS.values())
    for section in ("optimizer.muon", "experts", "ensemble", "adapter", *of_ways):
        every.pop(section, None)
    assert dict(rows) == every


def test_the_page_of_keys_explains_them_as_a_new_run_spec_does():
    page = text_of(ROOT / "docs/run-spec.md")
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|", page, re.MULTILINE)
    assert {key: said for key, said in rows if key in EXPLANATIONS} == EXPLANATIONS


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("States", PeerState),
        ("Why a round was skipped", SkipReason),
        ("Why a peer refused", RefusalReason),
    ],
)
def test_closed_lists_are_documented(title, names):
    assert first_column(section(ROOT / "docs/running.md", title)) == {str(n) for n in names}


def test_every_setting_is_documented():
    """With the words of `--help`, which the page may go on."""
    table = section(ROOT / "docs/running.md", "Settings")
    rows = re.findall(r"^\| `--([a-z-]+)` \| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    assert [row[:2] for row in rows] == [(n, of.environment_name) for n, of in OPTIONS.items()]
    for name, _, said in rows:
        assert said.replace(r"\|", "|").startswith(OPTIONS[name].help_with_default)
    assert all(
        option.environment_name.startswith(ENVIRONMENT_PREFIX) for option in OPTIONS.values()
    )


def test_the_page_of_commands_says_what_help_says():
    page = cli_reference.PAGE
    assert text_of(page) == cli_reference.page(), f"make docs writes {name_of(page)} again"


# --- commands on pages that readers follow --------------------------------------------------------
def parse(words: Sequence[str]) -> None:
    """As the command line does, without running anything."""
    group: Any = typer.main.get_group(app)
    whole = group.make_context("loco-peer", list(words), resilient_parsing=True)
    name, command, rest = group.resolve_command(whole, list(words))
    assert command is not None, f"no command {name}"
    command.make_context(name, rest, parent=whole)


@pytest.mark.parametrize("page", tried_pages(), ids=name_of)
def test_each_command_that_readers_follow_can_be_parsed(page):
    """Those that tests do not run too (tests/e2e/test_written_commands.py runs the others)."""
    assert commands_of(page)
    for written in commands_of(page):
        words = shlex.split(written.line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words[0] == "loco-peer":
            parse(list(itertools.takewhile(lambda word: word not in "|>;", words[1:])))
        files = [word.lstrip("@") for word in words if re.match("@?deploy/", word)]
        assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", tried_pages(), ids=name_of)
def test_no_command_that_readers_follow_stands_where_tests_do_not_see_it(page):
    outside = re.sub(r"^```console$.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    command = r"^ {4}(?:\$ )?(?:loco-peer|make|docker|pip|curl) .*"
    assert re.findall(command, outside, re.MULTILINE) == []


def named_by_the_product() -> set[tuple[str, str]]:
    """Pages of docs/ with their sections that code, alerts and templates name to people."""
    files = [
        path
        for room in ("bench", "demo", "deploy", "peer", "protocol", "simulation")
        for path in (ROOT / room).rglob("*.*")
        if path.suffix in {".js", ".json", ".py", ".service", ".toml", ".yaml", ".yml"}
    ]
    text = "\n".join(text_of(path) for path in files)
    named = {help_of(name) for name in CONDITIONS}
    named |= {m[0] for m in re.findall(r"docs/(([\w/.-]+)\.md(#[\w-]+)?)", text)}
    return {(page, section) for page, _, section in (name.partition("#") for name in named)}


def test_every_page_and_section_that_the_product_names_is_there():
    """Site and repository have the same pages with the same sections (tests/test_site.py)."""
    missing = [
        (name, anchor)
        for name, anchor in sorted(named_by_the_product())
        if not (page := ROOT / "docs" / name).exists() or (anchor and anchor not in anchors(page))
    ]
    assert missing == []
