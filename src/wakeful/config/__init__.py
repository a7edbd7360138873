"""The descriptions of everything: dataclasses, to and from TOML and flags. No torch here."""

from wakeful.config.model import ModelConfig
from wakeful.config.schema import (
    BridgeConfig,
    Config,
    DataConfig,
    DiagnoseConfig,
    DistillConfig,
    HealConfig,
    LoraConfig,
    OptimizerConfig,
    QuantizeConfig,
    SampleConfig,
    TrainConfig,
    config_from_table,
    config_to_table,
    config_to_toml,
)
from wakeful.config.tables import presets, read_table
from wakeful.config.verbs import (
    CureOptions,
    DiagnoseOptions,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    InheritOptions,
    PrepareOptions,
    QuantizeOptions,
    ReportOptions,
    SampleOptions,
)

__all__ = [
    "BridgeConfig", "Config", "CureOptions", "DataConfig", "DiagnoseConfig", "DiagnoseOptions",
    "DistillConfig", "EvaluateOptions", "ExportOptions", "GenerateOptions", "HealConfig",
    "InheritOptions", "LoraConfig", "ModelConfig", "OptimizerConfig", "PrepareOptions",
    "QuantizeConfig", "QuantizeOptions", "ReportOptions", "SampleConfig",
    "SampleOptions", "TrainConfig", "config_from_table", "config_to_table",
    "config_to_toml", "presets", "read_table",
]  # fmt: skip
