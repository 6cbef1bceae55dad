"""Exporting adapters to ONNX."""
