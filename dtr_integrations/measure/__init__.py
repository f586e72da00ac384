"""Peaks of real steps: what a step held at most, per device, and the log of it per rank.

| to measure | use |
|---|---|
| a step that you can run twice | `measure_step` |
| one short call | `call_peak_bytes` |
| a step of a run that somebody else drives | `trace_step` |
| what lives for good | `static_bytes`, `live_bytes` |
| what there is | `device_total_bytes` |
"""

from __future__ import annotations

from ..core.peak import PeakReport
from .device_totals import device_total_bytes
from .peak_log import PeakLog, read_peak_log
from .sampling import is_measured
from .step_peak import StepPeak, call_peak_bytes, measure_step
from .step_trace import StepTrace, TracedPeak, trace_step
from .storages import live_bytes, optimizer_state_tensors, static_bytes, tensors_in

__all__ = [
    "PeakLog",
    "PeakReport",
    "StepPeak",
    "StepTrace",
    "TracedPeak",
    "call_peak_bytes",
    "device_total_bytes",
    "is_measured",
    "live_bytes",
    "measure_step",
    "optimizer_state_tensors",
    "read_peak_log",
    "static_bytes",
    "tensors_in",
    "trace_step",
]
