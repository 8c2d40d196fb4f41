"""Every known pitfall of ports that gates are to catch, and the cases here that plant it.

Pitfalls of reading the model, of square or renamed weights, of bias defaults and of comparing are
not here: tracing, `verify` and `migrate --prove` catch those, on numbers.
"""

from __future__ import annotations

import pytest
import test_gates_command
import test_probed_faults
import test_read_faults

#: What goes wrong -> the cases that plant it: names in CASES, messages in LINT or DOCS, tests.
PITFALLS: dict[str, tuple[str, ...]] = {
    "weights MAX ignores or leaves out silently": ("extra", "name_missing", "name_unknown"),
    "load_state_dict(strict=False)": ("strict=False",),
    "tied head: config and checkpoint disagree": ("own_head_always", "head_ignored", "config_lies"),
    "more embedding rows than vocab_size": ("more_rows_than_vocab_size",),
    "biases in the checkpoint or in the config only": ("bias_in_checkpoint", "bias_in_config"),
    "a transpose is missing": ("not_transposed",),
    "the adapter applied twice": ("twice",),
    "bfloat16 through numpy; WeightData.shape": (
        "through numpy, which has no bfloat16",
        "no_shape",
    ),
    "only .bin weights": ("test_weight_files",),
    "truncated or missing shard": ("test_damaged_weight_files",),
    "stored dtype against what is planned and served": (
        *("test_encoding_against_the_stored_dtype", "not_cast"),
    ),
    "rope_theta read where it no longer is": ("always gives 10000.0",),
    "rope_split_store_ragged for partial rotary": (
        "test_lint_knows_partial_rotary_from_the_config",
    ),
    "ARCHITECTURES missing, a tuple, or empty": ("no_architectures", "a_tuple", "empty"),
    "parent folder passed; name shadows a package": ("test_layout_faults",),
    "relative imports beyond the package": ("beyond",),
    "arch.name differs; MAX's own answers instead": ("wrong_name", "falls_back"),
    "_ModuleV3 forgotten": ("suffix_forgotten",),
    "no memory_planner": ("no_planner",),
    "two architectures on one PipelineModel": ("shared_model",),
    "ops.constant without device=": ("ops.constant without device=",),
    "Tensor.to(DeviceRef)": ("not a DeviceRef",),
    "unpacking a Tensor loops for ever": (
        *("the Tensor 'x' is unpacked", "'tokens' is unpacked"),
        "test_a_build_that_hangs_or_dies",
    ),
    "ModuleList(*layers)": ("ModuleList(*layers)",),
    "plain lists and Tensors on self": (
        *("is a plain list of modules", "self.last is set while", "cached_tensor"),
    ),
    "PagedCacheValues from max.nn": ("has no from_upstream",),
    "ReturnLogits.VARIABLE": ("left_over_range",),
    "docstrings that describe the donor": ("lie: 'Llama'", "stale: 'Qwen'", "lie: 'QK-norm'"),
    "Buffer.zeros races on CPU": ("races with the graph",),
}


def planted() -> set[str]:
    """Every fault that the tests beside this one plant and expect to be reported."""
    modules = (test_probed_faults, test_read_faults, test_gates_command)
    tests = {name for module in modules for name in vars(module) if name.startswith("test_")}
    cases = {case.name for case in test_probed_faults.CASES if case.gate}
    messages = {row[0] for row in test_read_faults.LINT} | set(test_read_faults.DOCS)
    return tests | cases | messages


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_every_pitfall_is_planted(pitfall: str) -> None:
    assert set(PITFALLS[pitfall]) <= planted()


def test_every_planted_fault_belongs_to_a_pitfall() -> None:
    """Faults in CASES and LINT that no pitfall names would be tests without a reason."""
    named = {case for cases in PITFALLS.values() for case in cases}
    cases = {case.name for case in test_probed_faults.CASES if case.gate}
    assert cases | {row[0] for row in test_read_faults.LINT} <= named
