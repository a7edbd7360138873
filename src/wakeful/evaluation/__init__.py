"""How well a model predicts: perplexity by our own code, tasks by lm-eval; and what it shows."""

from wakeful.evaluation.diagnosis import Diagnosis, diagnose
from wakeful.evaluation.perplexity import perplexity
from wakeful.evaluation.scores import Score, difference

__all__ = ["Diagnosis", "Score", "diagnose", "difference", "perplexity"]
