"""Define RunConfig and its sections. Panel help, CLI help and docs are generated from the fields.

Every section is frozen; a changed configuration is a new object. Unknown keys are refused with the nearest known name.
"""

from speedlab.config.attention import AttentionConfig
from speedlab.config.attention_report import AttentionView, describe
from speedlab.config.batch import Batch, BatchConfig
from speedlab.config.errors import ConfigError, explain
from speedlab.config.model import MODEL_PRESETS, ModelConfig
from speedlab.config.optimizer import OptimizerConfig, OptimizerName, OuterConfig, ScheduleConfig
from speedlab.config.run_config import ConfigLike, RunConfig, as_config
from speedlab.config.sections import (
    ActivationConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    RecoverConfig,
    TelemetryConfig,
    ZeroConfig,
)
from speedlab.config.serialization import annotated_yaml

__all__ = [
    "MODEL_PRESETS",
    "ActivationConfig",
    "AttentionConfig",
    "AttentionView",
    "Batch",
    "BatchConfig",
    "CheckpointConfig",
    "ConfigError",
    "ConfigLike",
    "DataConfig",
    "EvalConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "OptimizerName",
    "OuterConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecoverConfig",
    "RunConfig",
    "ScheduleConfig",
    "TelemetryConfig",
    "ZeroConfig",
    "annotated_yaml",
    "as_config",
    "describe",
    "explain",
]
