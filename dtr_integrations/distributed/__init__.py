"""What ranks share: the reserve, and whether they begin together."""

from .agreement import Agreement, Limits, agreement_for, place_in_group
from .calibration import Calibration
from .reserve import Reserve, reserve_for
from .standing import Standing

__all__ = [
    "Agreement",
    "Calibration",
    "Limits",
    "Reserve",
    "Standing",
    "agreement_for",
    "place_in_group",
    "reserve_for",
]
