"""The judge: a port's logits against Hugging Face's, with tolerances taken from the reference."""

from maxport.verify.judge import TIERS, check_arguments, verify_port
from maxport.verify.report import Report

__all__ = ["TIERS", "Report", "check_arguments", "verify_port"]
