"""How well a model predicts: perplexity by our own code, tasks by lm-eval; and what it shows.

diagnosis.py   every metric of docs/metrics.md on a text
scores.py      one figure from many examples, its standard error and paired differences
likelihood.py  log-likelihoods of given tokens under any model that gives logits
perplexity.py  a text in windows
examples.py    the user's JSON lines, read and checked
tasks.py       those examples as lm-eval tasks, and lm-eval's own tasks by name
adapter.py     our decoder as a model that lm-eval can ask
dealt.py       its questions, shared out among processes
harness.py     lm-eval run on a model, its answers as scores
"""

from wakeful.evaluation.diagnosis import Diagnosis, diagnose
from wakeful.evaluation.perplexity import perplexity
from wakeful.evaluation.scores import Score, difference

__all__ = ["Diagnosis", "Score", "diagnose", "difference", "perplexity"]
