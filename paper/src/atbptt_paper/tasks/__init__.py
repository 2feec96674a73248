"""The paper's tasks: data, models, losses, and presets of their hyperparameters."""

from collections.abc import Mapping
from typing import NamedTuple

from ..config import TrainConfig
from . import copy_task, language_task, point_task


class Task(NamedTuple):
    """What a task is made of.

    Attributes:
        config: its hyperparameters.
        presets: named values of them; the first is the default.
    """

    config: type[TrainConfig]
    presets: Mapping[str, TrainConfig]


TASKS: dict[str, Task] = {
    task.config.task: task
    for task in (
        Task(copy_task.CopyConfig, copy_task.PRESETS),
        Task(language_task.LanguageConfig, language_task.PRESETS),
        Task(point_task.PointConfig, point_task.PRESETS),
    )
}
