"""How well a model predicts: perplexity by our own code, tasks by lm-eval; and what it shows.

diagnosis.py   the metrics of docs/metrics.md on a text
scores.py      one figure from many examples, its standard error and paired differences
perplexity.py  log-likelihoods under any model that gives logits, and a text in windows
examples.py    the user's JSON lines, read and checked
tasks.py       those examples as lm-eval tasks, and lm-eval's own tasks by name
groups.py      groups of lm-eval's tasks: their own figures, weighted as they are defined
adapter.py     our decoder as a model that lm-eval can ask
harness.py     lm-eval run on a model, over processes too, its answers as scores
"""

from wakeful.evaluation.diagnosis import Diagnosis, diagnose
from wakeful.evaluation.perplexity import perplexity
from wakeful.evaluation.scores import Score, difference

__all__ = ["Diagnosis", "Score", "diagnose", "difference", "perplexity"]
