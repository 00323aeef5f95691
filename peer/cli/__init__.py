"""The commands. `main` is the console script; nothing is imported before it is called."""


def main() -> None:
    """Run `loco-peer` with the process's arguments, and exit."""
    from .app import app

    app(prog_name="loco-peer")
