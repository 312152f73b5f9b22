"""A name on Hugging Face's hub, against a server that speaks as the hub does, by the package that people use."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import pytest

from transformer_jax.architecture import ModelConfig
from transformer_jax.model.transformer import build
from transformer_jax.pretrained.convert import convert
from transformer_jax.text.tokenizer import byte_tokenizer

pytestmark = pytest.mark.slow
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHAPE = ModelConfig(vocab_size=257, num_layers=1, d_model=16, d_ff=16, num_heads=2, max_seq_len=32, dtype="float32")


@pytest.fixture
def hub(tmp_path):
    """The address of a hub that has one model, me/tiny, and the paths that it has been asked for."""
    folder = tmp_path / "published"
    convert(folder, SHAPE, build(SHAPE).init(jax.random.key(0)), byte_tokenizer(), "float32")
    for unwanted in ("consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors"):
        (folder / unwanted).parent.mkdir(exist_ok=True)
        (folder / unwanted).write_bytes(b"of another program")
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            name = self.path.partition(f"/me/tiny/resolve/{COMMIT}/")[2]
            files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            if self.path.startswith("/api/models/me/tiny/revision/"):
                about = {"id": "me/tiny", "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
                self.answer(200, json.dumps(about).encode())
            elif self.path.startswith("/api/models/me/tiny/tree/"):
                tree = [{"type": "file", "path": file, "size": size, "oid": ""} for file, size in files.items()]
                self.answer(200, json.dumps(tree).encode())
            elif name:
                content = (folder / name).read_bytes()
                self.answer(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"')
            else:
                self.answer(404, b"", **{"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def answer(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for header, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content)), **headers}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def generate(name: str, address: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "transformer_jax", "generate", "--model", name, "--prompt", "a"]
    return subprocess.run([*command, "--max-tokens", "4"], env=environment, capture_output=True, text=True)


def test_a_model_is_fetched_once_and_then_found_without_a_network(hub, tmp_path):
    address, asked = hub
    first = generate("me/tiny", address, tmp_path / "home")
    assert first.returncode == 0, first.stderr
    assert any(path.endswith("model.safetensors") for path in asked)
    assert not [path for path in asked if "consolidated" in path or "onnx" in path or "pytorch" in path]
    # Nothing listens at the discard port.
    again = generate("me/tiny", "http://127.0.0.1:9", tmp_path / "home")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    fetched = [path.name for path in (tmp_path / "home").rglob("*") if path.is_symlink() or path.is_file()]
    assert "model.safetensors" in fetched


def test_a_model_that_is_not_there_is_one_message(hub, tmp_path):
    for name, address in (("me/other", hub[0]), ("me/tiny", "http://127.0.0.1:9")):
        failed = generate(name, address, tmp_path / "home")
        assert failed.returncode == 2
        assert failed.stderr.startswith(f"error: {name} cannot be fetched from Hugging Face's hub")
        assert "Traceback" not in failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1
