"""A record of what each file in a folder held when it was written, and the check that it still does.

This file knows folders and bytes: no arrays and nothing of what the files mean.
"""

import json
import os
import zlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS = "checksums.json"

_BLOCK = 1 << 20


def write_checksums(folder: Path) -> None:
    """Write the size and CRC-32 of every file in the subfolders of `folder` to its checksums.json."""
    paths = sorted(path for path in folder.glob("*/**/*") if path.is_file())
    with ThreadPoolExecutor() as threads:
        sums = list(threads.map(lambda path: (path.stat().st_size, _crc32(path)), paths))
    names = [path.relative_to(folder).as_posix() for path in paths]
    with open(folder / CHECKSUMS, "w") as file:
        json.dump(dict(zip(names, sums, strict=True)), file, indent=0)
        file.flush()
        os.fsync(file.fileno())


def find_damage(folder: Path, subfolders: Collection[str]) -> str | None:
    """Say which file is not what it was when `write_checksums` saw it, and how; None if all are.

    Only the files in `subfolders` are read; of the others the presence and size are checked.
    """
    try:
        recorded = json.loads((folder / CHECKSUMS).read_bytes())
        files = {name: (int(size), int(crc)) for name, (size, crc) in recorded.items()}
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{CHECKSUMS} cannot be read: {error}"
    if not files:
        return f"{CHECKSUMS} is empty"

    def check(name: str) -> str | None:
        size, crc = files[name]
        return _check_file(folder, name, size, crc if name.split("/")[0] in subfolders else None)

    with ThreadPoolExecutor() as threads:
        return next((damage for damage in threads.map(check, files) if damage is not None), None)


def _check_file(folder: Path, name: str, size: int, crc: int | None) -> str | None:
    try:
        found = (folder / name).stat().st_size
        if found != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
        if crc is not None and _crc32(folder / name) != crc:
            return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
