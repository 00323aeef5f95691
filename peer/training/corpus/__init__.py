"""The corpus that a run trains on, frozen by one digest.

A corpus becomes one row of tokens (packed.py), the same on every machine for the same texts, and is
cut into pieces (protocol/content/manifest.py). The manifest's digest goes into the run spec as
`data.manifest`. Peers fetch the pieces that they need from each other; a machine that has the texts
or the tokens may take its own, and the digest shows that they are the same.

    founder     prepared = prepare_corpus(spec, cache_dir)
                spec.data.manifest := prepared.manifest_digest
    joiner      kept = adopt_manifest(received_bytes, spec.data.manifest, cache_dir)
                adopt_held_out(kept, received_bytes), then pieces as they come
    trainer     corpus = open_corpus(prepared.folder, context_length, validation_blocks)
                corpus.missing(blocks), corpus.blocks(blocks)

Held-out files are chosen by the hash of their names; no token of theirs is in any training block.
"""
