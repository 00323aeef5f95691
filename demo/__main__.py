"""`python -m demo [--out DIR] [--seed N] [--device DEVICE] [--json]`."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from peer.options.exit_codes import ExitCode
from protocol.errors import leaves

from .experts import METHOD as EXPERTS
from .experts import ExpertsSummary, play_experts
from .folder import FolderRefused, demo_folder
from .plan import BOX_METHODS, METHODS, Plan
from .play import PICTURE, SUMMARY, play
from .processes import PeerFailed
from .summary import Summary
from .table import open_view

CODES: Final = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
}


def main() -> ExitCode:
    """Run the demo. Returns the exit status, a failure where the four lose to the one."""
    options = _options()
    try:
        with demo_folder(options.out):
            return trio.run(_until_signalled, options)
    except FolderRefused as refused:
        return _said([refused], ExitCode.USAGE)
    except ExceptionGroup as group:
        failed, bugs = group.split(PeerFailed)
        if bugs is not None or failed is None:
            raise
        return _said(leaves(failed), ExitCode.FAILURE)


def _said(errors: Sequence[BaseException], code: ExitCode) -> ExitCode:
    for error in errors:
        print(f"demo: {error}", file=sys.stderr)
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description="Four peers train; then one alone.")
    parser.add_argument("--out", type=Path, default=Path("demo-run"), help="folder for everything")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data order and pairing")
    parser.add_argument("--steps", type=int, help="inner steps of the swarm's run")
    parser.add_argument("--method", choices=(*METHODS, EXPERTS), default=METHODS[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N, for all peers")
    told = "processes in which the fourth peer trains, like a machine with so many GPUs"
    parser.add_argument("--box", type=int, default=1, metavar="N", help=told)
    parser.add_argument("--json", action="store_true", help="print summary.json on stdout")
    options = parser.parse_args()
    if options.box < 1:
        parser.error(f"--box {options.box}: a peer trains in one process at least")
    if options.box > 1 and options.method not in BOX_METHODS:
        parser.error(f"--box: with {' or '.join(BOX_METHODS)} alone, not with {options.method}")
    return options


async def _until_signalled(options: argparse.Namespace) -> ExitCode:
    code = ExitCode.OK
    with trio.open_signal_receiver(*CODES) as signals:
        async with trio.open_nursery() as nursery:

            async def stop() -> None:
                nonlocal code
                async for number in signals:
                    code = CODES[signal.Signals(number)]
                    nursery.cancel_scope.cancel()

            nursery.start_soon(stop)
            if not (await _show(options)).won:
                code = ExitCode.FAILURE
            nursery.cancel_scope.cancel()
    return code


async def _show(options: argparse.Namespace) -> Summary | ExpertsSummary:
    out, file = options.out, sys.stderr if options.json else sys.stdout
    seed, steps, device = options.seed, options.steps, options.device
    summary: Summary | ExpertsSummary
    with open_view(file) as view:
        if options.method == EXPERTS:
            summary = await play_experts(seed, steps, device, out, view)
            picture = ""
        else:
            plan = Plan(seed, steps, options.method, device, options.box)
            summary = await play(plan, out, view)
            picture = f"losses: {out / PICTURE}  "
        for line in summary.describe():
            view.say(line)
        view.say(f"{picture}numbers: {out / SUMMARY}")
    if options.json:
        print(json.dumps(summary.to_json()))
    return summary


if __name__ == "__main__":
    sys.exit(main())
