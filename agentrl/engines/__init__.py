"""Inference engines behind one protocol.

Names load on first use: importing this package loads neither torch nor sglang.
"""
