"""Documents out of files, one at a time: text, JSON lines, Parquet and ArrayRecord.

*.jsonl *.ndjson                an object a line, with the document in one of its fields
*.parquet                       a table, with the document in one of its columns
*.array_record *.arrayrecord    records, each an object of JSON or a tf.train.Example
anything else                   UTF-8 text, which is one document

The name may end in .gz or .zst where the file is compressed. A document is text, or a conversation: a list of messages,
each with a role and a content (chat.py). What is malformed is named by its place. This file knows nothing of tokens.
"""

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from transformer_jax.errors import UserError

NAMED_AT_MOST = 5
"""How many bad lines or files an error lists; it counts the others."""

ROWS_AT_ONCE = 1024
"""Of a Parquet or ArrayRecord file, which are read in blocks."""

LINES, TABLES, RECORDS = (".jsonl", ".ndjson"), (".parquet",), (".array_record", ".arrayrecord")
COMPRESSED = (".gz", ".zst")


class Fields(NamedTuple):
    """Where a record holds what."""

    document: str = "text"
    """The text, or the messages of a conversation."""
    weight: str | None = None
    """How much the document counts, where records say so."""


PLAIN = Fields()


class Document(NamedTuple):
    """A piece of text that is read on its own."""

    name: str
    """The path of its file, and `:line` or `:row`, from 1, in a file of several."""
    text: str
    """Of a conversation, its messages as JSON."""
    domain: int = 0
    """Number of the path by which it was found, from 0."""
    weight: float = 1.0
    """How much it counts in training."""
    is_chat: bool = False
    """Whether it is a conversation."""

    @property
    def said(self) -> str:
        """What is to be learnt of it: the whole text, or what the assistant says."""
        if not self.is_chat:
            return self.text
        return "".join(message["content"] for message in json.loads(self.text) if message["role"] == "assistant")


class NotText(Exception):
    """A file without a format of its own that is not text either, and why."""


class _Refused(NamedTuple):
    """Why a record gives no document."""

    reason: str


def read_documents(file: Path, name: str, fields: Fields = PLAIN) -> Iterator[Document]:
    """Give the documents of a file, those without text left out.

    Raises `NotText` for a file that is none of the kinds, and `UserError` for one that cannot be read or whose records
    are malformed, of which it lists the first.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else None
    kind = suffixes[-1] if suffixes else ""
    try:
        if kind not in (*LINES, *TABLES, *RECORDS):
            text = _decode(_read(file, compression))
            if isinstance(text, _Refused):
                raise NotText(text.reason)
            yield from [Document(name, text)] if text else []
            return
        if compression and kind not in LINES:
            raise UserError(f"{name} is compressed as a whole; expected a {kind} file as it is")
        records = _lines(file, compression, fields) if kind in LINES else _rows(file, kind, fields)
        yield from _checked(name, records, fields, "line" if kind in LINES else "row")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{name} cannot be unpacked ({error}); restore it") from None
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror or error}") from None


def _checked(name: str, records: Iterator[tuple[int, Any]], fields: Fields, unit: str) -> Iterator[Document]:
    """Make documents of numbered records. Raises `UserError` at the end where some were malformed."""
    complaints: list[str] = []
    count = 0
    for number, record in records:
        document = record if isinstance(record, _Refused) else _document_of(f"{name}:{number}", record, fields)
        if isinstance(document, _Refused):
            count += 1
            if count <= NAMED_AT_MOST:
                complaints.append(f"{unit} {number}: {document.reason}")
        elif document.text and not count:
            yield document
    if count:
        listed = "; ".join(complaints) + ("; ..." if count > NAMED_AT_MOST else "")
        raise UserError(
            f"{name} has {count} malformed {unit}{'s' if count > 1 else ''} ({listed});"
            f" expected text, or messages, in the field {fields.document!r} of each (DataConfig.jsonl_field)"
        )


def _document_of(name: str, record: Any, fields: Fields) -> Document | _Refused:
    if not isinstance(record, dict):
        return _Refused(f"a {type(record).__name__}, not an object")
    wanted = (fields.document,) if fields.weight is None else fields
    missing = [field for field in wanted if field not in record]
    if missing:
        return _Refused(f"no field {missing[0]!r} among {', '.join(map(repr, list(record)[:NAMED_AT_MOST])) or 'none'}")
    value, weight = record[fields.document], 1.0 if fields.weight is None else record[fields.weight]
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
        return _Refused(f"field {fields.weight!r} is {weight!r}, not a finite number of at least 0")
    is_chat = isinstance(value, list)
    if is_chat:
        wrong = _wrong_message(value)
        if wrong is not None:
            return _Refused(f"field {fields.document!r}: {wrong}")
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return _Refused(f"field {fields.document!r} is a {type(value).__name__}, neither text nor messages")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return _Refused(f"field {fields.document!r} has a lone surrogate at character {error.start}, half a character")
    return Document(name, value, weight=float(weight), is_chat=is_chat)


def _wrong_message(messages: list[Any]) -> str | None:
    """Say what keeps a list from being a conversation to learn from."""
    for number, message in enumerate(messages):
        texts = isinstance(message, dict) and set(message) == {"role", "content"} and set(map(type, message.values()))
        if texts != {str}:
            return f"message {number} is {str(message)[:80]!r}, not an object with a role and a content"
    return None if any(message["role"] == "assistant" for message in messages) else "no message is the assistant's"


def _read(file: Path, compression: str | None) -> bytes:
    with _opened(file, compression) as stream:
        return stream.read()


def _opened(file: Path, compression: str | None) -> IO[bytes]:
    if compression == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if compression == ".zst":
        pyarrow = _pyarrow("pyarrow", f"{file} is compressed with Zstandard")
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd"))
    return open(file, "rb")


def _pyarrow(module: str, why: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{why}, which needs another package ({error}); pip install -e '.[data]'") from None


def _decode(data: bytes) -> str | _Refused:
    """Decode UTF-8, with or without a byte-order mark; line ends stay as they are."""
    if b"\0" in data:
        return _Refused(f"a NUL at byte {data.index(0)}")
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return _Refused(f"{error.reason} at byte {error.start}")


def _lines(file: Path, compression: str | None, fields: Fields) -> Iterator[tuple[int, Any]]:
    with _opened(file, compression) as stream:
        # Only "\n" ends a line of bytes: a JSON string may hold the other characters at which str.splitlines breaks.
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _parse(line)


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _Refused(f"not UTF-8 ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:
        return _Refused(f"not JSON ({error})")


def _rows(file: Path, kind: str, fields: Fields) -> Iterator[tuple[int, Any]]:
    blocks = _parquet_blocks(file, fields) if kind in TABLES else _array_record_blocks(file)
    yield from enumerate((row for block in blocks for row in block), start=1)


def _parquet_blocks(file: Path, fields: Fields) -> Iterator[Sequence[Any]]:
    why = f"{file} is a Parquet file"
    pyarrow, parquet = _pyarrow("pyarrow", why), _pyarrow("pyarrow.parquet", why)
    try:
        with parquet.ParquetFile(file) as table:
            wanted = [field for field in fields if field is not None]
            missing = [field for field in wanted if field not in table.schema_arrow.names]
            if missing:
                raise UserError(
                    f"{file} has no column {missing[0]!r} among {', '.join(table.schema_arrow.names[:20])};"
                    " name it with DataConfig.jsonl_field"
                )
            for block in table.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
                yield block.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{file} is not a whole Parquet file ({error!s:.200}); restore it") from None


def _array_record_blocks(file: Path) -> Iterator[Sequence[Any]]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise UserError(f"{file} is an ArrayRecord file, which this system has no package for ({error})") from None
    # The package ends the process on a file that it cannot open.
    open(file, "rb").close()
    reader = ArrayRecordReader(str(file))
    try:
        if not reader.ok():
            raise UserError(f"{file} is not a whole ArrayRecord file; restore it")
        count = reader.num_records()
        for begin in range(0, count, ROWS_AT_ONCE):
            records = reader.read(begin, min(begin + ROWS_AT_ONCE, count))
            yield [_parse(record) if record.lstrip()[:1] == b"{" else _parse_example(record) for record in records]
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{file} is not a whole ArrayRecord file ({error!s:.200}); restore it") from None
    finally:
        reader.close()


def _parse_example(data: bytes) -> Any:
    """Read the first value of each feature of a serialized tf.train.Example.

        Example {1: Features {1: (1: name, 2: Feature {1: bytes, 2: floats, 3: integers}) ...}}

    Reference: "Protocol Buffers: Encoding", for the form of messages.
    """
    record: dict[str, Any] = {}
    try:
        for _, features in _message(data):
            for _, entry in _message(features):
                pair = dict(_message(entry))
                for kind, values in _message(pair[2]):
                    for _, value in list(_message(values))[:1]:
                        record[pair[1].decode()] = _value(kind, value)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        return _Refused(f"neither JSON nor a tf.train.Example ({error!s:.80})")
    return record


def _value(kind: int, value: Any) -> Any:
    import struct

    if kind == 1:
        return value.decode()
    if kind == 2:
        return struct.unpack_from("<f", value)[0]
    return value if isinstance(value, int) else _varint(value, 0)[0]


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """Give the numbered fields of a message: bytes, or an integer where one stands alone."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
        elif key & 7 in (2, 5):
            size, at = _varint(data, at) if key & 7 == 2 else (4, at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("cut short")
        else:
            raise ValueError(f"wire type {key & 7}")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        result |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return result, at
