"""How the model differs from the donor, measured on traced twins of both."""

from __future__ import annotations

from collections.abc import Callable

from maxport.checkpoint import Checkpoint
from maxport.errors import MaxportError
from maxport.plan.compare import Delta
from maxport.plan.native import NativeArch


def measured_deltas(
    checkpoint: Checkpoint,
    arch: NativeArch,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[Delta], str]:
    """Differences from the donor's own Hugging Face class, or the reason there are none.

    Args:
        checkpoint: The model to port; only its configuration is used.
        arch: The donor.
        trust_remote_code: Whether code in the checkpoint may run.
        progress: Told in a few words what is being done.
    """
    from transformers import AutoConfig

    from maxport.plan.compare import compare
    from maxport.plan.donors import donor_print, donors
    from maxport.plan.fingerprint import fingerprint

    say = progress or (lambda text: None)
    known = next((d for d in donors() if d.arch.name == arch.name), None)
    if known is None:
        return [], f"transformers has no class {arch.class_name} to measure the donor by"
    say(f"tracing the donor's class {arch.class_name}")
    theirs = donor_print(known.model_type)
    if theirs is None:
        return [], f"the donor's class {arch.class_name} cannot be traced"
    say("tracing the model")
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
        ours = fingerprint(config)
    except MaxportError as error:
        return [], str(error)
    except (ValueError, KeyError, OSError) as error:
        return [], f"transformers cannot read the configuration: {error}"
    return list(compare(ours, theirs).deltas), ""
