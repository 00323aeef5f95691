"""The commands. `main` is the console script; nothing is imported before it is called."""


def main() -> None:
    """Run `loco-peer` with the process's arguments, and exit."""
    import os

    from .app import app

    if "_LOCO_PEER_COMPLETE" in os.environ:  # a shell asks what it could complete
        from typer._completion_classes import completion_init

        completion_init()
    app(prog_name="loco-peer")
