"""`loco-peer extend`: the run spec of a run that goes on with the model of this home's run.

A run's data never changes, so what goes on with other texts is a run of its own: it begins from an
export of the old one (`model.init_from`), and trains on the old texts beside the new ones
(`data.replay`). What was measured, and why there is no more to it, is in docs/log.md (2026-11-26).
"""

from pathlib import Path
from typing import Any, Final

from peer.options.config import ConfigError, refuse_experts
from peer.state.home import Home
from peer.state.kept_files import AdmissionFile
from peer.training.corpus.folder import kept_corpus
from protocol.admission.register import Mode, Register
from protocol.run.amendments import AmendedSpec, take_statement
from protocol.run.run_spec import CONVERSATIONS, RunSpec, validated

from .client import run_of, spec_of
from .new import EXTENDED, OF_CHECKPOINT, check_new, check_source, write_new

RATE: Final = 0.5
"""Peak of the rate over the old run's: a model whose rate has fallen forgets at a high one."""
WARMUP: Final = 0.01
"""Part of the steps over which the rate rises."""
KEPT_OF_DATA: Final = ("chat_template", "piece_kib", "validation_blocks")


def extend_run(
    home: Home, run_toml: Path, data: str, steps: int, replay: float, *, force: bool
) -> None:
    """Export the model beside the run spec, and write that.

    Raises as `export_run`, and ConfigError, InvalidRunSpec: such a run cannot be.
    """
    parent, folder = spec_of(home), run_toml.with_suffix("").absolute()
    _check(home, parent, run_toml, folder, data, force=force)
    spec = successor(parent, folder, data, steps, replay, _old_texts(home, parent))
    spec = _admitting(spec, *_admission(home))
    from .export_experts import export_run  # imports torch, so wrong options are told before

    export_run(home, folder, None, swarm=False, as_moe=False)
    print(f"exported the model of the run '{parent.name}' to {folder}")
    print(*(f"  {line}" for line in write_new(run_toml, spec, EXTENDED, force=force)), sep="\n")
    print(f"wrote {run_toml}; read it, then run: loco-peer start {run_toml} --new-run")
    print(
        "or, for peers that follow (--follow), beside this one: loco-peer start"
        f" {run_toml} --home DIR, and then here: loco-peer amend --successor DIR"
    )


def _check(
    home: Home, parent: RunSpec, run_toml: Path, folder: Path, data: str, *, force: bool
) -> None:
    refuse_experts(run_of(home), "extend")
    if parent.pipeline.stages > 1:
        raise ConfigError(
            "extend: a run with stages cannot begin from a checkpoint so far; train on with whole"
            " models: loco-peer export, and model.init_from in a run spec of `new`"
        )
    if folder == run_toml.absolute():
        raise ConfigError(f"{run_toml}: the model goes to a folder beside it: name it NAME.toml")
    check_source(data)
    check_new(run_toml, force=force)


def _old_texts(home: Home, parent: RunSpec) -> str:
    """The tokens that the old run had, where all are here; else where they were from."""
    kept = kept_corpus(home.cache_dir, parent.data.manifest or "")
    whole = None if kept is None else kept.whole
    return parent.data.source if whole is None else f"tokens:{whole}"


def _admission(home: Home) -> tuple[Mode, set[str]]:
    """How this home's run admits peers by now, and whom by a word, a list or an invitation.

    A peer that follows comes with its own identity, and has no invitation to the new run.
    """
    signed, kept = home.run(), AdmissionFile(home.admission_path).read()
    assert signed is not None
    spec, run_id, founder = signed.spec(), signed.run_id, signed.founder_public_key
    amended, listed = AmendedSpec(spec, run_id, founder), spec.admission.peers
    register = Register(Mode(spec.admission.mode), run_id, founder, listed)
    for statement in kept.statements:
        take_statement(statement, register, amended)
    known = register.known_peers.union(listed)
    return register.mode, {peer_id for peer_id in known if register.refusal_of(peer_id) is None}


def _admitting(spec: RunSpec, mode: Mode, guests: set[str]) -> RunSpec:
    """Raises InvalidRunSpec: those are too many."""
    tree: dict[str, Any] = spec.model_dump(exclude_none=True)
    tree["admission"] |= {"mode": mode, "peers": [] if mode is Mode.OPEN else sorted(guests)}
    return validated(tree)


def successor(
    parent: RunSpec, model: Path, data: str, steps: int, replay: float, old_texts: str
) -> RunSpec:
    """The parent's spec, with what differs where a trained model goes on.

    Raises InvalidRunSpec.
    """
    tree: dict[str, Any] = parent.model_dump(exclude_none=True)
    for path in OF_CHECKPOINT:
        section, _, key = path.partition(".")
        tree[section].pop(key, None)
    tree.pop("frozen", None)
    tree["model"] |= {"init_from": str(model)}
    replayed = {"replay": old_texts, "replay_share": replay} if replay else {}
    kept = {key: value for key, value in tree["data"].items() if key in KEPT_OF_DATA}
    tree["data"] = {**kept, "source": data, **replayed}
    if data.partition(":")[0] != CONVERSATIONS:
        tree["data"]["mask_documents"] = parent.data.mask_documents
    tree["training"]["total_steps"] = steps
    rates = [tree["optimizer"], *filter(None, [tree["optimizer"].get("muon")])]
    for section in rates:
        if "learning_rate" in section:
            section["learning_rate"] *= RATE
    tree["optimizer"]["warmup_steps"] = max(1, round(WARMUP * steps))
    tree["admission"].pop("secret_digest", None)
    if "adapter" in tree:
        tree["adapter"].pop("base", None)
    return validated(tree)
