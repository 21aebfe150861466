"""Kept until all callers use `family.architecture.read_adapter`."""

from stages.models.flux2.adapter_reader import read_adapter as read_adapter
