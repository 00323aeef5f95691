"""Arms in which some peers are slower than the others.

    equal           theta of both counts for a half, whatever number of steps is in it
    tokens          theta counts by the tokens trained in this round: w_j = q_j / (q_i + q_j)
    normalised      each peer sends phi + (H / q) (theta - phi): its move, as long as the median's
    waiting         every peer does all H steps, and the pair waits for the slower of the two
    waiting-often   the same with rounds of H / 4: as many rounds as the others in the same time
    without         the slow peers stay away

A round is H steps of a peer of speed 1. In the first three a peer of speed s does s H steps of it,
as the daemon's quotas say (protocol/schedule/rounds.py). Where peers wait, everybody meets the
slowest sooner or later, since partners are drawn anew in each round; so all train at its pace, and
their schedule is stretched to end with the others' time.
"""

from dataclasses import replace
from typing import Final

from .arms import Arm
from .pace import Speeds

SLOW: Final = (0.5, 0.25)
"""Speeds of the slow peers, the last of the replicas; the others have 1."""
REFERENCE: Final = "equal"
"""The arm that does what the daemon does."""
_MAIN: Final = (
    Arm(REFERENCE, speeds=Speeds(slow=SLOW)),
    Arm("tokens", speeds=Speeds("tokens", SLOW)),
    Arm("normalised", speeds=Speeds("normalised", SLOW)),
    Arm("waiting", speeds=Speeds(slow=SLOW, waits=True)),
    Arm("waiting-often", rounds_of=0.25, speeds=Speeds(slow=SLOW, waits=True)),
    Arm("without", speeds=Speeds(leaves_out=len(SLOW))),
)
OUTER_STEPS: Final = {"-alpha-0": (0.0, 0.7), "-plain": (0.0, 1.0)}
"""Other outer steps, alpha and beta, by how the names of their arms end: momentum multiplies the
length of a step, and the poolings differ in that length, so their order may depend on it."""
_CHECK: Final = tuple(
    replace(arm, name=arm.name + ending, alpha=alpha, beta=beta)
    for ending, (alpha, beta) in OUTER_STEPS.items()
    for arm in _MAIN[:4]
)
MAIN_ARMS: Final = tuple(arm.name for arm in _MAIN)
ARMS: Final = {arm.name: arm for arm in (*_MAIN, *_CHECK)}
