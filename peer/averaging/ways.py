"""The way of averaging of a run, as its row in protocol/run/ways.py names it."""

from importlib import import_module

from protocol.run.ways import WAYS

from .parts import Averaging, AveragingParts


def averaging_of(parts: AveragingParts) -> Averaging:
    """The way that the run spec names, ready to begin."""
    module, _, name = WAYS[parts.spec.sync.method].daemon.partition(":")
    averaging: Averaging = getattr(import_module(module), name)(parts)
    return averaging
