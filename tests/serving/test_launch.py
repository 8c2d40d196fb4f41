"""The max serve command, waiting for health, and servers that never get there."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from fake_server import Faults, server

import maxport.cli
from maxport.cli._paths import as_given
from maxport.cli.serve import command
from maxport.errors import MaxportError
from maxport.serving import launch
from maxport.serving.client import Server

PORT = Path(__file__).parents[1] / "fixtures" / "ports" / "helium"

SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({"data": [{"id": "tiny"}]})

    def do_POST(self):
        self.reply({"choices": [{"text": " answer", "message": {"content": "hello"}}]})

port = int(sys.argv[sys.argv.index("--port") + 1])
print("loading", flush=True)
time.sleep(1)
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_max(folder: Path, code: str) -> str:
    script = folder / "max"
    script.write_text(f"#!{sys.executable}\n{code}")
    script.chmod(0o755)
    return str(script)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["HeliumForCausalLM"], "model_type": "helium"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return str(folder)


def test_the_command_has_what_the_port_needs(tmp_path: Path) -> None:
    plain = launch.serve_command("m", PORT, 8001, ["--devices", "cpu"])
    assert plain[1:4] == ["serve", "--model", "m"] and plain[-2:] == ["--devices", "cpu"]
    assert plain[plain.index("--custom-architectures") + 1] == str(PORT)
    assert "--prefer-module-v3" not in plain
    other = tmp_path / "port"
    other.mkdir()
    (other / "__init__.py").write_text("")
    name = "LlamaForCausalLM_ModuleV3"
    (other / "arch.py").write_text(f'arch = SupportedArchitecture(name="{name}")')
    assert launch.registered_name(other) == name
    assert "--prefer-module-v3" in launch.serve_command("m", other, 8001)
    with pytest.raises(MaxportError, match="not a port directory"):
        launch.serve_command("m", PORT.parent, 8001)


def test_paths_are_shown_as_the_user_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PORT.parent)
    command = launch.serve_command("m", Path(PORT.name), 8001)
    assert command[command.index("--custom-architectures") + 1] == PORT.name
    monkeypatch.chdir(PORT)  # MAX takes the last part of the path for the package's name
    command = launch.serve_command("m", Path("."), 8001)
    assert command[command.index("--custom-architectures") + 1] == str(PORT)
    here = Path.cwd()
    assert as_given(here / "a", None) == as_given(here / "a", Path("a")) == "a"
    assert as_given(here / "a", here / "a") == str(here / "a")
    assert as_given(Path("/elsewhere/a"), Path("b")) == "/elsewhere/a"


def test_serve_waits_asks_and_stops(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = fake_max(tmp_path, SERVER)
    monkeypatch.setattr(launch, "max_executable", lambda: script)
    port = free_port()
    arguments = [model, "--port-dir", str(PORT), "--port", str(port), "--once", "--json"]
    result = CliRunner().invoke(command, [*arguments, "--devices", "cpu"], catch_exceptions=False)
    report = json.loads(result.stdout)
    schema = Path(maxport.cli.__file__).parent / "schemas" / "serve.json"
    jsonschema.validate(report, json.loads(schema.read_text()))
    assert report["answer"] == "hello" and report["chat"] and report["model"] == "tiny"
    assert report["command"][-2:] == ["--devices", "cpu"]
    assert not Server(f"http://127.0.0.1:{port}").healthy()


def test_a_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    command = [fake_max(tmp_path, "raise SystemExit('the graph does not build')")]
    address = Server(f"http://127.0.0.1:{free_port()}")
    told = r"ended with code 1: the graph does not build.*gates"
    with (
        pytest.raises(MaxportError, match=told),
        launch.running(command, address, timeout_s=20),
    ):
        pass


def test_a_server_that_never_gets_healthy_is_stopped(tmp_path: Path) -> None:
    command = [fake_max(tmp_path, "import time; print('compiling', flush=True); time.sleep(60)")]
    address = Server(f"http://127.0.0.1:{free_port()}")
    with (
        pytest.raises(MaxportError, match=r"not healthy after 1 s: compiling.*--timeout"),
        launch.running(command, address, timeout_s=1),
    ):
        pass


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with (
        server(Faults()) as url,
        pytest.raises(MaxportError, match="answers at this address"),
        launch.running(["true"], Server(url), timeout_s=1),
    ):
        pass


def test_dry_run_and_help(model: str) -> None:
    result = CliRunner().invoke(command, [model, "--port-dir", str(PORT), "--dry-run"])
    assert "serve --model" in result.stdout and "--custom-architectures" in result.stdout
    assert "Example:" in CliRunner().invoke(command, ["--help"]).output
