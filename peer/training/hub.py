"""Files of models: in a folder of this machine, or on the Hugging Face hub."""

import os
from pathlib import Path


def model_file(source: str, name: str) -> bytes:
    """The bytes of the file `name` in a folder, or in a repository of the hub.

    Raises:
        ValueError: there is none, or the hub cannot be asked; the message says which, and what
        would help.
    """
    folder = Path(source).expanduser()
    if (folder / name).is_file():
        return (folder / name).read_bytes()
    if folder.exists():
        raise ValueError(f"there is no {name} in {folder}")
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(source, name)).read_bytes()
    except errors.HFValidationError:
        why = f"there is no {folder}, and it cannot be a name on the hub"
    except errors.LocalEntryNotFoundError as error:
        where = os.environ.get("HF_ENDPOINT", "huggingface.co")
        why = (
            f"there is no folder {source!r} here, and the hub ({where}) cannot be reached to look"
            f" there ({_reason(error)}): mend the network or the proxy, or give a folder that holds"
            f" {name}"
        )
    except errors.EntryNotFoundError:
        why = f"{source!r} on the hub has no {name}"
    except errors.RepositoryNotFoundError:
        why = (
            f"there is no folder {source!r} here, and nothing of that name on the hub that we may"
            " read: look at the spelling; a private or gated one needs HF_TOKEN"
        )
    except Exception as error:  # noqa: BLE001 - the client has a tree of its own for ways to fail
        why = f"the hub did not give {name} of {source!r}: {error}"
    raise ValueError(why)


def _reason(error: BaseException) -> str:
    """What stood at the beginning, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0] or type(error).__name__
