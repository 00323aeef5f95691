"""Pictures of the Grafana dashboards, drawn by uPlot: Grafana itself is not in Debian or on PyPI.

Real peers of the demo preset are scraped by a real Prometheus (by Debian's package) as
deploy/prometheus says. One of them is killed after two fifths of the time, and started again after
three; so it is with a run in two stages. Each query of deploy/grafana is asked as Grafana would,
and Chromium draws the answers: panels by their places, units and legends; rows that are closed at
first by their titles. A panel without any data says so, and the last line names it.

    python -m bench.dashboard_pictures [--minutes 5] [--answers FILE] [--out docs/pictures]

With --answers the answers are kept in that file, and drawn again from it if it is there.
"""

import argparse
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from demo.plan import to_toml
from peer.cli.new import preset_spec
from protocol.run.run_spec import RunSpec

from .real_peers import HERE, RealPeer, has_averaged, started

BOARDS: Final = HERE / "deploy/grafana/dashboards"
PAGE: Final = Path(__file__).with_name("dashboard_page.html")
CURVES: Final = HERE / "peer/observe/page"
CHROMIUM: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--allow-file-access-from-files",
)  # fmt: skip
WIDTH: Final = 1440
ROW_PX: Final = 38
"""A row of the grid, with the space between two panels."""
BEGIN_S: Final = 600.0
"""Until all have averaged: interpreters that import torch at once on a busy machine."""
POINTS: Final = 240
"""A curve has so many; a panel is some 450 pixels wide."""
Answers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """A run, and the dashboards that it fills.

    Attributes:
        names: of the peers, as deploy/compose.yaml calls them; the founder's is the first.
        killed: index of the one that is killed and comes back.
    """

    spec: RunSpec
    names: Sequence[str]
    killed: int
    boards: Sequence[str]


def runs() -> list[Shown]:
    demo, stages = preset_spec("demo"), preset_spec("demo", stages=2)
    three, four = ([f"peer-{number}" for number in range(1, n)] for n in (3, 4))
    return [
        Shown(demo, ["founder", *three], 2, ["loco-swarm", "loco-peer", "loco-network"]),
        Shown(stages, ["founder", *four], 3, ["loco-pipeline"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "docs/pictures")
    chosen = parser.parse_args()
    if chosen.answers is not None and chosen.answers.exists():
        answers = json.loads(chosen.answers.read_text())
    else:
        answers = {}
        for shown in runs():
            answers |= watched(shown, 60 * chosen.minutes)
        if chosen.answers is not None:
            chosen.answers.write_text(json.dumps(answers))
    for board, answer in answers.items():
        draw(answer, chosen.out / f"{board.replace('loco', 'grafana')}.png")


# --- the run, and what Prometheus says of it ------------------------------------------------------


def watched(shown: Shown, seconds: float) -> Answers:
    """The answers to all queries of the dashboards, after this time."""
    answers: Answers = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = folder / "run.toml"
        spec.write_text(to_toml(shown.spec))
        ports = [free_port() for _ in shown.names]
        peers = [
            RealPeer(
                folder / name,
                HERE,
                list,
                environment={"LOCO_METRICS": f"127.0.0.1:{port}"},
            )
            for name, port in zip(shown.names, ports, strict=True)
        ]
        with (
            suppress(subprocess.TimeoutExpired),  # a busy machine takes longer to end them
            running_prometheus(folder, dict(zip(shown.names, ports, strict=True))) as url,
            started(peers, spec, lambda _: "127.0.0.1:0"),
        ):
            for peer in peers:
                peer.wait_until(partial(has_averaged, peer, 1), "averaged", BEGIN_S)
            start_s = time.time()  # noqa: TID251 - Prometheus has the wall clock
            time.sleep(0.4 * seconds)
            killed = peers[shown.killed]
            killed.signal(signal.SIGKILL)
            time.sleep(0.2 * seconds)
            killed.wait_gone()
            killed.start("start", listen="127.0.0.1:0")
            time.sleep(0.4 * seconds)
            end_s = time.time()  # noqa: TID251
            answers |= {board: asked(url, board, start_s, end_s) for board in shown.boards}
    return answers


def asked(url: str, board: str, start_s: float, end_s: float) -> dict[str, Any]:
    """The dashboard, with the series of each panel's targets; rows that are closed as they are."""
    tree: dict[str, Any] = json.loads((BOARDS / f"{board}.json").read_text())
    for panel in tree["panels"]:
        panel["series"] = [
            {"name": named(target, series["metric"]), "points": series["values"]}
            for target in panel.get("targets", ())
            for series in query_range(url, target["expr"], start_s, end_s)
        ]
    return {"title": tree["title"], "panels": tree["panels"], "start": start_s, "end": end_s}


def named(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """The legend of a series, as Grafana makes it."""
    return re.sub(r"{{(\w+)}}", lambda of: labels.get(of[1], ""), target["legendFormat"]).strip()


def query_range(url: str, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    step_s = max(1, round((end_s - start_s) / POINTS))
    # Grafana's own $__rate_interval: four scrapes, or a step and a scrape.
    expression = expression.replace("$__rate_interval", f"{max(4 * SCRAPE_S, step_s + SCRAPE_S)}s")
    asked = {"query": expression.replace("$peer", ".+"), "start": start_s, "end": end_s}
    query = urllib.parse.urlencode(asked | {"step": step_s})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}", timeout=30) as answer:  # noqa: S310
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


CONFIG: Final = yaml.safe_load((HERE / "deploy/prometheus/prometheus.yml").read_text())
SCRAPE_S: Final = int(CONFIG["global"]["scrape_interval"].removesuffix("s"))


@contextmanager
def running_prometheus(folder: Path, ports: Mapping[str, int]) -> Iterator[str]:
    """The URL of a Prometheus that scrapes these, under the names that the compose file has."""
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": f"{name}:9464"}}
        for name, port in ports.items()
    ]
    scraped = {"job_name": "loco-peer", "static_configs": targets}
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": CONFIG["global"], "scrape_configs": [scraped]}))
    where = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'series'}",
            f"--web.listen-address={where}",
            "--log.level=error",
        ]
    )
    try:
        yield f"http://{where}"
    finally:
        process.terminate()
        process.wait()


def program(name: str) -> str:
    """Its path; ends us where it is not here."""
    return shutil.which(name) or sys.exit(f"{name} is not on PATH (Debian: apt-get install {name})")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# --- the picture ----------------------------------------------------------------------------------


def draw(answer: Mapping[str, Any], path: Path) -> None:
    empty = [p["title"] for p in answer["panels"] if p["type"] != "row" and not p["series"]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (PAGE, CURVES / "uPlot.iife.min.js", CURVES / "uPlot.min.css"):
            shutil.copy(file, folder)
        (folder / "answer.js").write_text(f"const BOARD = {json.dumps(answer)};\n")
        lines = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in answer["panels"])
        size = f"--window-size={WIDTH},{ROW_PX * lines + 60}"
        kept = [f"--user-data-dir={folder / 'browser'}", size, f"--screenshot={path.absolute()}"]
        subprocess.run(
            [program("chromium"), *CHROMIUM, *kept, (folder / PAGE.name).as_uri()],
            check=True,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )
    print(f"{path}: no data in {', '.join(empty) or 'no panel'}")


if __name__ == "__main__":
    main()
