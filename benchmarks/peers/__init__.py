"""Quantization tools beside wakeful: one model and text, equal calibration, an environment each.

`python -m benchmarks.peers [MODEL] --text FILE ...` makes an environment for each tool, measures a
cell (a tool's method in a number format) in a process of its own, and prints the tables. A cell
that is done is not measured again.
"""
