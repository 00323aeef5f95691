"""Pictures of the dashboards: the page knows all that the dashboards use."""

import re

from dashboard import BOARDS, panels

from bench.dashboard_pictures import PAGE, named, runs

PLAIN = {"none"}


def test_the_page_draws_every_kind_of_panel_in_every_unit() -> None:
    page = PAGE.read_text()
    shown = [panel for board in BOARDS for panel in panels(board) if panel["type"] != "row"]
    drawn = re.findall(r'^  "?([\w-]+)"?\(box, panel, defaults\)', page, re.MULTILINE)
    assert {panel["type"] for panel in shown} <= set(drawn)
    known = re.findall(r'unit === "(\w+)"', page)
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in shown} <= set(known) | PLAIN


def test_every_dashboard_has_a_run_that_fills_it() -> None:
    filled = [board for shown in runs() for board in shown.boards]
    assert sorted(filled) == [board.stem for board in BOARDS]


def test_a_legend_leaves_out_what_a_series_does_not_say() -> None:
    target = {"legendFormat": "{{outcome}} {{reason}}"}
    assert named(target, {"outcome": "skipped", "reason": "deadline"}) == "skipped deadline"
    assert named(target, {"outcome": "averaged"}) == "averaged"
