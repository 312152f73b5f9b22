"""The parts of a GGUF file, checked before anything is allocated.

A file is a header, settings, descriptions of tensors, and the tensors' blocks. All of it is the word of whoever made
the file, so every count, length and offset is checked: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Float32

from transformer_jax.errors import UserError
from transformer_jax.pretrained.extra import load_extra
from transformer_jax.pretrained.stored import read_bytes

MOST_DIMENSIONS = 4
NUMBERS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
"""Struct formats of the types of numbers."""
STRING, ARRAY = 8, 9

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of tensors that are read."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor that lies in a file, in blocks of some quantised type."""

    path: Path
    kind: Any
    """gguf.GGMLQuantizationType."""
    shape: tuple[int, ...]
    """As numpy counts: the last dimension is the one whose numbers lie together."""
    begin: int
    """Its first byte in the file."""
    size: int
    """Bytes."""

    def rows(self, first: int, count: int) -> Float32[np.ndarray, "count width"]:
        """Turn the blocks of some rows into numbers; see `Stored`."""
        dequantize = load_extra("gguf.quants").dequantize
        row_bytes = self.size // math.prod(self.shape[:-1])
        blocks = read_bytes(self.path, self.begin + first * row_bytes, count * row_bytes)
        # As one row: the package goes through sixteen at a time, and blocks know nothing of rows.
        numbers = dequantize(blocks[np.newaxis], self.kind)
        return numbers.astype(np.float32, copy=False).reshape(count, self.shape[-1])

    def read(self) -> Float32[np.ndarray, "..."]:
        """Turn all the blocks into numbers."""
        return self.rows(0, math.prod(self.shape[:-1])).reshape(self.shape)


class GGUFFile(NamedTuple):
    """What a file says, and the tensors in it."""

    settings: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Read the settings and list the tensors. Raises `UserError` naming the file, and the part of it, at fault."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).read()
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except ValueError:
        raise UserError(f"{path} is empty; fetch it again") from None


class _Reader:
    """Goes through a file from its beginning; every step is checked against the bytes that are left."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.place = path, content, 0

    def read(self) -> GGUFFile:
        if self.bytes(4, "the file") != b"GGUF":
            self.fail("is not a GGUF file: it does not begin with those letters")
        version = self.number("<I", "the version")
        if version not in (2, 3):
            self.fail(f"is of version {version}; expected 2 or 3, little-endian")
        tensor_count, setting_count = self.count("tensors", 24), self.count("settings", 13)
        settings: dict[str, Any] = {}
        for _ in range(setting_count):
            name = self.text("a setting's name")
            if name in settings:
                self.fail(f"has the setting {name!r} twice")
            settings[name] = self.value(self.number("<I", name), name)
        alignment = settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**16 or alignment & (alignment - 1):
            self.fail(f"has general.alignment {alignment!r}; expected a power of two between 8 and 65536")
        described: dict[str, tuple[Any, tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            name = self.text("a tensor's name")
            if name in described:
                self.fail(f"has the tensor {name!r} twice")
            described[name] = self.tensor(name, alignment)
        base = -(-self.place // alignment) * alignment
        tensors = {
            name: GGUFTensor(self.path, kind, shape, base + offset, size)
            for name, (kind, shape, offset, size) in described.items()
        }
        self.check_places(tensors)
        return GGUFFile(settings, tensors)

    def check_places(self, tensors: dict[str, GGUFTensor]) -> None:
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                self.fail(f"has the tensor {name!r} overlapping another")
            end = tensor.begin + tensor.size
            if end > len(self.content):
                self.fail(f"ends at byte {len(self.content):,}, within the tensor {name!r}, which ends at byte {end:,}")

    def tensor(self, name: str, alignment: int) -> tuple[Any, tuple[int, ...], int, int]:
        constants = load_extra("gguf.constants")
        GGMLQuantizationType, GGML_QUANT_SIZES = constants.GGMLQuantizationType, constants.GGML_QUANT_SIZES
        dimensions = self.number("<I", name)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            self.fail(f"has the tensor {name!r} with {dimensions} dimensions; expected 1 to {MOST_DIMENSIONS}")
        shape = tuple(self.number("<Q", name) for _ in range(dimensions))[::-1]
        kind, offset = self.number("<I", name), self.number("<Q", name)
        known = {GGMLQuantizationType[kind].value: GGMLQuantizationType[kind] for kind in SUPPORTED}
        if kind not in known:
            self.fail(f"has the tensor {name!r} of type {kind}; expected one of {', '.join(SUPPORTED)}")
        block, block_bytes = GGML_QUANT_SIZES[known[kind]]
        if 0 in shape or shape[-1] % block:
            self.fail(
                f"has the tensor {name!r} of shape {list(shape)}; expected no 0, and the last a multiple of {block}"
            )
        if offset % alignment:
            self.fail(f"has the tensor {name!r} at offset {offset:,}; expected a multiple of {alignment}")
        return known[kind], shape, offset, math.prod(shape) // block * block_bytes

    def value(self, kind: int, name: str) -> Any:
        if kind == STRING:
            return self.text(name)
        if kind == ARRAY:
            return self.array(name)
        if kind not in NUMBERS:
            self.fail(f"has the setting {name!r} of type {kind}, which is none")
        return self.number(NUMBERS[kind], name)

    def array(self, name: str) -> list[Any]:
        kind = self.number("<I", name)
        if kind == STRING:
            return self.texts(self.count(name, 8), name)
        if kind not in NUMBERS:
            self.fail(f"has the setting {name!r}, a list of type {kind}, which is none")
        code = NUMBERS[kind][-1]
        count = self.count(name, struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize("<" + code), name)))

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things, each of which takes at least so many bytes of what is left."""
        count = self.number("<Q", f"the number of {what}")
        if count * least_bytes > len(self.content) - self.place:
            self.fail(f"says that it has {count:,} of {what}, more than its {len(self.content):,} bytes can hold")
        return count

    def text(self, what: str) -> str:
        content = self.bytes(self.count(f"letters of {what}", 1), what)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"has {what} that is not UTF-8 text")

    def texts(self, count: int, what: str) -> list[str]:
        """So many texts: the hundreds of thousands of a vocabulary, so the loop does no more than it must."""
        content, place, texts = self.content, self.place, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = place + 8
            end = begin + length_at(content, place)[0] if begin <= len(content) else begin
            if end > len(content):
                break
            try:
                texts.append(str(content[begin:end], "utf-8"))
            except UnicodeDecodeError:
                break
            place = end
        self.place = place
        # The rest, which is there when something is wrong, is for the method that says what.
        return texts + [self.text(what) for _ in range(count - len(texts))]

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form), what))[0]

    def bytes(self, count: int, what: str) -> bytes:
        if count > len(self.content) - self.place:
            self.fail(f"ends at byte {len(self.content):,}, within {what}; fetch it again")
        self.place += count
        return self.content[self.place - count : self.place]

    def fail(self, what: str) -> NoReturn:
        raise UserError(f"{self.path} {what}")
