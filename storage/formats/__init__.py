"""Byte formats: JSON objects, Arrow files, safetensors, and sets of tensors as files. Every read is
bounded and verified.
"""
