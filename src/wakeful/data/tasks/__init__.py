"""Texts that are drawn and not read: a process whose best possible loss is known."""

from wakeful.data.tasks.backcopy import Backcopy, task_of
from wakeful.data.tasks.stream import TaskData, TaskStream

__all__ = ["Backcopy", "TaskData", "TaskStream", "task_of"]
