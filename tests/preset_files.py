"""The files that `loco-peer new` writes for its presets."""

from typing import Any

from peer.cli.new import preset_spec, toml_of


def preset_toml(preset: str, *given: Any, **more: Any) -> str:
    return toml_of(preset_spec(preset, *given, **more), preset)
