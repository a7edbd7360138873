"""Configurations and options: dataclasses, to and from TOML and flags, without torch."""

from wakeful.config.model import ModelConfig
from wakeful.config.schema import (
    BridgeConfig,
    Config,
    DataConfig,
    DiagnoseConfig,
    DistillConfig,
    HealConfig,
    OptimizerConfig,
    QuantizeConfig,
    TrainConfig,
    config_from_table,
    config_to_table,
    config_to_toml,
)
from wakeful.config.tables import preset_names, read_table

__all__ = [
    "BridgeConfig", "Config", "DataConfig", "DiagnoseConfig",
    "DistillConfig", "HealConfig",
    "ModelConfig", "OptimizerConfig",
    "QuantizeConfig", "TrainConfig", "config_from_table", "config_to_table",
    "config_to_toml", "preset_names", "read_table",
]  # fmt: skip
