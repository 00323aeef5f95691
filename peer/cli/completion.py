"""Shell completion: typer's own (decision 0052).

The shell calls the program at each Tab, with what was typed in its environment, and typer answers
from the commands themselves; so nothing that is completed can be out of date.
"""

from typing import Final

from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from peer.options.config import ConfigError

SHELLS: Final = ("bash", "zsh", "fish")

__all__ = ("completion_init", "script_for")


def script_for(shell: str) -> str:
    """Raises ConfigError."""
    if shell not in SHELLS:
        raise ConfigError(f"no completion for '{shell}': use {' or '.join(SHELLS)}")
    variable = "_LOCO_PEER_COMPLETE"  # typer looks for this name
    return get_completion_script(prog_name="loco-peer", complete_var=variable, shell=shell)
