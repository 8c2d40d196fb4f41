"""maxport: Hugging Face models to Modular MAX, V2 to ModuleV3, with proof."""

__version__ = "0.1.0"
