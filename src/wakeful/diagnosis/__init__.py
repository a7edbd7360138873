"""Diagnose a model: sinks, lazy layers, drained values, outliers, and the cure to try."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.diagnosis.measure import ModelDiagnosis, diagnose_model
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
    "LEVELS",
    "DiagnoseOptions",
    "Diagnosis",
    "ModelDiagnosis",
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
        "verdict": ["findings"],
        "measure": ["ModelDiagnosis", "diagnose_model"],
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
