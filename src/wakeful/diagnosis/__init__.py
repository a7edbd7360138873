"""Diagnose a model: sinks, lazy layers, drained values, outliers, and the cure to try."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.diagnosis.advice import advise
    from wakeful.diagnosis.measure import DIAGNOSIS_PASSES, ModelDiagnosis, diagnose_model
    from wakeful.diagnosis.options import DiagnoseOptions
    from wakeful.diagnosis.report import LEVELS, after_cure, diagnosis_report
    from wakeful.diagnosis.sink_choice import (
        CHOOSING_TOKENS,
        choose_prefix,
        loss_change,
        windows_of,
    )
    from wakeful.diagnosis.tool import Diagnosis, diagnose
    from wakeful.diagnosis.verdict import findings

__all__ = [
    "CHOOSING_TOKENS",
    "DIAGNOSIS_PASSES",
    "LEVELS",
    "DiagnoseOptions",
    "Diagnosis",
    "ModelDiagnosis",
    "advise",
    "after_cure",
    "choose_prefix",
    "diagnose",
    "diagnose_model",
    "diagnosis_report",
    "findings",
    "loss_change",
    "windows_of",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "advice": ["advise"],
        "verdict": ["findings"],
        "measure": ["DIAGNOSIS_PASSES", "ModelDiagnosis", "diagnose_model"],
        "options": ["DiagnoseOptions"],
        "report": ["LEVELS", "after_cure", "diagnosis_report"],
        "sink_choice": [
            "CHOOSING_TOKENS",
            "choose_prefix",
            "loss_change",
            "windows_of",
        ],
        "tool": ["Diagnosis", "diagnose"],
    },
)
