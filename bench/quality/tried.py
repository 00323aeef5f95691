"""Arms that try what others found to help, on pairs that average plainly with Muon inside.

    momentum-late     no outer momentum for ten rounds; then it rises by a tenth each round, up to
                      a half, and the gain falls so that a steady move counts once (2511.17849)
    momentum-restart  outer momentum of a half that begins anew every third round (2605.28585)
    moments           every fourth round pairs average the first moments of their inner optimizers,
                      too, in int8 (MT-DAO, 2510.05361; DES-LOC, 2505.22549)
    batches           in the second half of the run two batches make one step, at a rate higher by
                      the root of two: half of the noise of a step
    first-waits       averages are late, but those of embedding, head, norms and the first half of
                      the blocks are waited for (Factored Gossip DiLoCo, 2606.22768: the first two)

Names end with H and Muon's rate, as those of the plain arms that they stand beside. In `batches` a
step with two batches stands where two were: tokens and averages are as many as before.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from .additions import MOST, Additions
from .arms import Arm

LATE_ROUNDS: Final = 10
RESTART_ROUNDS: Final = 3
MOMENTS_ROUNDS: Final = 4
WAITED_BLOCKS: Final = 2


def _plain(inner_steps: int, muon: float) -> Arm:
    return Arm(
        f"h{inner_steps}-muon-{muon:g}",
        alpha=0.0,
        beta=1.0,
        code="int8",
        rounds_of=inner_steps / 8,
        muon=muon,
    )


def _tried() -> Iterator[Arm]:
    waits = Additions(waits_for_blocks=WAITED_BLOCKS)
    for late in (0.25, 0.7):
        plain = _plain(16, 8.0)
        name = f"first-waits-{plain.name}-late-{late:g}"
        yield replace(plain, name=name, delay=late, additions=waits)
    restarts = Additions(restart_every=RESTART_ROUNDS)
    changes: dict[str, dict[str, Any]] = {
        "momentum-late": {"additions": Additions(momentum_after=LATE_ROUNDS)},
        "momentum-restart": {"additions": restarts, "alpha": MOST, "beta": 1 - MOST},
        "moments": {"additions": Additions(moments_every=MOMENTS_ROUNDS)},
        "batches": {"additions": Additions(late_batches=2)},
    }
    for inner_steps in (2, 8):
        for muon in (2.0, 4.0, 8.0, 16.0, 32.0):
            plain = _plain(inner_steps, muon)
            for what, changed in changes.items():
                yield replace(plain, name=f"{what}-{plain.name}", **changed)


TRIED_ARMS: Final = {arm.name: arm for arm in _tried()}
