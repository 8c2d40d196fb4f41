"""Reads found in source text: each way a key can be read, and recall against MAX really running."""

import json
import subprocess
import sys

import pytest

from maxport.children import child_environment
from maxport.plan.config_reads import reads_of_port, reads_of_slug

SOURCE = """
from transformers import AutoConfig

class Config:
    @classmethod
    def initialize(cls, huggingface_config: AutoConfig, other):
        scaling = getattr(huggingface_config, "rope_scaling", None)
        text = huggingface_config.text_config
        return cls(
            width=huggingface_config.hidden_size,
            eps=getattr(huggingface_config, "norm_eps", 1e-6),
            factor=scaling["factor"] if scaling else 1.0,
            low=scaling.get("low_freq_factor", 1.0),
            biased="bias" in huggingface_config,
            layers=text.num_hidden_layers,
            unrelated=other.vocab_size,
        )

def model(pipeline_config):
    hf = pipeline_config.model.huggingface_config
    if hf.tie_word_embeddings:
        head = hf.to_dict()
"""


def test_every_way_to_read_a_key(tmp_path):
    (tmp_path / "model_config.py").write_text(SOURCE)
    found = {key: [r.into for r in reads] for key, reads in reads_of_port(tmp_path).items()}
    assert "width" in found["hidden_size"]
    assert "eps" in found["norm_eps"]
    assert "factor" in found["rope_scaling.factor"]
    assert "low" in found["rope_scaling.low_freq_factor"]
    assert "biased" in found["bias"]
    assert "layers" in found["text_config.num_hidden_layers"]
    assert found["tie_word_embeddings"] == [""]
    assert "vocab_size" not in found and "to_dict" not in found


def test_a_file_that_does_not_parse_is_left_out(tmp_path):
    (tmp_path / "a.py").write_text("def (:")
    (tmp_path / "b.py").write_text("def f(hf_config):\n    return hf_config.vocab_size\n")
    assert list(reads_of_port(tmp_path)) == ["vocab_size"]


def test_config_class_of_another_slug_counts():
    """granite_modulev3 registers llama3_modulev3's config class as its own."""
    own = reads_of_slug("granite_modulev3")
    assert "embedding_multiplier" in own and "rms_norm_eps" in own


MEASURE = """
import json, sys, tempfile
from pathlib import Path
from transformers import PretrainedConfig
from maxport.engine.build import build_native
from maxport.plan.config_reads import reads_of_pipeline, reads_of_slug
from maxport.plan.inspection import aliases
from maxport.twin import default_config, save_twin, twin_config

original, read = PretrainedConfig.__getattribute__, {}

def watch(self, name):
    value = original(self, name)
    frame = sys._getframe(1)
    if not name.startswith("_") and not callable(value):
        if "/site-packages/max/" in frame.f_code.co_filename:
            read.setdefault(name, f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return value

missed = {}
for model_type, name, lane, slug in json.loads(sys.argv[1]):
    with tempfile.TemporaryDirectory() as folder:
        save_twin(twin_config(default_config(model_type)), Path(folder))
        read.clear()
        PretrainedConfig.__getattribute__ = watch
        try:
            build_native(name, Path(folder), lane=lane)
        finally:
            PretrainedConfig.__getattribute__ = original
    keys = [*reads_of_slug(slug), *reads_of_pipeline()]
    said = {part for key in keys for part in key.split(".")}
    lost = {k: v for k, v in read.items() if not said & set(aliases(k, {}))}
    missed[slug] = [len(read), lost]
print(json.dumps(missed))
"""

RUN = [
    ("llama", "LlamaForCausalLM", "v3", "llama3_modulev3"),
    ("granite", "GraniteForCausalLM", "v3", "granite_modulev3"),
    ("olmo2", "Olmo2ForCausalLM", "v3", "olmo2_modulev3"),
    ("lfm2", "Lfm2ForCausalLM", "v2", "lfm2"),
]


@pytest.mark.slow
def test_no_read_of_a_real_build_is_missed():
    """Build MAX's own graphs with every config access recorded; the scan must have found each."""
    command = [sys.executable, "-c", MEASURE, json.dumps(RUN)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=child_environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for slug, (count, lost) in json.loads(done.stdout.splitlines()[-1]).items():
        assert count >= 10 and lost == {}, slug
