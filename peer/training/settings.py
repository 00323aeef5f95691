"""What a trainer process is told at its birth: the first frame down the socket.

The run spec says what all peers agree on; the rest is particular to this machine.
"""

from dataclasses import dataclass

from protocol.run.run_spec import RunSpec, parse_bytes


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Everything the child needs besides the descriptors it inherits.

    Attributes:
        spec: the run spec's canonical bytes.
        peer_id: ourselves in the members of a round.
        corpus_path: folder of the corpus (`peer.training.corpus`), or a file of its tokens; empty
        for the children that need no data.
        vocabulary_size: rows of the embedding.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: torch threads; 0 leaves it to torch.
        overlap_steps: tau of this peer; None is the run's.
        micro_batch_cap: most sequences per forward pass; 0 is no cap.
        stage: the part of the model that it holds; None is the whole.
        checkpoint_activations: whether a stage keeps less of a forward, and computes it again.
    """

    spec: bytes
    peer_id: str
    corpus_path: str
    vocabulary_size: int
    device: str = "auto"
    threads: int = 0
    overlap_steps: int | None = None
    micro_batch_cap: int = 0
    stage: int | None = None
    checkpoint_activations: bool = False

    def run_spec(self) -> RunSpec:
        """The parsed run spec. Raises InvalidRunSpec."""
        return parse_bytes(self.spec)
