"""What regions have in common: a key that is equal for regions of equal structure, in whatever graph and on whatever device."""

from __future__ import annotations

import hashlib
import re

from zcompile.ir.graph import Region
from zcompile.ir.printer import print_region

#: where a literal says on which device a tensor is made
_DEVICE = re.compile(r"device=[\w:]+")


def region_key(region: Region) -> str:
    """A digest of a region's operators, literals, shapes and dtypes; not of its name, and not of the device.

    An operator that exists on one kind of device alone, such as a flash attention, gives another key there.
    """
    _, _, text = print_region(region).partition("(")
    return hashlib.sha256(_DEVICE.sub("device", text).encode()).hexdigest()[:16]
