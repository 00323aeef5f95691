"""The domains of a run with experts: manifest and held-out blocks of each, on every peer.

They are small, and every expert is validated with all of them. Since every peer has them, and gives
them to others, the founder may go: a newcomer to any expert then lacks pieces alone, which come
from those that train it. What a cache has of a corpus is served, whoever trains on it.

A blob is named by the founder's signature, so any peer may give it: one after another is asked, and
where nobody has it, that is told. The blobs of our own corpus are waited for; those of the others
never hold up a start: they are fetched while the run is trained.
"""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import trio

from peer.content.fetching import BlobSource, ContentClient
from peer.content.pieces import PieceStore, open_store
from peer.observe.event_names import EventName
from peer.runtime import PeerId, Work
from peer.training.corpus.folder import KeptCorpus, adopt_held_out, adopt_manifest, kept_corpus
from protocol.errors import LocoError, Refused
from protocol.names import corpus_unheld
from protocol.outcomes import RefusalReason
from protocol.run.run_spec import RunSpec

from .services import DaemonServices
from .sources import DOUBT_PAUSE_S, SOURCE_PAUSE_S, NobodyHelped, Sources


@dataclass(eq=False)
class BlobsOfPeers:
    """Blobs of the run's data, from whoever has them. Implements `BlobSource`.

    Args:
        first: is asked before the others.
        waits: asks on where nobody has a blob; else that raises NobodyHelped.
        expert: whose corpus they are of, where the run has any.
    """

    services: DaemonServices
    sources: Sources
    first: PeerId | None = None
    _: KW_ONLY
    expert: str | None
    waits: bool = True

    async def blob(self, digest: str) -> bytes:
        """The blob with this digest, verified.

        Raises as `Sources.fetch`.
        """
        told, corpus = False, self.services.facts.corpus
        while True:
            without = list[PeerId]()
            try:
                data = await self._from_one(digest, without)
            except NobodyHelped:
                sentence = corpus_unheld("manifest or held-out blocks", self.expert, without)
                if not self.waits:
                    raise NobodyHelped(sentence) from None
                if without:
                    corpus.unheld = sentence
                    told = told or self._tell(sentence, without)
            else:
                corpus.unheld = "" if self.waits else corpus.unheld
                return data

    async def _from_one(self, digest: str, without: list[PeerId]) -> bytes:
        async def ask(client: ContentClient) -> bytes:
            try:
                return await client.blob(digest)
            except Refused as refused:
                remote = client.remote_peer_id
                if refused.reason is RefusalReason.UNAVAILABLE and remote not in without:
                    without.append(remote)
                raise

        roster = self.services.roster
        patience_s = DOUBT_PAUSE_S - SOURCE_PAUSE_S  # then all are asked anew: no one twice at once
        return await self.sources.fetch(ask, roster, self.first, patience_s)

    def _tell(self, sentence: str, without: list[PeerId]) -> bool:
        self.services.events.emit(EventName.CORPUS_UNHELD, detail=sentence, remotes=without)
        return True


async def described_corpus(
    digest: str, cache_dir: Path, source: BlobSource, work: Work
) -> KeptCorpus:
    """A corpus's manifest and held-out blocks, from here or from peers; its pieces come later.

    Raises InvalidCorpus, OSError, or as `blob`.
    """
    kept = await work.run(kept_corpus, cache_dir, digest)
    if kept is None:
        kept = await work.run(adopt_manifest, await source.blob(digest), digest, cache_dir)
        await work.run(adopt_held_out, kept, await source.blob(kept.manifest.held_out))
    return kept


class Domains:
    """The corpora of all experts, as far as this machine has them.

    Attributes:
        here: by the expert's number; its manifest and its held-out blocks are on the disk.
        blobs, stores: for joiners, files by digest and pieces by the corpus's name; they begin
            with what is given, which our own training uses, and grow with `here`.
    """

    def __init__(
        self,
        run: RunSpec,
        cache_dir: Path,
        work: Work,
        blobs: Mapping[str, Path],
        stores: Mapping[str, PieceStore],
    ) -> None:
        self._experts = tuple(expert.name for expert in run.experts)
        self._digests = tuple(model.data.manifest or "" for model in run.models)
        self._cache_dir = cache_dir
        self._work = work
        self.here: dict[int, KeptCorpus] = {}
        self.blobs, self.stores = {**blobs}, {**stores}

    async def find_kept(self) -> None:
        """Find what the cache has."""
        for number in self._missing():
            kept = await self._work.run(kept_corpus, self._cache_dir, self._digests[number])
            if kept is not None:
                await self._add(number, kept)

    async def run(self, services: DaemonServices, sources: Sources) -> None:
        """Fetch what is missing. What does not come is told once, and asked for again later."""
        told = set[str]()
        while missing := self._missing():
            for number in missing:
                expert = self._experts[number]
                source = BlobsOfPeers(services, sources, waits=False, expert=expert)
                try:
                    await self._fetch(number, source)
                except (LocoError, OSError) as error:
                    if expert not in told:
                        told.add(expert)
                        services.events.emit(
                            EventName.DOMAIN_MISSING, expert=expert, detail=str(error)
                        )
            if self._missing():
                await trio.sleep(DOUBT_PAUSE_S)

    async def _fetch(self, number: int, source: BlobSource) -> None:
        digest, cache_dir = self._digests[number], self._cache_dir
        await self._add(number, await described_corpus(digest, cache_dir, source, self._work))

    async def _add(self, number: int, kept: KeptCorpus) -> None:
        self.here[number] = kept
        self.blobs.update(kept.blobs)
        if kept.manifest.name not in self.stores:
            self.stores[kept.manifest.name] = await self._work.run(open_store, kept)

    def _missing(self) -> Iterable[int]:
        return [n for n in range(len(self._digests)) if n not in self.here]
