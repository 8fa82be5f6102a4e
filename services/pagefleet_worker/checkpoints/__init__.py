"""Tensors as files hold them: safetensors, GGUF, and quantized in each format."""
