"""Whatever config.json or header says: a result or one MaxportError, never another exception."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from fake_checkpoints import LLAMA, header_of, llama_shapes, make_checkpoint, write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxport.checkpoint import open_checkpoint
from maxport.errors import MaxportError
from maxport.plan.inspection import inspect_checkpoint
from maxport.plan.memory import Devices
from maxport.plan.walls import check_walls

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *LLAMA,
        *("auto_map", "quantization_config", "text_config", "layer_types", "rope_scaling"),
        *("kv_lora_rank", "head_dim", "is_encoder_decoder", "attribute_map"),
    ]
)
QUANTIZATION = st.dictionaries(
    st.sampled_from(
        [
            *("quant_method", "format", "bits", "config_groups", "weight_block_size"),
            *("activation_scheme", "quant_algo", "group_size", "load_in_4bit"),
        ]
    ),
    VALUES
    | st.sampled_from(["fp8", "gptq", "compressed-tensors", "mxfp4"])
    | st.fixed_dictionaries(
        {"group_0": st.fixed_dictionaries({"weights": VALUES, "input_activations": VALUES})}
    ),
    max_size=5,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.none() | QUANTIZATION)
def test_any_config(changes, quantization):
    config = {**LLAMA, **changes}
    if quantization is not None:
        config["quantization_config"] = quantization
    with TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), config, llama_shapes())
        for device in ("cpu", "gpu"):
            try:
                opened = open_checkpoint(name, inspect_only=True)
                json.dumps(inspect_checkpoint(opened).to_json())
                check_walls(opened, Devices(device, 1, 2**20, "test"))
                open_checkpoint(name)
            except MaxportError as error:
                assert str(error) and str(folder)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["lm_head.weight", "model.norm.weight", "__metadata__", "new"]),
        VALUES | st.fixed_dictionaries({"dtype": VALUES, "shape": VALUES, "data_offsets": VALUES}),
        max_size=3,
    ),
    st.integers(-50, 50),
)
def test_any_header(changes, extra):
    header = {**header_of(llama_shapes()), **changes}
    size = header_of(llama_shapes())["lm_head.weight"]["data_offsets"][1]
    with TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name))
        write_safetensors(folder / "model.safetensors", header, size + extra)
        try:
            opened = open_checkpoint(name)
        except MaxportError as error:
            assert "model.safetensors" in error.where
        else:
            assert opened.tensors and extra == 0 and set(changes) <= {"__metadata__"} | set(header)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_any_file(data):
    with TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name))
        for file in ("model.safetensors", "config.json"):
            (folder / file).write_bytes(data)
            try:
                open_checkpoint(name)
            except MaxportError:
                continue
            raise AssertionError("accepted")
