"""Paths in the configuration of a run that starts: whether they can be used, and where they are for every process."""

from __future__ import annotations

import os
import tempfile

from speedlab.config import ConfigError, RunConfig


def check_offload_folder(config: RunConfig) -> None:
    """Raises ConfigError where states shall go to a folder of this host that cannot take them."""
    folder = config.offload.folder
    if folder is None or "disk" not in (config.offload.optimizer, config.offload.parameters):
        return
    if not folder.is_dir():
        raise ConfigError(f"offload.folder: {folder} is no folder; make it on the disk that shall hold the states")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"offload.folder: {folder} cannot be written to ({error.strerror}); name another") from None


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The engines may run in another directory: paths of data and of states on disk are written down whole."""
    sources = config.data.source if isinstance(config.data.source, tuple) else (config.data.source,)
    absolute = tuple(
        source if source == "stdlib" or source.startswith("task:") else _absolute(source) for source in sources
    )
    tokenizer = config.data.tokenizer
    if tokenizer not in ("bpe", "bytes"):
        tokenizer = _absolute(tokenizer)
    source = absolute if isinstance(config.data.source, tuple) else absolute[0]
    offload = {} if config.offload.folder is None else {"folder": _absolute(str(config.offload.folder))}
    return config.replace(data={"source": source, "tokenizer": tokenizer}, offload=offload)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
