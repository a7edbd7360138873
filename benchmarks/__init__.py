"""Speed and memory as ratios in one process; `python -m benchmarks` runs them all."""
