"""Diagnose a model: sinks, lazy layers, drained values, outliers, and the cure to try."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.diagnosis.advice import advise
    from wakeful.diagnosis.heads import FIRST_SHARE, head_map
    from wakeful.diagnosis.measure import (
        DIAGNOSIS_PASSES,
        ModelDiagnosis,
        diagnose_model,
        read_diagnosis,
    )
    from wakeful.diagnosis.options import DiagnoseOptions
    from wakeful.diagnosis.report import LEVELS, after_cure, diagnosis_report
    from wakeful.diagnosis.sink_choice import (
        CHOOSING_TOKENS,
        choose_opening,
        choose_prefix,
        loss_change,
        windows_of,
    )
    from wakeful.diagnosis.tool import Diagnosis, diagnose
    from wakeful.diagnosis.verdict import findings, sink_level

__all__ = [
    "CHOOSING_TOKENS",
    "DIAGNOSIS_PASSES",
    "FIRST_SHARE",
    "LEVELS",
    "DiagnoseOptions",
    "Diagnosis",
    "ModelDiagnosis",
    "advise",
    "after_cure",
    "choose_opening",
    "choose_prefix",
    "diagnose",
    "diagnose_model",
    "diagnosis_report",
    "findings",
    "head_map",
    "loss_change",
    "read_diagnosis",
    "sink_level",
    "windows_of",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "advice": ["advise"],
        "verdict": ["findings", "sink_level"],
        "heads": ["FIRST_SHARE", "head_map"],
        "measure": ["DIAGNOSIS_PASSES", "ModelDiagnosis", "diagnose_model", "read_diagnosis"],
        "options": ["DiagnoseOptions"],
        "report": ["LEVELS", "after_cure", "diagnosis_report"],
        "sink_choice": [
            "CHOOSING_TOKENS",
            "choose_opening",
            "choose_prefix",
            "loss_change",
            "windows_of",
        ],
        "tool": ["Diagnosis", "diagnose"],
    },
)
