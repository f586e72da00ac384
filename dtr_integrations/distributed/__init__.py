"""What ranks share. On one rank: the reserve. (Agreement between ranks comes with the many-ranks doors.)"""

from .reserve import Reserve, reserve_for

__all__ = ["Reserve", "reserve_for"]
