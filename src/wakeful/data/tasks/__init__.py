"""Texts that are drawn and not read: processes whose best possible loss is known."""

from wakeful.data.tasks.backcopy import Backcopy
from wakeful.data.tasks.base import Task, TaskData, TaskStream, task_of

__all__ = ["Backcopy", "Task", "TaskData", "TaskStream", "task_of"]
