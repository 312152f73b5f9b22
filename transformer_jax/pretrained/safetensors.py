"""Tensors of a folder of safetensors files, checked before anything is allocated.

A file is eight bytes with the length of a header, the header, and the numbers. Everything in the header is the word of
whoever made the file, so each is checked: https://huggingface.co/docs/safetensors, section "Format".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.pretrained.stored import read_bytes
from transformer_jax.settings import parse_object

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""

DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in a file."""

    path: Path
    dtype: Any
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""

    def rows(self, first: int, count: int) -> np.ndarray:
        """Read some rows; see `Stored`."""
        width = math.prod(self.shape[-1:])
        row_bytes = width * self.dtype.itemsize
        content = read_bytes(self.path, self.begin + first * row_bytes, count * row_bytes)
        return content.view(self.dtype).reshape(count, width)

    def read(self) -> np.ndarray:
        """Read all the numbers."""
        return self.rows(0, math.prod(self.shape[:-1])).reshape(self.shape)


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of a folder: of model.safetensors, or of the files that its index names.

    Raises `UserError` naming the file and the tensor for whatever is missing, doubled, or not as the format says.
    """
    index = folder / "model.safetensors.index.json"
    # Where a folder has both, transformers too goes by the one file.
    if not index.exists() or (folder / "model.safetensors").exists():
        return open_file(folder / "model.safetensors")
    places = parse_object(_read_bytes(index), str(index)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index}: weight_map is not a list of tensors with their files")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise UserError(f"{index}: {name!r} is not the name of a file in the same folder")
        found = open_file(folder / name)
        wrong = sorted({tensor for tensor, place in places.items() if place == name} ^ set(found))
        if wrong:
            lies = "has" if wrong[0] in found else "lacks"
            raise UserError(f"{folder / name}: the file {lies} the tensor {wrong[0]!r}, against what {index.name} says")
        tensors |= found
    return tensors


def open_file(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one file."""
    size = _size(path)
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, LONGEST_HEADER):
            raise UserError(
                f"{path}: not a whole safetensors file: it says that its header has {length:,} bytes, and has"
                f" {size:,} bytes in all; fetch it again"
            )
        header = parse_object(file.read(length), f"{path}, the header")
    about = header.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        raise UserError(f"{path}: __metadata__ is {about!r}; expected texts by name")
    spans = {name: _read_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(spans.items(), key=lambda item: (item[1].begin, _bytes(item[1]))):
        if tensor.begin != end:
            _fail(path, name, f"begins at byte {tensor.begin:,}, where byte {end:,} was expected: a hole or an overlap")
        end += _bytes(tensor)
    if end != size:
        raise UserError(f"{path}: its tensors end at byte {end:,}, and the file at {size:,}; fetch it again")
    return spans


def _read_entry(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _fail(path, name, "is not described by a dtype, a shape and data_offsets alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _fail(path, name, f"has dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            _fail(path, name, f"has {what} {numbers!r}; expected a list of whole numbers, none negative")
    if len(offsets) != 2 or len(shape) > 8:
        _fail(path, name, f"has data_offsets {offsets!r} and {len(shape)} dimensions; expected 2 offsets, at most 8")
    tensor = StoredTensor(path, np.dtype(DTYPES[dtype]), tuple(shape), base + offsets[0])
    if offsets[1] - offsets[0] != _bytes(tensor):
        _fail(path, name, f"has {_bytes(tensor):,} bytes by its shape, {offsets[1] - offsets[0]:,} by its offsets")
    return tensor


def _bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _fail(path: Path, name: str, what: str) -> NoReturn:
    raise UserError(f"{path}: the tensor {name!r} {what}")


def _size(path: Path) -> int:
    if not path.is_file():
        raise UserError(f"{path} is missing")
    return path.stat().st_size


def _read_bytes(path: Path) -> bytes:
    if _size(path) > LONGEST_HEADER:
        raise UserError(f"{path}: is larger than {LONGEST_HEADER:,} bytes")
    return path.read_bytes()
