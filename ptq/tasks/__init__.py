"""What there is to quantize: a network, the data to calibrate it on and the data to measure it on."""

from __future__ import annotations

from ptq.tasks.catalog import DEFAULT, TASKS, folder_name, resolve
from ptq.tasks.task import Normalization, Task

__all__ = ["DEFAULT", "TASKS", "Normalization", "Task", "folder_name", "resolve"]
