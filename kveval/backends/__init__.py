"""What runs a model: `base` is the protocol, `hf` the in-process transformers backend."""
