"""Documents from files, and what is trained on and what is kept for evaluation.

A document is a whole text file, or one line of a JSONL file. Without any path the corpus is the Python standard
library's own source, which every interpreter carries.

This file knows nothing of tokens: it hands out text as it was read.
"""

import glob
import gzip
import hashlib
import json
import lzma
import math
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from transformer_jax.errors import UserError

_NAMED_AT_MOST = 5
"""How many bad lines or files an error lists; it counts the others."""


MARK_OF_A_RUN = ".transformer_jax.lock"
"""A folder below a corpus that holds this file is where a run keeps its own files, and is no part of the text."""

LEAST_CUT = 1000
"""Characters up to which a document is never cut to hold out its end."""


class Document(NamedTuple):
    """A piece of text that is read on its own."""

    name: str
    """The path of its file, and `:line` for a line of a JSONL file."""
    text: str
    domain: int = 0
    """Number of the path by which it was found, from 0."""


class Corpus(NamedTuple):
    """Everything that was read, in a fixed order."""

    documents: list[Document]
    skipped: list[str]
    """Files of a folder or pattern that are not text, and so were left out."""


class Split(NamedTuple):
    """Documents to train on and documents to evaluate on; no text is in both."""

    train: list[Document]
    heldout: list[Document]


class CompressedSizes(NamedTuple):
    """What general compressors need for a text, in bits per byte: the figures to hold a model's beside."""

    gzip: float
    xz: float


def read_corpus(paths: Sequence[str] = (), jsonl_field: str = "text") -> Corpus:
    """Read text files, folders, glob patterns (`**` is any depth) and JSONL files, each file once.

    No paths mean `standard_library`. A folder gives every file below it that is not hidden, in the order of the paths.
    In a folder or pattern, files that are not text (UTF-8 without NUL) are skipped and reported, and the folders of
    runs are left out; a file that is named itself has to be text. Empty documents are dropped.
    """
    if not paths:
        return standard_library()
    corpus = Corpus([], [])
    seen: set[str] = set()
    for domain, path in enumerate(paths):
        known = len(corpus.documents)
        for file, named in _files(path):
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                _read_file(file, file.as_posix(), named, jsonl_field, corpus)
        corpus.documents[known:] = [document._replace(domain=domain) for document in corpus.documents[known:]]
    if not corpus.documents:
        raise UserError(
            f"the corpus {', '.join(paths)} is empty: expected at least one text file with text in it"
            + _count_skipped(corpus.skipped)
        )
    return corpus


def standard_library() -> Corpus:
    """Read the running interpreter's standard library, without its tests and the files that describe the machine."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    corpus = Corpus([], [])
    for file in _walk(root, left_out) if root.is_dir() else ():
        name = file.relative_to(root).as_posix()
        # The interpreter's build writes its own paths and compiler flags into these.
        if file.suffix == ".py" and not name.startswith(("_sysconfigdata", "config-")):
            _read_file(file, name, False, "", corpus)
    if not corpus.documents:
        raise UserError(
            f"this Python has no source of its standard library in {root}; name a corpus with DataConfig.paths"
        )
    return corpus


def split(documents: Sequence[Document], holdout: float) -> Split:
    """Hold out about a fraction of the documents, chosen by a hash of their text alone.

    So a document stays on its side when files are renamed, added or removed, and equal documents are on one side. When
    that leaves a side empty, the documents with the smallest hash are held out; when all documents are equal, their
    last lines are. Of a document that is longer than twice the fraction of all text the last lines alone are held out:
    else a corpus of one book and one note could be trained on the note.
    """
    hashes = [
        int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8], "big") / 2**64 for document in documents
    ]
    if not documents:
        raise UserError("there is no document to split; expected at least one")
    if len(set(hashes)) == 1:
        cut = _line_border(documents[0], holdout)
        return Split(
            [d._replace(text=d.text[:cut]) for d in documents], [d._replace(text=d.text[cut:]) for d in documents]
        )
    threshold = holdout
    if not min(hashes) < threshold <= max(hashes):
        threshold = math.nextafter(min(hashes), 1)
    sides = Split([], [])
    share = holdout * sum(len(document.text) for document in documents)
    for document, place in zip(documents, hashes, strict=True):
        if place >= threshold:
            sides.train.append(document)
        elif len(document.text) <= max(2 * share, LEAST_CUT):
            sides.heldout.append(document)
        else:
            cut = _line_border(document, share / len(document.text))
            sides.train.append(document._replace(text=document.text[:cut]))
            sides.heldout.append(document._replace(text=document.text[cut:]))
    return sides


def fingerprint(documents: Iterable[Document]) -> str:
    """Hash the texts and domains in their order, names aside: two corpora with one fingerprint give one stream."""
    digest = hashlib.sha256()
    for document in documents:
        data = document.text.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(document.domain.to_bytes(8, "big") if document.domain else b"")
        digest.update(data)
    return digest.hexdigest()


def compressed_sizes(documents: Iterable[Document]) -> CompressedSizes:
    """Measure bits per byte of `gzip -9` and `xz`, one document at a time.

    Like a model that sees one document alone, they begin each without knowing the others.
    """
    total = gzipped = xzed = 0
    for document in documents:
        data = document.text.encode()
        total += len(data)
        gzipped += len(gzip.compress(data, compresslevel=9, mtime=0))
        xzed += len(lzma.compress(data))
    if not total:
        raise UserError("there is no text to compress; expected at least one document that is not empty")
    return CompressedSizes(gzip=8 * gzipped / total, xz=8 * xzed / total)


def _line_border(document: Document, holdout: float) -> int:
    """Find where the last `holdout` of a text begins.

    That is the nearest line border, unless it would hold out less than half or more than twice as much.
    """
    text = document.text
    if len(text) < 2:
        raise UserError(
            f"the corpus is the one document {document.name} of {len(text)} characters, too short to hold out a part"
        )
    size = min(max(round(len(text) * holdout), 1), len(text) - 1)
    target = len(text) - size
    before, after = text.rfind("\n", 0, target) + 1, text.find("\n", target) + 1
    border = before if after == 0 or target - before <= after - target else after
    return border if size / 2 <= len(text) - border <= 2 * size else target


def _files(path: str) -> Iterator[tuple[Path, bool]]:
    """List the files that a path stands for, and whether each was named itself."""
    if os.path.isdir(path):
        yield from ((file, False) for file in _walk(Path(path), set()))
    elif os.path.exists(path):
        if not os.path.isfile(path):
            raise UserError(
                f"{path} is neither a file nor a folder; expected a text file, a folder, a pattern or a JSONL file"
            )
        yield Path(path), True
    elif any(character in path for character in "*?["):
        matches = sorted(
            match for match in glob.glob(path, recursive=True) if os.path.isfile(match) and not _of_run(match)
        )
        if not matches:
            raise UserError(f"the pattern {path} matches no file (seen from {os.getcwd()})")
        yield from ((Path(match), False) for match in matches)
    else:
        raise UserError(
            f"{path!r} does not exist (seen from {os.getcwd()}); expected a text file, folder, pattern or JSONL file"
        )


def _of_run(path: str) -> bool:
    return any((folder / MARK_OF_A_RUN).exists() for folder in Path(path).parents)


def _walk(root: Path, left_out: set[str]) -> list[Path]:
    """List the regular files below a folder that are neither hidden nor a run's, by path; links are not followed."""

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read the folder {error.filename}: {error.strerror}")

    found = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        if MARK_OF_A_RUN in names and Path(folder) != root:
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        found += [file for file in files if file.is_file()]
    return sorted(found, key=Path.as_posix)


def _read_file(file: Path, name: str, named: bool, jsonl_field: str, corpus: Corpus) -> None:
    """Append a file's documents, or its name when it is not text and was not named itself."""
    text = _decode(_read_bytes(file))
    is_jsonl = file.suffix.lower() == ".jsonl"
    if isinstance(text, _Refused):
        if named or is_jsonl:
            raise UserError(f"{name} is not a text file ({text.reason}); expected UTF-8")
        corpus.skipped.append(name)
    elif is_jsonl:
        corpus.documents.extend(_read_jsonl(name, text, jsonl_field))
    elif text:
        corpus.documents.append(Document(name, text))


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


class _Refused(NamedTuple):
    """Why a file or a line gives no document."""

    reason: str


def _decode(data: bytes) -> str | _Refused:
    """Decode UTF-8, with or without a byte-order mark; line ends stay as they are."""
    if b"\0" in data:
        return _Refused(f"a NUL at byte {data.index(0)}")
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return _Refused(f"{error.reason} at byte {error.start}")


def _read_jsonl(name: str, text: str, field: str) -> list[Document]:
    documents, complaints = [], []
    # Only "\n" ends a line: a JSON string may hold the other characters at which str.splitlines breaks.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            document = _document_of(line, field)
            if isinstance(document, _Refused):
                complaints.append(f"line {number}: {document.reason}")
            elif document:
                documents.append(Document(f"{name}:{number}", document))
    if complaints:
        listed = "; ".join(complaints[:_NAMED_AT_MOST]) + ("; ..." if len(complaints) > _NAMED_AT_MOST else "")
        raise UserError(
            f"{name} has {len(complaints)} malformed line{'s' if len(complaints) > 1 else ''} ({listed});"
            f" expected a JSON object with text in the field {field!r} on each line (DataConfig.jsonl_field)"
        )
    return documents


def _document_of(line: str, field: str) -> str | _Refused:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _Refused(f"not JSON ({error})")
    if not isinstance(record, dict):
        return _Refused(f"a {type(record).__name__}, not an object")
    if field not in record:
        return _Refused(f"no field {field!r} among {', '.join(map(repr, list(record)[:_NAMED_AT_MOST])) or 'none'}")
    value = record[field]
    if not isinstance(value, str):
        return _Refused(f"field {field!r} is a {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return _Refused(f"field {field!r} has a lone surrogate at character {error.start}, half of a character")
    return value


def _count_skipped(skipped: Sequence[str]) -> str:
    if not skipped:
        return ""
    more = f" and {len(skipped) - _NAMED_AT_MOST} more" if len(skipped) > _NAMED_AT_MOST else ""
    return f" (not text: {', '.join(skipped[:_NAMED_AT_MOST])}{more})"
