"""How busy a peer is when its averages travel over a slow link: a step as a graph of nodes.

Idea. A training step of a model with L layers is a graph. Each layer has a forward node F, a node B
for the gradients of its inputs (the first layer needs none), a node W for the gradients of its
parameters, and a node R that reduces them over the slow link: 4 L - 1 nodes.

    F0 .. F(L-1), then for each layer from the last to the first: B, W, R

Compute utilisation is the time of computing over the time that passed.

Rules
  1. A peer computes one node at a time, in the order above. All 3 L - 1 computing nodes take
     equally long, together the step time.
  2. The link carries one R at a time, in the order they become ready. R takes its bits over the
     bandwidth, and nothing else: no latency, no time inside a site.
  3. R of layer l in step s starts when W of the layer is done, and F of the layer in step
     s + 1 + tau waits for it. With tau = 0 nothing is overlapped on purpose, and yet R of a deep
     layer travels while shallower layers compute.
  4. With `after_step` the layers of a step leave together when the step is done, and step
     s + 1 + tau begins when all are back. That is how a peer sends that averages weights, which
     it has only after the inner optimizer's step.
  5. In steps that average nothing, R takes no time.

The first periods are left out; then whole periods are measured. Bandwidths are a vector: all are
simulated at once.

Source: Streaming DiLoCo, arXiv 2501.18512, table 4 and the section on compute utilisation. The
paper gives the kinds and the number of nodes, and that only bandwidth between sites counts; equal
times and the order on the link are ours.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
"""One number for each bandwidth."""

WARM_UP_PERIODS: Final = 2
MEASURED_PERIODS: Final = 2


class Kind(Enum):
    """Kinds of nodes, by what one does with its layer."""

    FORWARD = "F"
    BACKWARD_ACTIVATIONS = "B"
    BACKWARD_PARAMETERS = "W"
    REDUCTION = "R"


Node = tuple[Kind, int]
"""Kind and layer."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is trained, and the machine.

    Attributes:
        step_s: of one inner step, without any exchange.
    """

    name: str
    layers: int
    step_s: float
    parameters: float


@dataclass(frozen=True, slots=True)
class Sends:
    """The sends of one peer: what, and when.

    Attributes:
        bits_per_parameter: in one direction, each time a layer is averaged.
        layers_at: the layers averaged at each step of a period.
        delay_steps: tau.
        after_step: rule 4 instead of rule 3.
    """

    bits_per_parameter: float
    layers_at: tuple[tuple[int, ...], ...]
    delay_steps: int = 0
    after_step: bool = False


def nodes_of_step(layers: int) -> tuple[Node, ...]:
    """The graph of one step, in the order of computing."""
    nodes: list[Node] = [(Kind.FORWARD, layer) for layer in range(layers)]
    for layer in reversed(range(layers)):
        if layer > 0:
            nodes.append((Kind.BACKWARD_ACTIVATIONS, layer))
        nodes += [(Kind.BACKWARD_PARAMETERS, layer), (Kind.REDUCTION, layer)]
    return tuple(nodes)


def utilisation(model: Model, sends: Sends, link_gbit_s: Values) -> Values:
    """Compute utilisation at each bandwidth."""
    run = _Run(model, sends, link_gbit_s)
    period = len(sends.layers_at)
    run.take_steps(WARM_UP_PERIODS * period)
    started_s = run.now_s
    run.take_steps(MEASURED_PERIODS * period)
    return MEASURED_PERIODS * period * model.step_s / (run.now_s - started_s)


class _Run:
    """Steps in progress."""

    def __init__(self, model: Model, sends: Sends, link_gbit_s: Values) -> None:
        self._sends, self._nodes = sends, nodes_of_step(model.layers)
        self._node_s = model.step_s / (3 * model.layers - 1)
        layer_bits = sends.bits_per_parameter * model.parameters / model.layers
        self._reduction_s = layer_bits / (link_gbit_s * 1e9)
        self._step = 0
        self.now_s = np.zeros_like(link_gbit_s)
        self._link_free_s = np.zeros_like(link_gbit_s)
        self._back_s: dict[tuple[int, int], Values] = {}
        """When what a step's forward node of a layer waits for is there."""

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            self._take_step()
            self._step += 1

    def _take_step(self) -> None:
        sent = self._sends.layers_at[self._step % len(self._sends.layers_at)]
        for kind, layer in self._nodes:
            if kind is not Kind.REDUCTION:
                self._compute(kind, layer)
            elif layer in sent and not self._sends.after_step:
                self._reduce(needed_by=layer)
        if self._sends.after_step:
            for _ in sent:
                self._reduce(needed_by=0)

    def _compute(self, kind: Kind, layer: int) -> None:
        if kind is Kind.FORWARD:
            back_s = self._back_s.pop((self._step, layer), None)
            if back_s is not None:
                self.now_s = np.maximum(self.now_s, back_s)
        self.now_s = self.now_s + self._node_s

    def _reduce(self, *, needed_by: int) -> None:
        self._link_free_s = np.maximum(self._link_free_s, self.now_s) + self._reduction_s
        step = self._step + 1 + self._sends.delay_steps
        self._back_s[step, needed_by] = self._link_free_s
