"""Ways to average peers of unequal speed: real text, the project's model and outer step.

    python -m bench.unequal_peers [--full] [--arms A,B] [--seeds 0,1,2]

N = 8 replicas in one process; one is 2x slower than the others, one 4x. All arms (below; in full in
quality/unequal.py) get the same time, which is counted in the steps of a fast peer. Runs are kept
and gone on with as in noloco_quality.py. H is 8 in the short setting, so quotas are 8, 4 and 2,
exactly in proportion to the speeds; with 16 they would be as exact, but half as many rounds.

Each peer i has slow weights phi_i and, after q_i steps, fast weights theta_i = phi_i + Delta_i. For
a pair the outer step is (peer/averaging/gossip/outer_step.py, gamma = beta)

    delta_i <- alpha delta_i + beta (m - phi_i)        phi_i <- phi_i + delta_i

with m what the pair agrees on:

    equal         m = mean theta = mean phi + mean Delta. A slow peer's move counts as its length
                  says: Delta over 2 steps is about a quarter of Delta over 8. So equal weights on
                  theta are weights by steps on the *rate* of the moves: (q_i r_i + q_j r_j) / 2,
                  with r = Delta / q.
    tokens        m = w_i theta_i + w_j theta_j, w_j = q_j / (q_i + q_j). It weighs moves by q^2 r,
                  and phi too: what the slow peer has from all whom it met before counts for less.
                  The mean of phi over all peers is no longer kept by a meeting. (Weights for Delta
                  alone, mean phi for all, would need both vectors on the wire.)
    normalised    m = mean phi + mean (H / q) Delta: each move as long as the median peer's. This is
                  FedNova's normalised averaging (Wang et al. 2020, arXiv 2007.07481) with equal
                  weights, tau_eff = H. Nobody can do that to the partner's theta without its phi;
                  so the sender does it, sends phi + (H / q) (theta - phi), and still only one
                  vector travels. When theta takes over the move of the slow weights, the stretch
                  has to be given back (+ sent - theta_s), since it was never trained. The price is
                  noise: a move over q steps has noise ~ sqrt(q), stretched ~ H / sqrt(q).
    waiting       q = H for all, so m = mean theta has moves of one length; paid in time.

Choice: quotas, equal weights on theta, and overlap, as the daemon has it. Waiting pays for moves of
one length with the time of all. Stretching multiplies the noise of those who know least. Weights by
tokens make the outer step of unequal pairs longer (8 and 2 steps: 6.8 r in place of 5 r), as a
larger beta makes that of all pairs; so whether they gain or lose depends on alpha and beta, and has
to be looked at with more than one pair of these (the arms that end in -alpha-0 and -plain). Equal
weights keep the mean of phi, need no count from the partner, and give both the same bits. With
overlap the trainer waits for nobody by construction; without it, jitter and whole steps make peers
wait, the more the fewer steps there are in a round.

With a code that rounds, stretching would also stretch the error that is fed back; here fp32
travels, as in the reference arm of noloco_quality.py. The waits are those of a model
(quality/waiting.py) and of the daemon's own code in simulation (simulated_pace.py).
"""

from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.quality import unequal_findings as findings
from bench.quality.arms import Arm
from bench.quality.run import Result, train_arm
from bench.quality.settings import FULL, SHORT, SMOKE_UNEQUAL, Setting
from bench.quality.store import Store
from bench.quality.study import Study, study_options
from bench.quality.unequal import ARMS, MAIN_ARMS, REFERENCE
from bench.quality.world import World
from bench.report import Report
from bench.simulated_pace import Kept, keep_pace

RESULTS: Final = Path(__file__).parent / "results" / "unequal_peers"
SIMULATED_ROUNDS: Final = 16
SIMULATED_SEEDS: Final = (0, 1, 2)
"""Several, since much depends on the moment of the others' round at which a peer joined."""


def main() -> None:
    arguments = study_options(__doc__, ARMS, RESULTS).parse_args()
    setting = SMOKE_UNEQUAL if arguments.smoke else FULL if arguments.full else SHORT
    study = Study(Store(arguments.results, setting, Result), arguments.cache, _train)
    names = arguments.arms or MAIN_ARMS
    runs = study.gather(
        [ARMS[name] for name in names], arguments.seeds, made_only=arguments.made_only
    )
    blocking, overlapping = (_simulated(setting, overlap=overlap) for overlap in (False, True))
    report = Report("unequal_peers", f"Peers of unequal speed at equal time, {setting.name}")
    report.settings = asdict(setting)
    report.rows = findings.rows(runs, setting)
    report.goals = findings.goals(runs, overlapping)
    report.notes = [
        *findings.told_waits(setting),
        *(findings.told_daemon(kept, "blocking") for kept in blocking),
        *(findings.told_daemon(kept, "overlap") for kept in overlapping),
    ]
    report.publish(arguments.json)


def _train(world: World, arm: Arm) -> Result:
    return train_arm(world, arm)[0]


def _simulated(setting: Setting, *, overlap: bool) -> list[list[Kept]]:
    """The daemon's own code with these peers, simulated, by seed."""
    speeds = ARMS[REFERENCE].speeds.of(setting.replicas)
    return [
        keep_pace(speeds, setting.inner_steps, SIMULATED_ROUNDS, seed, overlap=overlap)
        for seed in SIMULATED_SEEDS
    ]


if __name__ == "__main__":
    main()
