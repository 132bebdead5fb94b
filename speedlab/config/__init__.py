"""RunConfig and its parts: the one description of a run. Panel help, CLI help and docs are generated from the fields.

Every part is frozen; a changed configuration is a new object. Unknown keys are refused with the nearest known name.
"""

from speedlab.config.attention import AttentionConfig
from speedlab.config.attention_view import AttentionView, describe
from speedlab.config.batch import Batch, BatchConfig
from speedlab.config.errors import ConfigError, explain
from speedlab.config.given import GivenConfig, config_of
from speedlab.config.model import MODEL_PRESETS, ModelConfig
from speedlab.config.parts import (
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
from speedlab.config.run import RunConfig
from speedlab.config.text import annotated_yaml
from speedlab.config.updates import OptimizerConfig, OptimizerName, OuterConfig, ScheduleConfig

__all__ = [
    "MODEL_PRESETS",
    "ActivationConfig",
    "AttentionConfig",
    "AttentionView",
    "Batch",
    "BatchConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "GivenConfig",
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
    "config_of",
    "describe",
    "explain",
]
