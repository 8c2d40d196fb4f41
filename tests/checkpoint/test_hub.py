"""Checkpoints on the Hub: what is fetched, what is kept, and one clear error per fault."""

import json
import os
import subprocess
import sys

import pytest
from fake_checkpoints import LLAMA, make_checkpoint
from hub_server import COMMIT, HubServer, cut_off, page, redirect_loop, slow, status

from maxport.checkpoint import hub_errors, open_checkpoint
from maxport.errors import MaxportError

REPO = "team/model"


@pytest.fixture
def hub(tmp_path, monkeypatch, own_cache):
    """A local Hub with one repository; huggingface_hub points at it with an empty cache."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    make_checkpoint(tmp_path / "repos" / REPO, {**LLAMA, "num_hidden_layers": 8}, shards=3)
    (tmp_path / "repos" / REPO / "README.md").write_text("# model")
    with HubServer(tmp_path / "repos") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.4)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.4)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(hub_errors, "WAITS", (0.01, 0.01, 0.01))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        close_session()
        server.hf = tmp_path / "hf"
        yield server
        close_session()


def half_written(hub):
    """Files in the Hub cache that are neither whole nor empty markers."""
    found = []
    for path in hub.hf.rglob("*"):
        if path.name.endswith(".incomplete"):
            found.append(path)
    for path in hub.hf.glob("*/snapshots/*/*"):
        source = hub.root / REPO / path.name
        if path.read_bytes() != source.read_bytes():
            found.append(path)
    return found


def test_open_fetches_config_and_headers_only(hub):
    opened = open_checkpoint(REPO)
    assert opened.revision == COMMIT and opened.config["num_hidden_layers"] == 8
    assert opened.generation_config == {"eos_token_id": 2}
    assert opened.tokenizer_files == ("tokenizer.json", "tokenizer_config.json")
    local = open_checkpoint(str(hub.root / REPO))
    assert opened.tensors == local.tensors
    assert (opened.folder / "config.json").is_file()
    assert not list(opened.folder.glob("*.safetensors"))
    assert all(
        wanted
        for method, path, wanted in hub.requests
        if ".safetensors" in path and "index" not in path
    )
    assert hub.count("GET", "tokenizer.json") == hub.count("GET", "README.md") == 0


def test_headers_longer_than_the_first_request(hub, monkeypatch):
    monkeypatch.setattr("maxport.checkpoint.hub.FIRST_BYTES", 64)
    assert open_checkpoint(REPO).tensors == open_checkpoint(str(hub.root / REPO)).tensors
    assert hub.count("GET", "00001-of-00003.safetensors") == 2


def test_server_that_ignores_ranges(hub, monkeypatch):
    monkeypatch.setattr("maxport.checkpoint.hub.FIRST_BYTES", 64)
    hub.ignore_ranges = True
    assert open_checkpoint(REPO).tensors == open_checkpoint(str(hub.root / REPO)).tensors


def test_headers_are_kept_per_commit(hub):
    first = open_checkpoint(REPO)
    before = hub.count("GET", ".safetensors")
    assert open_checkpoint(REPO).tensors == first.tensors
    assert hub.count("GET", "of-00003.safetensors") == before - hub.count("GET", "index.json")


def test_weights_folder_downloads_everything_needed_once(hub):
    opened = open_checkpoint(REPO)
    folder = opened.weights_folder()
    names = {path.name for path in folder.iterdir()}
    source = {path.name for path in (hub.root / REPO).iterdir()}
    assert names == source - {"README.md"}
    again = open_checkpoint(str(folder))
    assert again.tensors == opened.tensors
    sent = dict(hub.sent)
    assert opened.weights_folder() == folder and hub.sent == sent
    assert not half_written(hub)


@pytest.mark.parametrize("revision", ["main", "v1", COMMIT])
def test_revision(hub, revision):
    assert open_checkpoint(REPO, revision=revision).revision == COMMIT


def test_offline_after_an_online_run(hub, monkeypatch):
    from huggingface_hub import constants

    online = open_checkpoint(REPO)
    assert open_checkpoint(REPO, revision="v1").revision == COMMIT
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    count = len(hub.requests)
    offline = open_checkpoint(REPO)
    assert offline.tensors == online.tensors and offline.revision == COMMIT
    assert len(hub.requests) == count
    with pytest.raises(MaxportError, match="offline mode is on"):
        offline.weights_folder()
    assert open_checkpoint(REPO, revision="v1").tensors == online.tensors
    for model, revision in (("team/other", None), (REPO, "v9")):
        with pytest.raises(MaxportError, match="not in the local Hub cache while offline"):
            open_checkpoint(model, revision=revision)


def test_only_bin_weights(hub):
    for path in (hub.root / REPO).glob("*.safetensors*"):
        path.unlink()
    (hub.root / REPO / "pytorch_model.bin").write_bytes(b"x" * 1000)
    with pytest.raises(MaxportError, match=r"only as \.bin"):
        open_checkpoint(REPO)
    assert hub.count("GET", ".bin") == 0


def test_no_config(hub):
    (hub.root / REPO / "config.json").unlink()
    with pytest.raises(MaxportError, match=r"no config\.json"):
        open_checkpoint(REPO)


def test_truncated_on_the_hub(hub):
    shard = hub.root / REPO / "model-00003-of-00003.safetensors"
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)
    with pytest.raises(MaxportError, match="truncated"):
        open_checkpoint(REPO)


API = f"/api/models/{REPO}"
SHARD = "model-00002-of-00003.safetensors"
CASES = {
    "401 bad token": (
        "GET",
        API,
        status(401, message="Invalid credentials in Authorization header"),
        "does not accept the access token",
    ),
    "401 anonymous": ("GET", API, status(401), "no such model"),
    "403": ("GET", API, status(403, message="no access"), "forbids access"),
    "403 gated": ("GET", API, status(403, "GatedRepo"), "the model is gated"),
    "gated file": ("*", "config.json", status(403, "GatedRepo"), "the model is gated"),
    "disabled": (
        "GET",
        API,
        status(403, message="Access to this resource is disabled."),
        "disabled access",
    ),
    "404 repo": ("GET", API, status(404, "RepoNotFound"), "no such model"),
    "404 bare": ("GET", API, status(404), "no such model"),
    "404 file": ("*", SHARD, status(404, "EntryNotFound"), "no such file"),
    "404 config": ("*", "/config.json", status(404, "EntryNotFound"), "no such file"),
    "429": ("GET", API, status(429), "limits the rate"),
    "429 long wait": ("GET", API, status(429, Retry_After="3600"), "limits the rate"),
    "429 file": ("*", SHARD, status(429), "limits the rate"),
    "500": ("GET", API, status(500), "fault of its own \\(HTTP 500\\)"),
    "503 file": ("*", "/config.json", status(503), "fault of its own \\(HTTP 503\\)"),
    "500 header": ("GET", SHARD, status(500), "fault of its own"),
    "slow api": ("GET", API, slow(1), "did not answer in time"),
    "slow header": ("GET", SHARD, slow(1), "did not answer in time"),
    "redirects api": ("GET", API, redirect_loop, "redirects in a circle"),
    "redirects header": ("GET", SHARD, redirect_loop, "redirects in a circle"),
    "redirects config": ("*", "/config.json", redirect_loop, "redirects in a circle"),
    "header cut off": ("GET", SHARD, cut_off(5), "cut the transfer off"),
    "header cut to nothing": ("GET", SHARD, cut_off(0), "cut the transfer off"),
    "portal instead of api": ("GET", API, page, "answer cannot be used"),
    "portal instead of shard": ("GET", SHARD, page, "two sizes|impossible header"),
    "portal instead of config": ("*", "/config.json", page, "answer cannot be used|not in its"),
    "teapot": ("GET", API, status(418), "HTTP 418"),
}


@pytest.mark.parametrize("name", CASES)
def test_fault_that_stays(hub, own_cache, name):
    method, part, fault, message = CASES[name]
    hub.fault(method, part, fault)
    with pytest.raises(MaxportError, match=message) as caught:
        open_checkpoint(REPO)
    assert caught.value.code == 2 and caught.value.where.startswith(REPO)
    assert not half_written(hub)
    assert not list(own_cache.rglob(".*")), "a temporary file was left"


@pytest.mark.parametrize(
    ("method", "part", "fault"),
    [
        ("GET", API, status(429)),
        ("GET", API, status(429, Retry_After="0")),
        ("GET", API, status(500)),
        ("GET", API, slow(1)),
        ("*", "/config.json", status(503)),
        ("GET", SHARD, status(502)),
        ("GET", SHARD, slow(1)),
        ("GET", SHARD, cut_off(5)),
    ],
)
def test_fault_that_passes(hub, capsys, method, part, fault):
    hub.fault(method, part, fault, times=2)
    assert open_checkpoint(REPO).tensors == open_checkpoint(str(hub.root / REPO)).tensors
    assert all("trying again in" in line for line in capsys.readouterr().err.splitlines())


def test_missing_repo_and_revision(hub):
    with pytest.raises(MaxportError, match="no such model: neither a local folder"):
        open_checkpoint("team/none")
    with pytest.raises(MaxportError, match="no revision 'v9'"):
        open_checkpoint(REPO, revision="v9")


def test_nobody_there(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MaxportError, match="cannot be reached"):
        open_checkpoint(REPO)


@pytest.mark.parametrize("after", [0, 1000])
def test_download_cut_off_once_is_resumed(hub, after):
    opened = open_checkpoint(REPO)
    hub.fault("GET", SHARD, cut_off(after), times=2)
    folder = opened.weights_folder()
    assert (folder / SHARD).read_bytes() == (hub.root / REPO / SHARD).read_bytes()
    assert not half_written(hub)


@pytest.mark.parametrize("after", [0, 1])
def test_download_cut_off_for_ever_leaves_nothing(hub, after):
    opened = open_checkpoint(REPO)
    hub.fault("GET", SHARD, cut_off(after))
    with pytest.raises(MaxportError, match="cut the transfer off"):
        opened.weights_folder()
    assert not half_written(hub)
    assert not (opened.folder / SHARD).exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(403, "GatedRepo"), "gated"),
        (status(401, message="Invalid credentials in Authorization header"), "access token"),
        (status(429), "limits the rate"),
        (status(500), "fault of its own"),
        (status(404, "EntryNotFound"), "no such file"),
        (redirect_loop, "redirects in a circle"),
        (slow(0.5), "did not answer in time|cut the transfer off"),  # its second try waits longer
    ],
)
def test_download_fault(hub, fault, message):
    opened = open_checkpoint(REPO)
    hub.fault("*", SHARD, fault)
    with pytest.raises(MaxportError, match=message):
        opened.weights_folder()
    assert not half_written(hub)


def test_shard_replaced_after_the_headers_were_read(hub):
    opened = open_checkpoint(REPO)
    (hub.root / REPO / SHARD).write_bytes(b"\x02\0\0\0\0\0\0\0{}" + b"0" * 10)
    with pytest.raises(MaxportError, match="header is wrong"):
        opened.weights_folder()


@pytest.mark.parametrize("fault", [status(404), status(403, "GatedRepo"), redirect_loop])
def test_command_prints_one_message_and_no_traceback(hub, tmp_path, fault):
    hub.fault("GET", API, fault)
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    env |= {"HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "maxport", "list-keys", REPO, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert set(json.loads(done.stdout)) == {"error", "where", "fix"}
