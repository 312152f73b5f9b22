"""Documents from files, and what is trained on and what is kept for evaluation.

Without any path the corpus is the Python standard library's own source, which every interpreter carries. A corpus is
never held: its documents are read one after the other, as often as they are needed. So

    find_corpus     lists the files
    Corpus.survey   reads them once: the fingerprint, and what the split has to know of the whole
    split           says of each document, as it is read, what of it is trained on and what is held out

This file knows nothing of tokens: it hands out text as it was read.
"""

import glob
import gzip
import hashlib
import lzma
import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformer_jax.errors import UserError
from transformer_jax.text.records import NAMED_AT_MOST, PLAIN, Document, Fields, NotText, read_documents

MARK_OF_A_RUN = ".transformer_jax.lock"
"""A folder below a corpus that holds this file is where a run keeps its own files, and is no part of the text."""

LEAST_CUT = 1000
"""Characters up to which a document is never cut to hold out its end."""

Report = Callable[[int, int], None]
"""Takes how much of how much has been done."""


class File(NamedTuple):
    """A file of a corpus."""

    path: Path
    name: str
    """As it is shown."""
    named: bool
    """Whether it was named itself, and not found in a folder or by a pattern: then it has to be text."""
    domain: int
    """Number of the path by which it was found, from 0."""


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus, in a fixed order, and where their records hold what."""

    files: tuple[File, ...]
    fields: Fields = PLAIN

    def documents(self, skipped: list[str] | None = None, report: Report | None = None) -> Iterator[Document]:
        """Read all documents; the names of files that are not text are added to `skipped`.

        Raises `UserError` for what cannot be read.
        """
        sizes = [file.path.stat().st_size if report else 0 for file in self.files]
        for number, file in enumerate(self.files):
            read = 0
            try:
                for document in read_documents(file.path, file.name, self.fields):
                    yield document._replace(domain=file.domain)
                    read += len(document.text)
                    if report:
                        report(sum(sizes[:number]) + min(read, sizes[number]), sum(sizes))
            except NotText as error:
                if file.named:
                    raise UserError(f"{file.name} is not a text file ({error}); expected UTF-8") from None
                if skipped is not None:
                    skipped.append(file.name)

    def survey(self, report: Report | None = None) -> "Survey":
        """Read all documents once. Raises `UserError` when there is no text in them."""
        skipped: list[str] = []
        found = survey(self.documents(skipped, report))
        if not found.documents:
            more = f" and {len(skipped) - NAMED_AT_MOST} more" if len(skipped) > NAMED_AT_MOST else ""
            raise UserError(
                f"the corpus {', '.join(file.name for file in self.files[:NAMED_AT_MOST])} is empty: expected at least"
                " one text file with text in it"
                + (f" (not text: {', '.join(skipped[:NAMED_AT_MOST])}{more})" if skipped else "")
            )
        return found._replace(skipped=tuple(skipped))


class Survey(NamedTuple):
    """What is known of a corpus once it has been read."""

    fingerprint: str
    """A hash of the texts, domains and weights in their order, names aside: corpora with the same give one stream."""
    documents: int
    characters: int
    conversations: int
    """Documents that are conversations."""
    least: float
    """The smallest hash of a document, between 0 and 1."""
    greatest: float
    skipped: tuple[str, ...] = ()
    """Files of a folder or pattern that are not text, and so were left out."""


class Parts(NamedTuple):
    """Of a document, what is trained on and what is evaluated on."""

    train: Document | None
    heldout: Document | None


class CompressedSizes(NamedTuple):
    """What general compressors need for a text, in bits per byte: the figures to hold a model's beside."""

    gzip: float
    xz: float


def find_corpus(paths: Sequence[str] = (), fields: Fields = PLAIN) -> Corpus:
    """List text files, folders, glob patterns (`**` is any depth) and files of records, each file once.

    No paths mean `standard_library`. A folder gives every file below it that is not hidden, in the order of the paths.
    In a folder or pattern, files that are not text (UTF-8 without NUL) are skipped, and the folders of runs are left
    out; a file that is named itself has to be text. Raises `UserError` for a path that stands for no file.
    """
    if not paths:
        return standard_library()
    found: dict[str, File] = {}
    for domain, path in enumerate(paths):
        for file, named in _files(path):
            found.setdefault(os.path.realpath(file), File(file, file.as_posix(), named, domain))
    return Corpus(tuple(found.values()), fields)


def standard_library() -> Corpus:
    """List the running interpreter's standard library, without its tests and the files that describe the machine."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for file in _walk(root, left_out) if root.is_dir() else ():
        name = file.relative_to(root).as_posix()
        # The interpreter's build writes its own paths and compiler flags into these.
        if file.suffix == ".py" and not name.startswith(("_sysconfigdata", "config-")):
            files.append(File(file, name, False, 0))
    if not files:
        raise UserError(
            f"this Python has no source of its standard library in {root}; name a corpus with DataConfig.paths"
        )
    return Corpus(tuple(files))


def survey(documents: Iterable[Document]) -> Survey:
    """Go through documents once, and note what `split` has to know of the whole."""
    fingerprint, least, greatest = Fingerprint(), 1.0, 0.0
    characters = conversations = 0
    for document in documents:
        fingerprint.add(document)
        place = _place(document)
        least, greatest = min(least, place), max(greatest, place)
        characters += len(document.text)
        conversations += document.is_chat
    return Survey(fingerprint.digest(), fingerprint.documents, characters, conversations, least, greatest)


def split(documents: Iterable[Document], whole: Survey, holdout: float) -> Iterator[Parts]:
    """Hold out about a fraction of the documents, chosen by a hash of their text alone.

    So a document stays on its side when files are renamed, added or removed, and equal documents are on one side. When
    that leaves a side empty, the documents with the smallest hash are held out; when all documents are equal, their
    last lines are. Of a text that is longer than twice the fraction of all text the last lines alone are held out: else
    a corpus of one book and one note could be trained on the note. Conversations are never cut.
    """
    share = holdout * whole.characters
    threshold = holdout if whole.least < holdout <= whole.greatest else math.nextafter(whole.least, 1)
    for document in documents:
        if whole.least == whole.greatest:
            yield _cut(document, holdout)
        elif _place(document) >= threshold:
            yield Parts(document, None)
        elif document.is_chat or len(document.text) <= max(2 * share, LEAST_CUT):
            yield Parts(None, document)
        else:
            yield _cut(document, share / len(document.text))


class Fingerprint:
    """A hash of documents that are added one after the other."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.documents = 0

    def add(self, document: Document) -> None:
        data = document.text.encode()
        self._hash.update(len(data).to_bytes(8, "big"))
        self._hash.update(document.domain.to_bytes(8, "big") if document.domain else b"")
        self._hash.update(data)
        # Most documents have neither, and keep the fingerprint that they always had.
        if document.weight != 1 or document.is_chat:
            self._hash.update(f"weight {document.weight!r}, chat {document.is_chat}".encode())
        self.documents += 1

    def digest(self) -> str:
        return self._hash.hexdigest()


class Compressed:
    """Sizes of `gzip -9` and `xz` of texts that are added one after the other.

    Like a model that sees one document alone, they begin each without knowing the others.
    """

    def __init__(self) -> None:
        self._plain = self._gzip = self._xz = 0

    def add(self, text: str) -> None:
        data = text.encode()
        self._plain += len(data)
        self._gzip += len(gzip.compress(data, compresslevel=9, mtime=0))
        self._xz += len(lzma.compress(data))

    def sizes(self) -> CompressedSizes:
        """Say so in bits per byte of all texts, of which there has to be one that is not empty."""
        return CompressedSizes(gzip=8 * self._gzip / self._plain, xz=8 * self._xz / self._plain)


def _place(document: Document) -> float:
    """Hash a text to a place between 0 and 1."""
    return int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8], "big") / 2**64


def _cut(document: Document, holdout: float) -> Parts:
    if document.is_chat:
        raise UserError(f"all conversations are the same as {document.name}; expected two at least, to hold out one")
    cut = _line_border(document, holdout)
    return Parts(document._replace(text=document.text[:cut]), document._replace(text=document.text[cut:]))


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
