"""The conversation `/loco/experts/1`: what the weights of one peer say of texts.

A peer gives what it has measured of a domain's held-out blocks (peer/rounds/domains.py), which
costs it nothing, and has short texts scored by its trainer, which takes time from training. So
texts are scored one after another, and after each as much time passes as keeps them below
MAX_VALIDATION_SHARE of all; who would wait longer than ANSWER_S for its turn is refused.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import trio

from peer.network.conversation import Conversation
from peer.network.handlers import Readers
from peer.rounds.domains import ToldLogProbs
from peer.rounds.validation import MAX_VALIDATION_SHARE
from peer.runtime import Network, PeerId, Stream
from protocol.errors import Refused, RemoteProtocolError
from protocol.experts.claims import packed, unpacked
from protocol.limits import ANSWER_S, MAX_LOG_PROBS_BYTES, MAX_READER_REQUESTS
from protocol.membership.group import other_group_sentence
from protocol.outcomes import RefusalReason
from protocol.wire.expert_messages import GetLogProbs, LogProbs, ScoreText
from protocol.wire.versions import EXPERTS

SCORED_S: Final = 120.0
"""The time of another peer to score a text: after the end of a run it starts a trainer for it."""
TOKEN: Final = np.dtype("<u4")

Score = Callable[[npt.NDArray[Any]], Awaitable[ToldLogProbs | None]]
"""Scores a text by our weights; None where no trainer can tell now."""


# --- answers --------------------------------------------------------------------------------------
class ExpertService:
    """Answers for our expert.

    Args:
        group: of those that train it.
        told: what was measured, by the digest of the blocks.
        longest: tokens of a text.
        vocabulary_size: of the tokenizer that all experts share.
        trains: whether the trainer has other work, of which texts may take a share.
    """

    def __init__(
        self,
        network: Network,
        group: str,
        told: Mapping[str, ToldLogProbs],
        score: Score,
        longest: int,
        vocabulary_size: int,
        trains: Callable[[], bool],
    ) -> None:
        self._network = network
        self._group = group
        self._told = told
        self._score_text = score
        self._longest, self._vocabulary_size = longest, vocabulary_size
        self._trains = trains
        self._readers = Readers()
        self._turn = trio.Lock()
        self._not_before_s = 0.0

    async def start(self) -> None:
        await self._network.serve(EXPERTS, self._serve)

    async def _serve(self, stream: Stream) -> None:
        await self._readers.serve(Conversation(stream), self._read)

    async def _read(self, talk: Conversation) -> None:
        for _ in range(MAX_READER_REQUESTS):
            request, payload = await talk.receive(
                GetLogProbs,
                ScoreText,
                timeout_s=ANSWER_S,
                stall_s=ANSWER_S,
                max_payload_bytes=MAX_LOG_PROBS_BYTES,
            )
            try:
                told = await self._answer(request, payload)
            except Refused as refused:
                await talk.refuse(refused.reason, refused.sentence)
            else:
                await talk.send(LogProbs(told.stamp, told.step), packed(told.log_probs))

    async def _answer(self, request: GetLogProbs | ScoreText, payload: bytes) -> ToldLogProbs:
        if request.group != self._group:
            sentence = other_group_sentence(self._group, request.group)
            raise Refused(RefusalReason.OTHER_GROUP, sentence)
        if isinstance(request, ScoreText):
            return await self._scored(self._tokens_in(payload))
        told = self._told.get(request.blocks)
        if told is None:
            sentence = f"I have not measured the blocks {request.blocks} yet"
            raise Refused(RefusalReason.UNAVAILABLE, sentence)
        return told

    def _tokens_in(self, payload: bytes) -> npt.NDArray[Any]:
        """Raises RemoteProtocolError."""
        if len(payload) % TOKEN.itemsize:
            raise RemoteProtocolError(f"{len(payload)} bytes are no tokens")
        tokens = np.frombuffer(payload, TOKEN)
        if not 2 <= len(tokens) <= self._longest or tokens.max() >= self._vocabulary_size:
            raise RemoteProtocolError(
                f"a text has 2 to {self._longest} tokens, below {self._vocabulary_size}"
            )
        return tokens

    async def _scored(self, tokens: npt.NDArray[Any]) -> ToldLogProbs:
        with trio.move_on_after(ANSWER_S) as waiting:
            async with self._turn:
                await trio.sleep_until(self._not_before_s)
                waiting.deadline = math.inf
                return await self._score_now(tokens)
        sentence = "I score texts of others; ask another, or later"
        raise Refused(RefusalReason.TOO_MANY, sentence)

    async def _score_now(self, tokens: npt.NDArray[Any]) -> ToldLogProbs:
        began_s = trio.current_time()
        told = await self._score_text(tokens)
        if self._trains():
            now_s = trio.current_time()
            self._not_before_s = now_s + (now_s - began_s) / MAX_VALIDATION_SHARE
        if told is None:
            raise Refused(RefusalReason.UNAVAILABLE, "no trainer of mine can tell now")
        return told


# --- questions ------------------------------------------------------------------------------------
async def log_probs_of(talk: Conversation, group: str, blocks: str, count: int) -> ToldLogProbs:
    """The claim of a peer on held-out blocks that are `count` values.

    Raises StreamLost, Refused, RemoteProtocolError.
    """
    await talk.send(GetLogProbs(group, blocks))
    return await _told(talk, count, ANSWER_S)


async def score_of(talk: Conversation, group: str, tokens: npt.NDArray[Any]) -> ToldLogProbs:
    """Log-probabilities, by a peer's weights, of each token of a text but the first.

    Raises StreamLost, Refused, RemoteProtocolError.
    """
    await talk.send(ScoreText(group), tokens.astype(TOKEN).tobytes())
    return await _told(talk, len(tokens) - 1, SCORED_S)


async def _told(talk: Conversation, count: int, timeout_s: float) -> ToldLogProbs:
    reply, data = await talk.receive(
        LogProbs, timeout_s=timeout_s, stall_s=ANSWER_S, max_payload_bytes=MAX_LOG_PROBS_BYTES
    )
    return ToldLogProbs(reply.stamp, reply.step, unpacked(data, count))


async def ask_expert(network: Network, peer_id: PeerId) -> Conversation:
    """A conversation for questions, which the caller closes. Raises StreamLost."""
    return Conversation(await network.open_stream(peer_id, EXPERTS))
