"""The descriptions of everything: dataclasses, to and from TOML and flags. No torch here."""

from wakeful.config.model import ModelConfig
from wakeful.config.schema import (
    Config,
    DataConfig,
    DiagnoseConfig,
    DistillConfig,
    OptimizerConfig,
    QuantizeConfig,
    SampleConfig,
    TrainConfig,
    config_from_table,
    config_to_table,
    config_to_toml,
)
from wakeful.config.tables import presets, read_table

__all__ = [
    "Config", "DataConfig", "DiagnoseConfig", "DistillConfig", "ModelConfig", "OptimizerConfig",
    "QuantizeConfig", "SampleConfig", "TrainConfig", "config_from_table", "config_to_table",
    "config_to_toml", "presets", "read_table",
]  # fmt: skip
