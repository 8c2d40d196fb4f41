"""A Hub repository at one commit: file list, small files, headers by range request, downloads.

All traffic goes through huggingface_hub's own session, headers, cache and downloader, so that
tokens, HF_ENDPOINT, HF_HOME, proxies and offline mode work as its users expect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from maxport.checkpoint.cache import cache_root, write_whole
from maxport.checkpoint.headers import (
    PREFIX_BYTES,
    TensorHeader,
    header_length,
    parse_header,
    read_header,
)
from maxport.checkpoint.hub_errors import retrying
from maxport.errors import MaxportError

FIRST_BYTES = 128 * 1024
"""Asked for first: holds the whole header of most shards, so that one request is enough."""

PARALLEL = 8


class HubSource:
    """A model repository on the Hub.

    Args:
        repo: Hub id such as "HuggingFaceTB/SmolLM2-135M".
        revision: Branch, tag or commit; None for the default branch.

    Raises:
        MaxportError: The id is malformed, the repository or revision is not there or not
            accessible, or the Hub does not answer.
    """

    def __init__(self, repo: str, revision: str | None) -> None:
        _check_id(repo)
        self.repo, self.revision = repo, revision
        self._folder: Path | None = None
        if _offline():
            self._folder = _cached_snapshot(repo, revision, self._kept_commit())
            self.commit = self._folder.name
            self._files = self._cached_files()
        else:
            self.commit, self._files = self._list()
            _remember(self._listing, {"files": self._files})
            write_whole(self._ref, self.commit)

    @property
    def where(self) -> str:
        """Repository and revision."""
        return f"{self.repo}@{self.revision or self.commit[:8]}"

    @property
    def folder(self) -> Path:
        """The snapshot folder in the Hub's cache."""
        if self._folder is None:
            self._folder = self.fetch(["config.json"])
        return self._folder

    def files(self) -> Mapping[str, int | None]:
        """Top-level files of the commit and their sizes."""
        return self._files

    def read(self, name: str) -> bytes:
        """Download a small file into the Hub's cache and return its content."""
        with _no_bars():
            return self._download(name).read_bytes()

    def headers(self, names: Sequence[str]) -> list[tuple[TensorHeader, ...]]:
        """Headers by range request, several at a time; kept in the user's cache per commit."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(self._header, names))

    def fetch(self, names: Sequence[str]) -> Path:
        """Download whole files into the Hub's cache; returns the snapshot folder.

        A shard is checked against its header after the download.
        """
        shards = [name for name in names if name.endswith(".safetensors")]
        with ThreadPoolExecutor(PARALLEL) as pool:
            with _no_bars():
                small = list(pool.map(self._download, [n for n in names if n not in shards]))
            large = list(pool.map(self._download, shards))
        for name, path in zip(shards, large, strict=True):
            read_header(path, name)
        return (large or small)[0].parent if names else self.folder

    @property
    def _listing(self) -> Path:
        return self._kept("files.json")

    @property
    def _home(self) -> Path:
        return cache_root() / "hub" / self.repo.replace("/", "--")

    @property
    def _ref(self) -> Path:
        """Keeps the commit that a branch or tag named last, for offline runs."""
        return self._home / "refs" / quote(self.revision or "main", safe="")

    def _kept(self, name: str) -> Path:
        return self._home / self.commit / name

    def _kept_commit(self) -> str | None:
        try:
            return self._ref.read_text("utf-8").strip() or None
        except OSError:
            return None

    def _list(self) -> tuple[str, dict[str, int | None]]:
        from huggingface_hub import HfApi, constants

        def ask() -> Any:
            return HfApi().model_info(
                self.repo,
                revision=self.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )

        info = retrying(ask, self.repo, self.revision)
        if not info.sha:
            raise MaxportError("the Hub named no commit for the model", where=self.repo)
        names = {item.rfilename: item.size for item in info.siblings or []}
        return str(info.sha), {n: s for n, s in sorted(names.items()) if "/" not in n}

    def _download(self, name: str) -> Path:
        from huggingface_hub import constants, hf_hub_download

        def ask() -> str:
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            path = hf_hub_download(self.repo, name, revision=self.commit, etag_timeout=timeout)
            return str(path)

        return Path(retrying(ask, self.repo, self.revision, name, retried_inside=True))

    def _header(self, name: str) -> tuple[TensorHeader, ...]:
        if local := _in_hub_cache(self.repo, name, self.commit):
            return read_header(local, name)
        kept, size = self._kept(f"{name}.header.json"), self._files.get(name)
        if kept.is_file():
            return parse_header(kept.read_bytes(), name, size)
        if _offline():
            raise MaxportError(
                f"{name} is not in the local Hub cache and offline mode is on",
                where=self.where,
                fix="unset HF_HUB_OFFLINE and run again",
            )
        body, size = self._header_bytes(name, size)
        found = parse_header(body, name, size)
        write_whole(kept, body.decode("utf-8"))
        return found

    def _header_bytes(self, name: str, size: int | None) -> tuple[bytes, int | None]:
        data, total = self._range(name, 0, FIRST_BYTES)
        size = total if size is None else size
        if total is not None and size != total:
            raise MaxportError(
                "the Hub states two sizes for one file", where=f"{self.where}/{name}"
            )
        end = PREFIX_BYTES + header_length(data[:PREFIX_BYTES], name, size)
        while len(data) < end:
            more, _ = self._range(name, len(data), end)
            data += more
        return data[PREFIX_BYTES:end], size

    def _range(self, name: str, start: int, end: int) -> tuple[bytes, int | None]:
        """Bytes [start, end) of a file and its whole size, in one retried request."""
        return retrying(
            lambda: _get_range(self.repo, name, self.commit, start, end),
            self.repo,
            self.revision,
            name,
        )

    def _cached_files(self) -> dict[str, int | None]:
        """The commit's file list kept from an online run, else what the snapshot holds."""
        try:
            kept = json.loads(self._listing.read_text("utf-8"))["files"]
            return dict(kept)
        except (OSError, ValueError, KeyError, TypeError):
            present = [p for p in self.folder.iterdir() if p.is_file()]
            return {p.name: p.stat().st_size for p in sorted(present)}


def _get_range(repo: str, name: str, commit: str, start: int, end: int) -> tuple[bytes, int | None]:
    import httpx
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
    headers["Accept-Encoding"] = "identity"
    url = hf_hub_url(repo, name, revision=commit)
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        partial = response.status_code == 206
        skip, wanted = (0, end - start) if partial else (start, end)
        data = b""
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= wanted:
                break
        total = _total(response.headers.get("Content-Range" if partial else "Content-Length"))
    if not data[skip:wanted] and (total is None or total > start):
        raise httpx.RemoteProtocolError("the server sent no data")
    return data[skip:wanted], total


def _total(header: str | None) -> int | None:
    """The file's size from `Content-Range: bytes 0-9/SIZE` or `Content-Length: SIZE`."""
    last = (header or "").rsplit("/", 1)[-1]
    return int(last) if last.isdigit() else None


def _check_id(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise MaxportError(
            "MODEL is neither a local folder nor a possible Hub id",
            where=repo,
            fix="name a folder, a .gguf file, or a Hub id such as HuggingFaceTB/SmolLM2-135M",
        ) from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """No progress bars for files of a few kilobytes."""
    from huggingface_hub import utils

    group = "huggingface_hub.http_get"
    if utils.are_progress_bars_disabled(group):
        yield
        return
    utils.disable_progress_bars(group)
    try:
        yield
    finally:
        utils.enable_progress_bars(group)


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def _in_hub_cache(repo: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _cached_snapshot(repo: str, revision: str | None, commit: str | None) -> Path:
    config = _in_hub_cache(repo, "config.json", commit or revision)
    if config is None:
        raise MaxportError(
            "no such local folder, and the model is not in the local Hub cache while offline "
            "mode is on",
            where=repo if revision is None else f"{repo}@{revision}",
            fix="check the path, or unset HF_HUB_OFFLINE to ask the Hub",
        )
    return config.parent


def _remember(path: Path, value: Any) -> None:
    if not path.is_file():
        write_whole(path, json.dumps(value))
