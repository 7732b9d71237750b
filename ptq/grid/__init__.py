"""Grids: many runs, each one or more commands in a folder of its own, on one machine or on a cluster."""

from ptq.grid.plan import Grid, Planned, read_grid
from ptq.grid.states import GridFolder, Record, State
from ptq.grid.work import work

__all__ = ["Grid", "GridFolder", "Planned", "Record", "State", "read_grid", "work"]
