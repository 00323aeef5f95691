"""Messages of `/loco/experts/1`: what an expert says of texts; the codec stands in messages.py.

Held-out blocks are named by the digest of their blob, weights by a stamp: the digest of a sample of
them (`stamp_of` in protocol/content/samples.py), so who has the same weights has the same stamp.
"""

from protocol.limits import MAX_LOG_PROBS_BYTES

from .fields import Count, Digest, Message


class GetLogProbs(Message, frozen=True, tag="get_log_probs"):
    """Asks for the claim on these held-out blocks. The newest that was measured is given.

    Attributes:
        group: whose weights are asked about.
        blocks: digest of the blob of a domain's held-out blocks.
    """

    group: Digest
    blocks: Digest


class ScoreText(Message, frozen=True, tag="score_text"):
    """Asks for the log-probabilities of the text whose tokens follow, uint32."""

    max_payload_bytes = MAX_LOG_PROBS_BYTES

    group: Digest


class LogProbs(Message, frozen=True, tag="log_probs"):
    """Log-probabilities of true tokens follow: of each but the first of its sequence.

    Values are fp32, or fp16 where they would be too many (protocol/experts/claims.py).

    Attributes:
        stamp, step: of the weights.
    """

    max_payload_bytes = MAX_LOG_PROBS_BYTES

    stamp: Digest
    step: Count
