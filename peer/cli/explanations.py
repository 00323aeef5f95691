"""The meaning of each key of a run spec, in the words that `loco-peer new` writes beside it."""

from collections.abc import Mapping
from typing import Final

from protocol.run.codecs import CODECS
from protocol.run.ways import WAYS

SECTIONS: Final[Mapping[str, str]] = {
    "model": "A Llama-family decoder.",
    "data": "The corpus. `start` freezes it by digest: every peer trains on the same bytes.",
    "optimizer": "Inside each peer. Steps are nominal: those of the run, not of one machine.",
    "optimizer.muon": "Muon trains the matrices of the blocks; AdamW the rest.",
    "training": "One inner step, and the length of the run.",
    "sync": "How peers average.",
    "sync.diloco": "Streaming DiLoCo: all peers average fragments, each at its moment.",
    "sync.noloco": "NoLoCo: pairs average whole models, or fragments, each at its moment.",
    "pipeline": "The model cut into stages on separate machines.",
    "admission": "Who may join.",
}


def of_codecs() -> str:
    """What each codec takes, and which are for ways that send differences alone."""
    size = {name: f"{row.bytes_per_value:.1g}" for name, row in CODECS.items()}
    shown = {name: f"'{name}' {'<' * row.packs}{size[name]}" for name, row in CODECS.items()}
    everywhere = [shown[name] for name, row in CODECS.items() if not row.differences_only]
    coarse = [shown[name] for name, row in CODECS.items() if row.differences_only]
    ways = [way for way, row in WAYS.items() if row.sends_differences]
    return (
        f"Bytes a value: {', '.join(everywhere)}; with {', '.join(ways)} also {', '.join(coarse)}."
    )


EXPLANATIONS: Final[Mapping[str, str]] = {
    "name": "For people: letters, digits, '.', '_' and '-'.",
    "seed": "Initial weights, the order of the data and the pairing of peers follow from it.",
    "model.family": "Only 'llama' so far.",
    "model.hidden_size": "Width; a multiple of 2 * num_heads.",
    "model.intermediate_size": "Width of the feed-forward layers.",
    "model.num_layers": "Depth.",
    "model.num_heads": "Attention heads.",
    "model.num_kv_heads": "Key and value heads (grouped-query attention); num_heads when left out.",
    "model.context_length": "Tokens per sequence.",
    "model.rope_theta": "Base of the rotary position embedding.",
    "model.tie_embeddings": "Share the input and output embeddings.",
    "model.init_from": "Begin from this checkpoint (folder or hub id): sizes, tokenizer, weights.",
    "data.source": "'stdlib', 'text:GLOB', 'tokens:FILE', 'jsonl:GLOB', 'parquet:GLOB', 'hf:NAME'.",
    "data.tokenizer": "'bytes', or a Hugging Face tokenizer; leave it out with init_from.",
    "data.validation_blocks": "Sequences held out for validation, the same everywhere.",
    "data.piece_kib": "Size of the pieces in which peers fetch the corpus, in KiB.",
    "optimizer.name": "'adamw', or 'muon' for the blocks' matrices with AdamW for the rest.",
    "optimizer.learning_rate": "Peak of the schedule.",
    "optimizer.min_learning_rate_ratio": "Where the schedule ends, as a part of the peak.",
    "optimizer.schedule": "'cosine', 'wsd' (warm-up, stable, decay) or 'constant'.",
    "optimizer.warmup_steps": "Steps over which the rate rises; joiners warm up by themselves.",
    "optimizer.decay_fraction": "'wsd' only: the last part of the run, over which the rate falls.",
    "optimizer.betas": "AdamW's decay rates.",
    "optimizer.weight_decay": "On matrices.",
    "optimizer.clip_norm": "Gradients longer than this are scaled down to it.",
    "optimizer.muon.learning_rate": "Its peak; default: AdamW's. Short runs need 4 times that.",
    "optimizer.muon.momentum": "Muon's.",
    "optimizer.muon.adjust_lr": "Size of a step: 'match_rms_adamw' fits AdamW's rates; 'original'.",
    "training.total_steps": "Inner steps of the whole run, rounded up to whole rounds.",
    "training.batch_size": "Sequences per inner step and peer.",
    "training.micro_batch": "Sequences per forward pass; 'auto' finds what fits the memory.",
    "training.precision": "'fp32', 'bf16', or 'auto': bf16 on GPUs that compute in it, else fp32.",
    "training.compile": "Use torch.compile: slower to start, faster to train.",
    "sync.method": "'noloco': pairs average; 'diloco': all do, in fragments.",
    "sync.inner_steps": (
        "H: inner steps of a round; 'auto' fills each line. More: less traffic, looser replicas."
    ),
    "sync.alpha": "Outer momentum.",
    "sync.beta": "Outer learning rate.",
    "sync.gamma": "Pull between slow weights; beta when left out, which halves the bytes.",
    "sync.codec": of_codecs(),
    "sync.overlap": "Keep training while weights travel; false is the paper's blocking form.",
    "sync.final_averaging": "End the run with the mean of all replicas.",
    "sync.validate_every": (
        "Rounds between two validations; more where they would take over a tenth of a peer's time."
    ),
    "sync.noloco.fragments": "'whole' models, or fragments of 'strided' or 'sequential' blocks.",
    "sync.noloco.blocks_per_fragment": "Transformer blocks in one fragment, at most.",
    "sync.diloco.fragments": "'strided' or 'sequential' blocks, or 'whole': plain DiLoCo.",
    "sync.diloco.blocks_per_fragment": "Transformer blocks in one fragment, at most.",
    "sync.diloco.learning_rate": "Rate of the outer optimizer, SGD with Nesterov momentum.",
    "sync.diloco.momentum": "Momentum of the outer optimizer.",
    "sync.diloco.overlap_steps": "Inner steps between a fragment's send and its return; 0 waits.",
    "sync.diloco.merge": "Share of the own weights when a fragment returns; 0 takes the average.",
    "sync.diloco.late": "If a fragment is late: 'wait' for it, or 'skip' it and keep training.",
    "sync.diloco.robust": "Owners bound what one peer moves: 'clip' by length, 'trim' values too.",
    "pipeline.stages": "Parts of the model, on separate machines; 1 is no pipeline.",
    "pipeline.visited": "Stages that a microbatch passes through; three quarters when left out.",
    "pipeline.max_swaps": "Most visits of a path to a stage below one that it has passed.",
    "pipeline.max_swap_distance": "Largest distance of such a visit.",
    "pipeline.max_swap_sum": "Largest sum of these distances on a path.",
    "pipeline.max_jump": "How far a path may go from the highest stage that it has passed.",
    "pipeline.full_every": "One iteration in this many skips no stage; 0: none.",
    "pipeline.codec": "What travels between stages: 'fp32', 'bf16' or 'int8'.",
    "admission.mode": "'open' to everybody, 'invite' (see `loco-peer invite`) or 'list'.",
    "admission.peers": "Peer ids that may join in any case; for 'invite' and 'list'.",
    "pipeline.routing": "'planned': paths follow from measured links; 'random': they are drawn.",
}

EXAMPLES: Final[Mapping[str, str]] = {
    "model.num_kv_heads": "2",
    "model.init_from": '"HuggingFaceTB/SmolLM2-135M"',
    "sync.gamma": "0.7",
}
"""Values shown, commented out, for keys that have none."""
