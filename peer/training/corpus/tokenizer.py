"""Text to tokens: bytes, or any fast Hugging Face tokenizer."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import blake3
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models


def model_file(source: str, name: str) -> bytes:
    """The bytes of a file in a folder, or in a repository of the hub. Raises ValueError."""
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
    """The first cause, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0] or type(error).__name__


TOKENIZER_FILE: Final = "tokenizer.json"
BYTES: Final = "bytes"
_END_OF_TEXT: Final = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")
"""Tokens that end a text, in the known families."""

Tokens = npt.NDArray[np.uint32] | npt.NDArray[np.uint8]


class ByteTokenizer:
    """Each byte of UTF-8 is a token; a zero byte ends a text."""

    vocabulary_size = 256
    digest = BYTES
    separator: Sequence[int] = (0,)
    end_of_text = "\0"

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def to_json(self) -> bytes:
        """This tokenizer as a tokenizer.json, for tools that know Hugging Face's alone.

        ASCII is spelt as itself; any other character falls back to its bytes, spelt `<0xC3>`, so no
        text is taken for a token by its spelling. The zero byte comes from the zero character
        alone.
        """
        spelt = {chr(byte) if byte < 128 else f"<0x{byte:02X}>": byte for byte in range(256)}
        tokenizer = HuggingFaceTokenizer(models.BPE(spelt, [], byte_fallback=True))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        text: str = tokenizer.to_str()
        return text.encode()


class FileTokenizer:
    """A tokenizer.json.

    Attributes:
        digest: of the file, 32 hex digits.
        separator: tokens put after each text.
        end_of_text: the spelling of that token; None where there is none.
    """

    def __init__(self, data: bytes) -> None:
        """Raises ValueError where `data` is no tokenizer."""
        try:
            self._tokenizer = HuggingFaceTokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer.json: {error}") from error
        self.digest = blake3.blake3(data).hexdigest(length=16)
        self.vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have holes, so the size is that of the largest id.
        self.vocabulary_size = max(self.vocabulary.values()) + 1
        known = ((name, self._tokenizer.token_to_id(name)) for name in _END_OF_TEXT)
        ends = [(name, token) for name, token in known if token is not None][:1]
        self.end_of_text: str | None = ends[0][0] if ends else None
        self.separator: Sequence[int] = [token for _, token in ends]

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Tokens, without those that mark beginning or end."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in found]


Tokenizer = ByteTokenizer | FileTokenizer


def tokenizer_path(cache_dir: Path, digest: str) -> Path:
    return cache_dir / f"tokenizer-{digest}.json"


def tokenizer_file(source: str) -> bytes:
    """The bytes of a tokenizer.json: a file, in a directory or on the hub. Raises ValueError."""
    path = Path(source).expanduser()
    try:
        return path.read_bytes() if path.is_file() else model_file(source, TOKENIZER_FILE)
    except ValueError as error:
        raise ValueError(f"tokenizer: {error}") from error


def load_tokenizer(source: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, a directory that holds one, or a hub id. Raises ValueError."""
    return ByteTokenizer() if source == BYTES else FileTokenizer(tokenizer_file(source))
