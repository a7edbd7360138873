"""The figures and tables of papers, run and judged: the verb `wakeful reproduce`.

    import wakeful_papers
    wakeful_papers.reproduce("value-residual/fig6", scale="tiny")

It is built on `wakeful`, which loads its verb, its layouts of comparisons and its presets by their
entry points and does not depend on it otherwise.
"""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful_papers.verbs.reproduce import Reproduction, reproduce

__all__ = ["Reproduction", "reproduce"]

__getattr__, __dir__, _ = attach(__name__, submod_attrs={"verbs.reproduce": __all__})
