"""Documents as token ids: made once, kept on disk, and read from there however large they are.

All documents stand in one stream, an end-of-text token before each text and one after the last document. An encoder's
tokenizer has tokens of its own around a text, and a conversation has those of its template, with nothing before it:

    texts          <eot>  a1  a2 <eot>  b1 <eot>
    an encoder's   [CLS]  a1  a2 [SEP] [CLS]  b1 [SEP] <eot>
    conversations   <u>   a1  <a>  a2   <u>   b1  <a>   b2 <eot>
      counted        .     .   .    x    .     .   .     x   .

`counted` tells which tokens are to be learnt: of a conversation those that the assistant says, of a text all.

A side of the corpus, to train on or held out, is a few flat files below the folder of tokenized texts, in one that is
named by the fingerprints of the corpus and of the tokenizer. It is made under another name and then renamed, so it is
whole or not there. This file knows nothing of windows or models.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Shaped

from transformer_jax.errors import UserError
from transformer_jax.text.chat import encode_lesson
from transformer_jax.text.corpus import (
    Compressed,
    CompressedSizes,
    Corpus,
    Document,
    Fingerprint,
    Report,
    Survey,
    split,
)
from transformer_jax.text.tokenizer import Tokenizer
from transformer_jax.text.tokenizer_files import digest_of

VERSION = 1
"""Of what the files hold; another one is made anew."""

SIDES = ("train", "heldout")

_CHARACTERS_AT_ONCE = 1 << 22
"""Text that is tokenized in one call: enough for every core, and little beside the tokens themselves."""

_SECONDS_UNTIL_SETTLED = 2
"""A file that has been written to since may be written to again without its time showing it."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """A stream of documents, in memory or in files."""

    stream: Shaped[np.ndarray, "tokens"]
    """All documents, as whole numbers of 16 or 32 bits."""
    starts: Int64[np.ndarray, "documents"]
    """Where in the stream each document begins."""
    domains: Int32[np.ndarray, "documents"]
    """Number of the corpus that each document is from."""
    weights: Float32[np.ndarray, "documents"]
    """How much each document counts in training."""
    chats: Bool[np.ndarray, "documents"]
    """Whether each is a conversation."""
    counted: Bool[np.ndarray, "tokens"] | None
    """Whether each token is to be learnt; None: all are."""
    num_bytes: int
    """UTF-8 bytes of what is to be learnt: what bits per byte are divided by."""
    folder: Path | None = None
    """Where it is kept; None: in memory alone."""
    domain: int | None = None
    """The one corpus that it is a part from; None: it is the whole stream."""

    def of_domain(self, domain: int) -> "Tokens":
        """Take the documents of one corpus, which lie next to each other in the stream; `num_bytes` stays."""
        first, last = np.searchsorted(self.domains, [domain, domain + 1])
        starts = np.append(self.starts, len(self.stream) - 1)
        # What follows a document ends it, as an end-of-text token.
        begin, end = int(starts[first]), int(starts[last]) + 1
        return replace(
            self,
            stream=self.stream[begin:end],
            starts=self.starts[first:last] - begin,
            domains=self.domains[first:last],
            weights=self.weights[first:last],
            chats=self.chats[first:last],
            counted=None if self.counted is None else self.counted[begin:end],
            domain=domain,
        )

    def __reduce__(self) -> Any:
        # To a worker process goes the name of the files, and not what is in them.
        if self.folder is None:
            return Tokens, tuple(getattr(self, field.name) for field in fields(self))
        return open_tokens, (self.folder, self.domain)


class Text(NamedTuple):
    """A corpus as tokens."""

    train: Tokens
    heldout: Tokens
    compressors: CompressedSizes
    """Of the held-out text."""
    lost: int
    """Held-out documents that the tokenizer does not give back as they were."""


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Tokens:
    """Make tokens in memory. Raises `UserError` when there is no document."""
    files = {name: io.BytesIO() for name in _kinds(tokenizer)}
    side = _Side(tokenizer, files)
    for chunk in _chunks(documents):
        side.add(chunk)
    about = side.close()
    if not about["lengths"]["starts"]:
        raise UserError("there is no document to tokenize; expected at least one")
    arrays: dict[str, Any] = {
        name: np.frombuffer(files[name].getvalue(), kind) for name, kind in _kinds(tokenizer).items()
    }
    return Tokens(**arrays, num_bytes=about["num_bytes"])


def known_survey(corpus: Corpus, folder: Path, report: Report | None = None) -> Survey:
    """Survey a corpus, or remember what an earlier survey of files of the same names, sizes and times found."""
    stats = [(str(file.path.absolute()), file.domain, file.named, _stat(file.path)) for file in corpus.files]
    state = json.dumps([VERSION, corpus.fields, stats])
    path = folder / "surveys" / f"{hashlib.sha256(state.encode(errors='surrogatepass')).hexdigest()}.json"
    try:
        tree = json.loads(path.read_bytes())
        return Survey(**{**tree, "skipped": tuple(tree["skipped"])})
    except (OSError, ValueError, TypeError, KeyError):
        pass
    found = corpus.survey(report)
    newest = max((file.path.stat().st_mtime for file in corpus.files), default=0)
    if newest < time.time() - _SECONDS_UNTIL_SETTLED:
        with _writing(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(found._asdict()))
            partial.rename(path)
    return found


def _stat(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def known_text(
    corpus: Corpus,
    whole: Survey,
    tokenizer: Tokenizer,
    holdout: float,
    folder: Path,
    report: Report | None = None,
) -> Text:
    """Open the tokens of a corpus, which are made when no earlier run has made them.

    Raises `UserError` for a corpus that changes meanwhile, and when they cannot be written.
    """
    key = json.dumps([VERSION, whole.fingerprint, digest_of(tokenizer), holdout])
    place = folder / hashlib.sha256(key.encode()).hexdigest()[:32]
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Who comes second waits, and finds them.
        with open(place.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if place.exists() and any(damage := [_damage(place / side) for side in SIDES]):
                warnings.warn(f"tokens are made anew: {next(filter(None, damage))}", stacklevel=2)
                shutil.rmtree(place)
            if not place.exists():
                partial = place.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    _make(partial, corpus, whole, tokenizer, holdout, report)
                    partial.rename(place)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    about = json.loads((place / "heldout" / "about.json").read_bytes())
    train, heldout = (open_tokens(place / side) for side in SIDES)
    return Text(train, heldout, CompressedSizes(**about["compressors"]), about["lost"])


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"tokenized texts cannot be kept in {folder} ({error.strerror}); make room, or name another folder with"
            " DataConfig.cache"
        ) from None


def open_tokens(folder: Path, domain: int | None = None) -> Tokens:
    """Map the files of a side into memory, which are read where they are used; of one corpus, or of all."""
    about = json.loads((folder / "about.json").read_bytes())
    arrays = {
        name: np.memmap(folder / name, kind, "r", shape=(about["lengths"][name],))
        for name, kind in about["kinds"].items()
    }
    tokens = Tokens(**{"counted": None, **arrays}, num_bytes=about["num_bytes"], folder=folder)
    return tokens if domain is None else tokens.of_domain(domain)


def _damage(folder: Path) -> str | None:
    """Say which file of a side is not as it was written; None if all are."""
    try:
        about = json.loads((folder / "about.json").read_bytes())
        for name in about["kinds"]:
            crc = 0
            with open(folder / name, "rb") as file:
                while block := file.read(1 << 22):
                    crc = zlib.crc32(block, crc)
            if crc != about["crcs"][name]:
                return f"{folder / name} is not what was written there"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{folder} cannot be read ({error})"
    return None


def _make(
    folder: Path,
    corpus: Corpus,
    whole: Survey,
    tokenizer: Tokenizer,
    holdout: float,
    report: Report | None,
) -> None:
    """Write both sides, and about the held-out one what general compressors need for it."""
    kinds = [name for name in _kinds(tokenizer) if name != "counted" or whole.conversations]
    for side in SIDES:
        (folder / side).mkdir(parents=True)
    with ExitStack() as stack:
        files = {
            side: {name: stack.enter_context(open(folder / side / name, "wb")) for name in kinds} for side in SIDES
        }
        sides = {side: _Side(tokenizer, files[side]) for side in SIDES}
        fingerprint, compressed, lost, done = Fingerprint(), Compressed(), 0, 0
        for chunk in _chunks(corpus.documents()):
            for document in chunk:
                fingerprint.add(document)
            parts = list(split(chunk, whole, holdout))
            sides["train"].add([part.train for part in parts if part.train is not None])
            heldout = [part.heldout for part in parts if part.heldout is not None]
            sides["heldout"].add(heldout)
            said = [document.said for document in heldout]
            for text in said:
                compressed.add(text)
            encoded = tokenizer.encode_batch(said)
            lost += sum(tokenizer.decode(ids.tolist()) != text for ids, text in zip(encoded, said, strict=True))
            done += sum(len(document.text) for document in chunk)
            if report:
                report(done, whole.characters)
        if fingerprint.digest() != whole.fingerprint:
            raise UserError("the corpus changed while it was read; try again once nothing writes to it")
        for side in SIDES:
            about = sides[side].close()
            if not about["num_bytes"]:
                raise UserError("the held-out text is empty; hold out more of it (DataConfig.holdout)")
            if side == "heldout":
                about |= {"compressors": compressed.sizes()._asdict(), "lost": lost}
            for file in files[side].values():
                file.flush()
                os.fsync(file.fileno())
            (folder / side / "about.json").write_text(json.dumps(about))


def _kinds(tokenizer: Tokenizer) -> dict[str, str]:
    """The arrays of a side, and the kind of number in each."""
    return {
        "stream": "uint16" if tokenizer.vocab_size <= 2**16 else "int32",
        "starts": "int64",
        "domains": "int32",
        "weights": "float32",
        "chats": "bool",
        "counted": "bool",
    }


class _Side:
    """One side of a corpus while it is written."""

    def __init__(self, tokenizer: Tokenizer, files: Mapping[str, io.BufferedIOBase]) -> None:
        self._tokenizer = tokenizer
        self._files = files
        self._lengths = dict.fromkeys(files, 0)
        self._crcs = dict.fromkeys(files, 0)
        self._num_bytes = 0
        self._after_text = False

    def add(self, documents: Sequence[Document]) -> None:
        tokenizer, T = self._tokenizer, self._lengths["stream"]
        texts = iter(tokenizer.encode_batch([document.text for document in documents if not document.is_chat]))
        before = list(tokenizer.prefix) if tokenizer.suffix else [tokenizer.end_of_text]
        stream, counted, starts = [], [], []
        for document in documents:
            if document.is_chat:
                # It stands alone; a text before it has to end first.
                lead = [tokenizer.end_of_text] * self._after_text
                ids, said = _encode_chat(document, tokenizer)
                starts.append(T + len(lead))
                pieces, learnt = [lead, ids], [True] * len(lead) + said
            else:
                starts.append(T)
                pieces = [before, next(texts), tokenizer.suffix]
                size = sum(map(len, pieces))
                learnt = [self._after_text, *[True] * (size - 1)]
            stream += pieces
            counted += learnt
            T += len(learnt)
            self._after_text = not document.is_chat
            self._num_bytes += len(document.said.encode())
        self._write("stream", np.concatenate([np.asarray(piece, np.int32) for piece in stream]) if stream else [])
        self._write("starts", starts)
        self._write("domains", [document.domain for document in documents])
        self._write("weights", [document.weight for document in documents])
        self._write("chats", [document.is_chat for document in documents])
        self._write("counted", counted)

    def close(self) -> dict[str, Any]:
        """End the stream, and tell what has been written."""
        self._write("stream", [self._tokenizer.end_of_text])
        self._write("counted", [self._after_text])
        kinds = {name: kind for name, kind in _kinds(self._tokenizer).items() if name in self._files}
        return {"kinds": kinds, "lengths": self._lengths, "crcs": self._crcs, "num_bytes": self._num_bytes}

    def _write(self, name: str, values: Any) -> None:
        if name in self._files:
            array = np.asarray(values)
            if name == "stream" and array.size and not 0 <= array.min() <= array.max() < self._tokenizer.vocab_size:
                raise UserError(f"the tokenizer gives ids beyond its own {self._tokenizer.vocab_size}: {array.max()}")
            data = array.astype(_kinds(self._tokenizer)[name]).tobytes()
            self._files[name].write(data)
            self._lengths[name] += len(array)
            self._crcs[name] = zlib.crc32(data, self._crcs[name])


def _encode_chat(document: Document, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    try:
        return encode_lesson(tokenizer, json.loads(document.text))
    except UserError as error:
        raise UserError(f"{document.name}: {error}") from None


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= _CHARACTERS_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
