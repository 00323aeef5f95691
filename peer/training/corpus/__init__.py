"""The corpus that a run trains on, frozen by one digest.

A corpus becomes one file of tokens, `corpus-<digest>.bin` (see packed.py), made of the same bytes
on every machine from the same texts. The file's blake3 digest goes into the run spec as
`data.manifest`. A small one (`stdlib`) travels between peers as a blob of that digest; of a larger
one each peer has its own copy of the texts, and the digest shows that it is the same.

    founder     prepared = prepare_corpus(spec, cache_dir)
                spec.data.manifest := prepared.manifest_digest
    joiner      path = adopt_corpus(received_bytes, spec.data.manifest, cache_dir)
    trainer     corpus = open_corpus(path, context_length, validation_blocks)

Held-out files are chosen by the hash of their names; no token of theirs is in any training block.
"""

from .blocks import Corpus, open_corpus
from .packed import InvalidCorpus
from .prepare import (
    PreparedCorpus,
    adopt_corpus,
    describe_corpus,
    prepare_corpus,
    verify_corpus,
)

__all__ = [
    "Corpus",
    "InvalidCorpus",
    "PreparedCorpus",
    "adopt_corpus",
    "describe_corpus",
    "open_corpus",
    "prepare_corpus",
    "verify_corpus",
]
