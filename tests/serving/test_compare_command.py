"""`maxport compare` on a real tiny checkpoint: a server that serves it rightly, and wrongly."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from fake_server import Faults, server

import maxport.cli
from maxport.cli.compare import command
from maxport.errors import MaxportError

sys.path.insert(0, str(Path(__file__).parents[1] / "gates"))

from tiny_helium import FIXTURE, checkpoint

CONTENTS = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{i}" for i in range(4, 500))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Helium with a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = checkpoint(tmp_path_factory.mktemp("compare") / "helium")
    vocabulary = {word: index for index, word in enumerate(CONTENTS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


class Served:
    """The reference's logits with an error added."""

    def __init__(self, folder: Path, error: float = 0.0) -> None:
        from maxport.verify.reference import load_reference

        self.reference, self.error = load_reference(folder), error

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        logits = self.reference.logits(ids)
        logits[:, ::2] += self.error
        return logits


def run(model: Path, faults: Faults, *options: str) -> tuple[int, dict[str, Any]]:
    from transformers import AutoTokenizer

    with server(faults, AutoTokenizer.from_pretrained(model)) as url:
        port = url.rpartition(":")[2]
        arguments = [str(model), "--host", "127.0.0.1", "--port", port, "--json"]
        prompts = ["--prompt", "w5 w6 w7", "--prompt", "w300 w20", "--max-tokens", "16"]
        result = CliRunner().invoke(command, [*arguments, *prompts, *options])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    schema = Path(maxport.cli.__file__).parent / "schemas" / "compare.json"
    jsonschema.validate(report, json.loads(schema.read_text()))
    return result.exit_code, report


def test_a_right_server_agrees(model: Path) -> None:
    code, report = run(model, Faults(model=Served(model)), "--slug", "helium")
    assert code == 0 and report["verdict"] == "equal" and report["port"] == "helium"
    assert {check["verdict"] for check in report["checks"]} <= {"equal", "not run"}


def test_a_wrong_server_of_a_right_port_is_a_pipeline_fault(model: Path) -> None:
    faults = Faults(model=Served(model, error=2.0), tokens=lambda ids: [1, *ids])
    code, report = run(model, faults, "--port-dir", str(FIXTURE))
    assert code == 1 and report["faults"] == ["pipeline or server", "tokenizer"]
    gap = next(check for check in report["checks"] if check["name"] == "log probabilities")
    assert gap["fault"] == "pipeline or server" and gap["max_diff"] > gap["tolerance"]


def test_no_server_is_bad_input(model: Path) -> None:
    result = CliRunner().invoke(command, [str(model), "--host", "127.0.0.1", "--port", "9"])
    assert isinstance(result.exception, MaxportError) and result.exception.code == 2
