"""The sequence mixers that can stand in for attention, by kind and by their token in a layer pattern."""

from hybridize.mixers.base import Mixer
from hybridize.mixers.gdn import GDNMixer
from hybridize.mixers.gka import GKAMixer
from hybridize.mixers.mamba2 import Mamba2Mixer
from hybridize.mixers.swa import SWAMixer

MIXERS: dict[str, type[Mixer]] = {m.kind: m for m in (GKAMixer, GDNMixer, Mamba2Mixer, SWAMixer)}

__all__ = ["MIXERS", "GDNMixer", "GKAMixer", "Mamba2Mixer", "Mixer", "SWAMixer"]
