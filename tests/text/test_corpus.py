import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.errors import UserError
from transformer_jax.text.corpus import Compressed, find_corpus, split, standard_library, survey
from transformer_jax.text.records import PLAIN, Document, Fields

some_texts = st.lists(st.text("ab\n", min_size=2, max_size=4), min_size=2, max_size=12)


def documents(texts: Sequence[str]) -> list[Document]:
    return [Document(f"file {number}", text) for number, text in enumerate(texts)]


def texts(of: Sequence[Document]) -> list[str]:
    return [document.text for document in of]


def read(paths: Sequence[str], fields: Fields = PLAIN) -> list[Document]:
    return list(find_corpus(paths, fields).documents())


class Sides(NamedTuple):
    train: list[Document]
    heldout: list[Document]


def split_all(whole: Sequence[Document], holdout: float) -> Sides:
    parts = list(split(whole, survey(whole), holdout))
    return Sides(*([part for part in side if part is not None] for side in zip(*parts, strict=True)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `data/` in it: text in two depths, JSONL, and what is not text."""
    for name, content in {
        "data/b.txt": b"second\r\n",
        "data/a.md": b"\xef\xbb\xbffirst \xc3\xa9",
        "data/deep/er/c.txt": b"third",
        "data/d.jsonl": b'{"text": "one", "body": "uno"}\n\n{"text": ""}\n{"text": "two\xe2\x80\xa8lines"}\r\n',
        "data/empty.txt": b"",
        "data/picture.png": b"\x89PNG\r\n\xff",
        "data/deep/table.bin": b"a\0b",
        "data/.hidden.txt": b"hidden",
        "data/.git/config": b"hidden",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_gives_its_text_in_order_and_names_what_is_not_text(folder: Path) -> None:
    assert [document[:2] for document in read(["data"])] == [
        ("data/a.md", "first é"),
        ("data/b.txt", "second\r\n"),
        ("data/d.jsonl:1", "one"),
        ("data/d.jsonl:4", "two\u2028lines"),
        ("data/deep/er/c.txt", "third"),
    ]
    assert find_corpus(["data"]).survey().skipped == ("data/deep/table.bin", "data/picture.png")


def test_patterns_are_expanded_and_each_file_is_read_once(folder: Path) -> None:
    assert texts(read(["data/**/*.txt"])) == ["second\r\n", "third"]
    by_two_paths = read(["data/*.txt", "data/**/*.txt"])
    assert [(document.text, document.domain) for document in by_two_paths] == [("second\r\n", 0), ("third", 1)]
    assert texts(read(["data/*.txt"])) == ["second\r\n"]
    os.symlink(folder / "data/b.txt", folder / "link.txt")
    many = read(["data/b.txt", "./data/../data/b.txt", str(folder / "data/b.txt"), "link.txt", "data/*.txt", "data"])
    assert [document.name for document in many][:2] == ["data/b.txt", "data/a.md"]
    assert len(many) == 5
    assert find_corpus(["data/*.png", "data/b.txt"]).survey().skipped == ("data/picture.png",)


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(folder: Path) -> None:
    (folder / "a[1].txt").write_text("brackets")
    assert texts(read(["a[1].txt"])) == ["brackets"]


def test_the_field_of_a_jsonl_line_is_chosen(folder: Path) -> None:
    (folder / "data/d.jsonl").write_text('{"body": "uno"}\n{"body": "due"}')
    assert texts(read(["data/d.jsonl"], Fields("body"))) == ["uno", "due"]


def test_malformed_lines_are_listed_by_number_and_counted(folder: Path) -> None:
    bad = ["{", "[1]", '{"a": 1}', '{"text": 5}', r'{"text": "\ud800"}', "nonsense", "[" * 100_000]
    Path("bad.jsonl").write_text("\n".join(['{"text": "good"}', *bad, '{"text": "good"}']))
    with pytest.raises(UserError) as caught:
        read(["bad.jsonl"])
    message = str(caught.value)
    assert message.startswith("bad.jsonl has 7 malformed lines (line 2: not JSON (")
    for complaint in (
        "line 3: a list, not an object",
        "line 4: no field 'text' among 'a'",
        "line 5: field 'text' is a int, neither text nor messages",
        "line 6: field 'text' has a lone surrogate at character 0",
    ):
        assert complaint in message
    assert "line 7" not in message
    Path("bad.jsonl").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"1 malformed line \(line 1: not JSON"):
        read(["bad.jsonl"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", r"'missing\.txt' does not exist"),
        ("", "'' does not exist"),
        ("data/*.rst", r"pattern data/\*\.rst matches no file"),
        ("data/de*", r"pattern data/de\* matches no file"),
        ("data/picture.png", r"data/picture\.png is not a text file \(invalid start byte at byte 0\)"),
        ("data/deep/table.bin", r"data/deep/table\.bin is not a text file \(a NUL at byte 1\)"),
        ("data/empty.txt", r"corpus data/empty\.txt is empty"),
        ("pictures", r"corpus pictures/0\.png, .* is empty.*not text: pictures/0\.png, .*pictures/4\.png and 2 more"),
        ("binary", r"binary/x\.jsonl has 1 malformed line \(line 1: not UTF-8"),
        ("pipe", "pipe is neither a file nor a folder"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused(folder: Path, path: str, message: str) -> None:
    for number in range(7):
        (folder / "pictures").mkdir(exist_ok=True)
        (folder / f"pictures/{number}.png").write_bytes(b"\xff")
    (folder / "binary").mkdir()
    (folder / "binary/x.jsonl").write_bytes(b"\xff")
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match=message):
        find_corpus([path]).survey()


def test_a_file_that_may_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match=r"cannot read data/a\.md: Permission denied"):
        read(["data"])


def test_the_standard_library_is_the_corpus_when_none_is_named() -> None:
    assert find_corpus() == standard_library()
    whole = read([])
    names = [document.name for document in whole]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert whole[names.index("os.py")].text == Path(os.__file__).read_bytes().decode()
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not [name for name in names if name.startswith("_sysconfigdata")]
    assert 5_000_000 < sum(len(document.text) for document in whole) < 30_000_000


def test_a_python_without_source_asks_for_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, tmp_path / "python313.zip"):
        monkeypatch.setattr("sysconfig.get_path", lambda name, folder=folder: str(folder))
        with pytest.raises(UserError, match=r"no source of its standard library .* DataConfig\.paths"):
            standard_library()


@given(kept=some_texts, holdout=st.floats(0.01, 0.99))
def test_no_text_is_on_both_sides_and_none_is_lost(kept: list[str], holdout: float) -> None:
    sides = split_all(documents(kept), holdout)
    assert sides.train
    assert sides.heldout
    if len(set(kept)) > 1:
        assert not set(texts(sides.train)) & set(texts(sides.heldout))
        assert sorted([*sides.train, *sides.heldout]) == sorted(documents(kept))
        # Both sides keep the order of the corpus.
        assert [d for d in documents(kept) if d in sides.train] == sides.train


def test_the_split_is_the_hash_of_the_text() -> None:
    many = documents([f"text {number}" for number in range(1000)])
    for holdout in (0.1, 0.5):
        heldout = split_all(many, holdout).heldout
        assert heldout == [
            d for d in many if int(hashlib.sha256(d.text.encode()).hexdigest()[:13], 16) < holdout * 16**13
        ]
        assert abs(len(heldout) / 1000 - holdout) < 0.04


def test_renaming_adding_and_removing_files_moves_no_other_document() -> None:
    many = [f"text {number}" for number in range(100)]
    before = split_all(documents(many), 0.2)
    renamed = split_all([Document(f"other {number}", text) for number, text in reversed(list(enumerate(many)))], 0.2)
    assert set(texts(renamed.heldout)) == set(texts(before.heldout))
    added = split_all(documents([*many, *(f"more {number}" for number in range(100)), *many]), 0.2)
    assert set(texts(added.heldout)) & set(many) == set(texts(before.heldout))
    removed = split_all(documents(many[::2]), 0.2)
    assert set(texts(removed.heldout)) == set(texts(before.heldout)) & set(many[::2])


@pytest.mark.parametrize("holdout", [0.0001, 0.9999])
def test_when_a_side_would_be_empty_the_smallest_hash_is_held_out(holdout: float) -> None:
    few = ["a", "b", "c", "b"]
    smallest = min(few, key=lambda text: hashlib.sha256(text.encode()).digest())
    sides = split_all(documents(few), holdout)
    assert set(texts(sides.heldout)) == {smallest}
    assert texts(sides.train) == [text for text in few if text != smallest]


def test_of_one_large_document_among_small_ones_the_last_lines_alone_are_held_out() -> None:
    """Whichever of the two has the smaller hash: nearly all text is trained on, and none is lost."""
    book = "".join(f"line {number}\n" for number in range(5000))
    for note in ("a", "b", "c", "d", "e", "f"):
        sides = split_all(documents([book, note * 400]), 0.03)
        total = len(book) + 400
        assert sum(map(len, texts(sides.heldout))) <= 0.06 * total
        assert sorted("".join(texts(sides.train) + texts(sides.heldout))) == sorted(book + note * 400)


def test_of_a_single_document_the_last_lines_are_held_out() -> None:
    lines = "".join(f"line {number:03}\n" for number in range(100))
    (train,), (heldout,) = split_all([Document("file", lines)], 0.03)
    assert (train.text, heldout.text) == (lines[:-27], lines[-27:])
    assert heldout.name == train.name == "file"
    # Equal documents are cut alike, so no part of one trains the other.
    twice = split_all(documents([lines, lines]), 0.03)
    assert texts(twice.train) == [train.text] * 2
    assert texts(twice.heldout) == [heldout.text] * 2


@pytest.mark.parametrize("text", ["x" * 100, "\n" + "x" * 99, "x" * 99 + "\n"])
def test_a_text_without_a_near_line_border_is_cut_within_a_line(text: str) -> None:
    (train,), (heldout,) = split_all([Document("file", text)], 0.1)
    assert (len(train.text), len(heldout.text)) == (90, 10)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(UserError, match="one document file of 1 characters"):
        split_all([Document("file", "x")], 0.1)


def test_the_fingerprint_is_that_of_the_texts_in_order_in_every_process() -> None:
    one = survey(documents(["ab", "c"])).fingerprint
    assert one == survey([Document("x", "ab"), Document("y", "c")]).fingerprint
    others = [documents(other) for other in (["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c", ""], ["ab"])]
    for changed in ({"domain": 1}, {"weight": 2.0}, {"is_chat": True}):
        others.append([Document("x", "ab"), Document("y", "c")._replace(**changed)])
    assert len({one, *(survey(other).fingerprint for other in others)}) == 9
    code = "from transformer_jax.text.corpus import *; print(survey([Document('', 'ab'), Document('', 'c')])[0])"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == one


def test_compressed_sizes_are_those_of_each_document_alone() -> None:
    lines = json.dumps(list(range(300)))
    compressed = Compressed()
    compressed.add(lines)
    one = compressed.sizes()
    assert one.gzip == 8 * len(gzip.compress(lines.encode(), 9)) / len(lines)
    assert one.xz == 8 * len(lzma.compress(lines.encode())) / len(lines)
    # Together the second copy would cost next to nothing.
    compressed.add(lines)
    assert compressed.sizes() == one
    # Bytes, not characters.
    accents = Compressed()
    accents.add("é" * 500)
    assert accents.sizes().gzip < 8 * 60 / 1000
