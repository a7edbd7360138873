"""Diagnostics: probes that see a causal language model run.

`watch.watch` shows a model's forward passes to probes; each probe file holds one family of metrics
(sinks, concentration, rank, values, hidden, blocks, patterns). `exact` is the law, `streaming`,
`certificates`, `krylov` and `gram` are the fast paths that agree with it.
"""
