"""A file of prompts to a file of completions: every line answered once, in order, whatever happens on the way."""

import dataclasses
import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.decoding.models import bigram
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.batch import Summary, complete_file
from transformer_jax.decoding.generate import generate
from transformer_jax.errors import UserError
from transformer_jax.text.chat import encode_chat
from transformer_jax.text.tokenizer import byte_tokenizer

MODEL = bigram(257)
PARAMS = MODEL.init(jax.random.key(0))
TOKENIZER = byte_tokenizer()
DEFAULTS = DecodingConfig(max_tokens=6, temperature=1.0, top_p=0.95, seed=5)
LINES = [
    '{"prompt": "zero"}',
    '{"prompt": "one", "id": "eins", "max_tokens": 3}',
    '{"prompt": "", "id": -2, "temperature": 0.0}',
    "{not json",
    '{"prompt": "four é中😀", "seed": 9, "top_k": 3, "top_p": 0.5}',
    '{"prompt": "zero"}',
    '{"prompt": 7, "id": "seven"}',
    '{"prompt": "line\\nbreak\\u2028", "max_tokens": 60}',
    '{"prompt": "eight"}',
]


def run(
    source: Path, target: Path, batch_size: int = 4, defaults: DecodingConfig = DEFAULTS, **changes: Any
) -> Summary:
    given: dict[str, Any] = {"params": PARAMS, "tokenizer": TOKENIZER, "identity": "bigram"} | changes
    return complete_file(
        MODEL,
        source=source,
        target=target,
        defaults=defaults,
        batch_size=batch_size,
        **given,
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().removesuffix(b"\n").split(b"\n")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "completions.jsonl"


class TestAnswers:
    def test_every_line_has_its_answer_in_its_place(self, source: Path, target: Path):
        summary = run(source, target)
        assert (summary.completed, summary.failed, summary.resumed) == (7, 2, 0)
        found = records(target)
        assert [record["id"] for record in found] == [1, "eins", -2, 4, 5, 6, "seven", 8, 9]
        assert [record.get("prompt") for record in found][4] == "four é中😀"
        assert found[7]["prompt"] == "line\nbreak\u2028"
        assert {record.get("finish_reason", record.get("error") and "error") for record in found} == {"length", "error"}
        # The eighth asks for more than the context holds.
        assert [record.get("completion_tokens") for record in found] == [6, 3, 6, None, 6, 6, None, 50, 6]
        assert found[4]["seed"] == 9

    def test_an_answer_is_what_its_prompt_gets_alone(self, source: Path, target: Path):
        run(source, target)
        for text, record in zip(LINES, records(target), strict=True):
            if "error" in record:
                continue
            line = json.loads(text)
            own = {name: line[name] for name in ("max_tokens", "temperature", "top_k", "top_p") if name in line}
            settings = dataclasses.replace(DEFAULTS, **own, seed=record["seed"])
            prompt = [TOKENIZER.end_of_text, *TOKENIZER.encode(line["prompt"])]
            (alone,) = generate(MODEL, PARAMS, [prompt], settings, stop_ids=TOKENIZER.stop_ids)
            assert record["completion"] == TOKENIZER.decode(alone.tokens)
            assert record["finish_reason"] == alone.finish_reason
            assert record["completion_tokens"] == len(alone.tokens)
            assert record["prompt_tokens"] == len(prompt)
            assert record["logprob"] == pytest.approx(sum(alone.logprobs), abs=1e-5)

    def test_a_conversation_is_answered_by_the_chat_template(self, source: Path, target: Path):
        template = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
        tokenizer = dataclasses.replace(TOKENIZER, chat_template=template)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|endoftext|>"}]
        lines = [{"messages": messages, "seed": 3}, {"messages": messages, "prompt": "a"}, {"messages": "hi"}]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run(source, target, tokenizer=tokenizer)
        answer, both, none = records(target)
        prompt = [256, *b"system: Be brief.", 256, *b"user: <|endoftext|>", 256]
        assert encode_chat(tokenizer, messages) == prompt
        (alone,) = generate(MODEL, PARAMS, [prompt], dataclasses.replace(DEFAULTS, seed=3), stop_ids=(256,))
        assert answer["messages"] == messages
        assert answer["completion"] == TOKENIZER.decode(alone.tokens)
        assert both["error"] == "there are both a prompt and messages"
        assert "expected a list of objects" in none["error"]
        assert run(source, target, tokenizer=tokenizer).resumed == 3
        with pytest.raises(UserError, match="written by another model or with other settings"):
            run(source, target)

    @pytest.mark.parametrize("batch_size", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 20)), 3])
    def test_the_batch_size_changes_no_answer(self, source: Path, target: Path, batch_size: int):
        run(source, target)
        other = target.with_name("other.jsonl")
        run(source, other, batch_size)
        assert [record.get("completion") for record in records(other)] == [
            record.get("completion") for record in records(target)
        ]

    def test_a_last_batch_of_few_lines_has_the_shape_of_the_others(self, source: Path, target: Path):
        rows = set()

        def recorded(batch: int, length: int) -> Any:
            rows.add((batch, length > 1))
            return MODEL.init_cache(batch, length)

        model = MODEL._replace(init_cache=recorded)
        complete_file(model, PARAMS, TOKENIZER, source, target, DEFAULTS, identity="bigram", batch_size=4)
        assert {batch for batch, real in rows if real} == {4}

    def test_equal_prompts_draw_differently_unless_they_have_a_seed(self, tmp_path: Path, target: Path):
        source = tmp_path / "same.jsonl"
        source.write_text(
            '{"prompt": "a", "max_tokens": 20}\n' * 4 + '{"prompt": "a", "max_tokens": 20, "seed": 3}\n' * 3
        )
        run(source, target)
        found = [record["completion"] for record in records(target)]
        assert len(set(found[:4])) == 4
        assert len(set(found[4:])) == 1

    def test_blank_lines_a_mark_of_the_byte_order_and_a_missing_last_newline(self, tmp_path: Path, target: Path):
        source = tmp_path / "odd.jsonl"
        source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}')
        assert run(source, target).completed == 2
        assert [record["id"] for record in records(target)] == [1, 4]

    def test_no_lines_are_no_answers(self, tmp_path: Path, target: Path):
        source = tmp_path / "empty.jsonl"
        source.write_bytes(b"")
        assert run(source, target) == Summary(0, 0, 0, ())
        assert target.read_bytes() == b""


class TestRefusedLines:
    @pytest.mark.parametrize(
        ("line", "name", "error"),
        [
            (b"{", 2, "not JSON"),
            (b"[1]", 2, "expected an object"),
            (b"7", 2, "expected an object"),
            (b"[" * 100_000, 2, "not JSON"),
            (b'{"prompt": "\xff"}', 2, "not JSON"),
            (b'{"prompt": "a", "prompt": "b"}', 2, "a name stands twice"),
            (b'{"id": "x"}', "x", "there is no prompt"),
            (b'{"id": "x", "prompt": null}', "x", "prompt is None; expected text"),
            (b'{"id": "x", "prompt": "a", "temprature": 1}', "x", "unknown field 'temprature'; expected some of id"),
            (b'{"id": true, "prompt": "a"}', 2, "id is True; expected text or an integer"),
            (b'{"id": "\\ud800", "prompt": "a"}', 2, "expected text or an integer"),
            (b'{"id": "x", "prompt": "\\ud800"}', "x", "lone surrogate"),
            (b'{"id": "x", "prompt": "a", "temperature": -1.0}', "x", "temperature is -1.0; expected at least 0"),
            (b'{"id": "x", "prompt": "a", "temperature": NaN}', "x", "temperature is nan; expected a finite number"),
            (
                b'{"id": "x", "prompt": "a", "temperature": Infinity}',
                "x",
                "temperature is inf; expected a finite number",
            ),
            (b'{"id": "x", "prompt": "a", "top_p": 1.5}', "x", "top_p is 1.5; expected between 0 and 1"),
            (b'{"id": "x", "prompt": "a", "max_tokens": 0}', "x", "max_tokens is 0; expected more than 0"),
            (
                b'{"id": "x", "prompt": "' + b"a" * 63 + b'"}',
                "x",
                "the prompt has 64 tokens; the model's context holds 64",
            ),
        ],
    )
    def test_a_line_that_cannot_be_answered_says_why_and_harms_no_other(
        self, tmp_path: Path, target: Path, line: bytes, name: str | int, error: str
    ):
        source = tmp_path / "prompts.jsonl"
        source.write_bytes(b'{"prompt": "before"}\n' + line + b'\n{"prompt": "after"}\n')
        summary = run(source, target)
        assert (summary.completed, summary.failed) == (2, 1)
        assert summary.first_errors[0].startswith(f"{source}, line 2: ")
        assert error in summary.first_errors[0]
        before, refused, after = records(target)
        assert (before["id"], refused["id"], after["id"]) == (1, name, 3)
        assert refused["line"] == 2
        assert error in refused["error"]
        assert not refused["error"].startswith("DecodingConfig")
        # The others are answered as if it were a prompt like any other.
        source.write_bytes(b'{"prompt": "before"}\n{"prompt": "x"}\n{"prompt": "after"}\n')
        other = target.with_name("other.jsonl")
        run(source, other)
        assert [before, after] == records(other)[::2]


class TestResumption:
    def test_a_finished_file_stays_as_it_is(self, source: Path, target: Path):
        first = run(source, target)
        whole, modified = target.read_bytes(), target.stat().st_mtime_ns
        again = run(source, target)
        assert again == first._replace(resumed=9)
        assert target.read_bytes() == whole
        assert target.stat().st_mtime_ns - modified < 1e9

    def test_cut_anywhere_it_is_completed_to_the_same_bytes(self, source: Path, target: Path):
        run(source, target)
        whole = target.read_bytes()
        for size in [*range(0, len(whole), 61), *range(len(whole) - 9, len(whole))]:
            target.write_bytes(whole[:size])
            summary = run(source, target)
            assert target.read_bytes() == whole, f"cut at byte {size}"
            assert summary.resumed == whole[:size].count(b"\n")
            assert summary.failed == 2

    @pytest.mark.parametrize("own", [0, 2], ids=["alone", "after lines of ours"])
    @pytest.mark.parametrize("foreign", ['{"mine": 1}', '{"id": 4, "mine": 1}', "text", "[1]"])
    def test_a_foreign_last_line_is_not_taken_for_a_torn_one(self, source: Path, target: Path, own: int, foreign: str):
        run(source, target)
        held = b"".join(target.read_bytes().splitlines(keepends=True)[:own]) + foreign.encode()
        target.write_bytes(held)
        with pytest.raises(UserError, match="is not the output of such a run"):
            run(source, target)
        assert target.read_bytes() == held

    def test_nothing_is_left_of_a_torn_line_when_its_prompt_changes(self, source: Path, target: Path):
        run(source, target)
        head = target.read_bytes().split(b"\n")[:7]
        eighth = target.read_bytes().split(b"\n")[7]
        target.write_bytes(b"\n".join([*head, eighth[:-1]]))
        source.write_text("\n".join([*LINES[:7], '{"prompt": "", "max_tokens": 1}']))
        assert run(source, target).resumed == 7
        assert [record["id"] for record in records(target)] == [1, "eins", -2, 4, 5, 6, "seven", 8]

    def test_lines_added_to_the_input_are_added_to_the_output(self, source: Path, target: Path):
        run(source, target)
        whole = target.read_bytes()
        with source.open("a") as file:
            file.write('{"prompt": "late"}\n')
        assert run(source, target).resumed == 9
        assert target.read_bytes().startswith(whole)
        assert records(target)[9]["prompt"] == "late"

    @pytest.mark.parametrize(
        "changes",
        [
            {"identity": "another"},
            {"params": PARAMS.at[256, 7].multiply(-1)},
            {"params": PARAMS[:, ::-1]},
            {"defaults": dataclasses.replace(DEFAULTS, temperature=0.9)},
            {"defaults": dataclasses.replace(DEFAULTS, seed=6)},
        ],
        ids=["config", "one parameter", "order of parameters", "temperature", "seed"],
    )
    def test_two_ways_of_answering_are_not_mixed(self, source: Path, target: Path, changes: dict[str, Any]):
        run(source, target)
        target.write_bytes(target.read_bytes()[:-20])
        before = target.read_bytes()
        with pytest.raises(UserError, match=r"line 1 was written by another model or with other settings"):
            run(source, target, **changes)
        assert target.read_bytes() == before

    @pytest.mark.parametrize(
        ("index", "text", "message"),
        [
            (0, '{"prompt": "other"}', r"line 1 does not answer line 1 of "),
            (1, '{"prompt": "one", "id": "un", "max_tokens": 3}', r"line 2 does not answer line 2 of "),
            (
                1,
                '{"prompt": "one", "id": "eins", "max_tokens": 4}',
                r"line 2 was written by another model or with other",
            ),
            (3, '{"prompt": "now it is right"}', r"line 4 does not answer line 4 of "),
            (slice(2, None), None, r"has more lines than .* has prompts"),
        ],
    )
    def test_another_input_is_refused(self, source: Path, target: Path, index: Any, text: str | None, message: str):
        run(source, target)
        before = target.read_bytes()
        lines = LINES.copy()
        lines[index] = [] if text is None else text
        source.write_text("\n".join(lines), encoding="utf-8")
        with pytest.raises(UserError, match=message):
            run(source, target)
        assert target.read_bytes() == before

    @pytest.mark.parametrize("content", [b"precious\n", b'{"id": 1}\n', b"[1]\n", b"\xff\n", b"\n"])
    def test_a_file_that_is_not_ours_is_left_alone(self, source: Path, target: Path, content: bytes):
        target.write_bytes(content)
        with pytest.raises(UserError, match=r"line 1 is not the output of such a run"):
            run(source, target)
        assert target.read_bytes() == content


class TestFiles:
    def test_input_that_cannot_be_read(self, tmp_path: Path, target: Path):
        with pytest.raises(UserError, match=r"cannot read .*No such file"):
            run(tmp_path / "missing.jsonl", target)
        with pytest.raises(UserError, match=r"cannot read .*Is a directory"):
            run(tmp_path, target)
        assert not target.exists()

    def test_output_that_cannot_be_written(self, source: Path, tmp_path: Path):
        with pytest.raises(UserError, match=r"cannot write .*No such file"):
            run(source, tmp_path / "missing" / "out.jsonl")
        with pytest.raises(UserError, match=r"cannot write .*Is a directory"):
            run(source, tmp_path)
        with pytest.raises(UserError, match="/dev/null is not a regular file"):
            run(source, Path("/dev/null"))

    def test_one_file_for_both(self, source: Path, tmp_path: Path):
        before = source.read_bytes()
        link = tmp_path / "link.jsonl"
        link.symlink_to(source)
        for target in (source, link):
            with pytest.raises(UserError, match="is both the input and the output"):
                run(source, target)
        assert source.read_bytes() == before

    def test_one_process_at_a_time(self, source: Path, target: Path):
        with target.open("wb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(UserError, match="another process is writing"):
                run(source, target)
        assert run(source, target).completed == 7

    def test_a_batch_of_none(self, source: Path, target: Path):
        with pytest.raises(UserError, match="batch_size is 0; expected at least 1"):
            run(source, target, batch_size=0)


class TestProgress:
    def test_it_is_shown_on_a_terminal(
        self, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "100")
        run(source, target)
        out, err = capsys.readouterr()
        assert out == ""
        assert "9/9" in err
        assert "tokens/s" in err

    def test_elsewhere_nothing_is_printed(self, source: Path, target: Path, capsys: pytest.CaptureFixture[str]):
        run(source, target)
        assert capsys.readouterr() == ("", "")


PROGRAM = """
import dataclasses, resource, sys, time
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
from tests.decoding.models import bigram
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.batch import complete_file
from transformer_jax.errors import UserError
from transformer_jax.text.tokenizer import byte_tokenizer

source, target, delay, limit = sys.argv[1:]
tokenizer = byte_tokenizer()

def decode(ids):
    time.sleep(float(delay))
    return tokenizer.decode_fn(ids)

model = bigram(257)
params = model.init(jax.random.key(0))
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    summary = complete_file(
        model, params, dataclasses.replace(tokenizer, decode_fn=decode), Path(source), Path(target),
        DecodingConfig(max_tokens=6), identity="bigram", batch_size=4,
    )
except UserError as error:
    sys.exit(str(error))
print(summary.completed, summary.failed)
"""


class TestProcesses:
    """Real processes, without the type checks that tests otherwise run under."""

    def start(
        self, repository: Path, source: Path, target: Path, *, delay: float = 0, limit: int = 0
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(source), str(target), str(delay), str(limit)],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def write_prompts(self, path: Path, count: int) -> Path:
        path.write_text("".join(f'{{"prompt": "prompt {number}"}}\n' for number in range(count)))
        return path

    @pytest.mark.slow
    def test_a_full_disk_is_said_and_a_second_run_goes_on(self, repository: Path, tmp_path: Path):
        source, target, whole = self.write_prompts(tmp_path / "p", 20), tmp_path / "out", tmp_path / "whole"
        # The kernel ends a file at this size as a full disk does: in the middle of a line.
        process = self.start(repository, source, target, limit=3000)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, "")
        assert err.startswith(f"cannot write {target}: File too large. Its first 12 lines are whole; make room")
        assert target.stat().st_size == 3000
        assert self.start(repository, source, target).communicate(timeout=60) == ("20 0\n", "")
        run(source, whole, defaults=DecodingConfig(max_tokens=6))
        assert target.read_bytes() == whole.read_bytes()

    def test_settings_of_the_wrong_type_are_refused(self, repository: Path, tmp_path: Path):
        source, target = tmp_path / "p", tmp_path / "out"
        wrong = [
            '"temperature": "hot"',
            '"top_k": 2.5',
            '"seed": null',
            '"max_tokens": true',
            '"top_p": []',
            '"seed": -1',
        ]
        right = ['"temperature": 0', '"top_p": 1', '"top_k": null', '"top_k": 10000000000000000000000']
        source.write_text("".join(f'{{"prompt": "a", {setting}}}\n' for setting in wrong + right))
        out, err = self.start(repository, source, target).communicate(timeout=60)
        assert (out, err) == ("4 6\n", "")
        assert [record["error"] for record in records(target)[:6]] == [
            "temperature is 'hot'; expected a finite number",
            "top_k is 2.5; expected an integer or null",
            "seed is None; expected an integer",
            "max_tokens is True; expected an integer",
            "top_p is []; expected a finite number",
            "seed is -1; expected at least 0 and less than 2**32",
        ]

    @pytest.mark.slow
    @pytest.mark.parametrize("kills", [1, 6])
    def test_killed_and_run_again_nothing_is_lost_or_doubled(self, repository: Path, tmp_path: Path, kills: int):
        source, target, whole = self.write_prompts(tmp_path / "p", 40), tmp_path / "out", tmp_path / "whole"
        for kill in range(kills):
            before = target.stat().st_size if target.exists() else 0
            process = self.start(repository, source, target, delay=0.05)
            while not target.exists() or target.stat().st_size <= before:
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.005)
            time.sleep(0.11 * kill % 0.3)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            assert target.read_bytes().count(b"\n") < 40
        assert self.start(repository, source, target).communicate(timeout=60) == ("40 0\n", "")
        run(source, whole, defaults=DecodingConfig(max_tokens=6))
        assert target.read_bytes() == whole.read_bytes()
        assert [record["id"] for record in records(target)] == list(range(1, 41))
