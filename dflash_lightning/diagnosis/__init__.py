"""Why the loss jumps: reads a run after the fact. NumPy only, no torch, no data.

Letters: ``T`` steps, ``K`` buckets, ``P`` coefficients.
"""

from dflash_lightning.diagnosis.judge import diagnose
from dflash_lightning.diagnosis.ledger import read_run
from dflash_lightning.diagnosis.result import Diagnosis
from dflash_lightning.diagnosis.run import Run
from dflash_lightning.diagnosis.sources import Sources
from dflash_lightning.diagnosis.tops import Deviator, deviators, tops_of

__all__ = [
    "Deviator",
    "Diagnosis",
    "Run",
    "Sources",
    "deviators",
    "diagnose",
    "read_run",
    "tops_of",
]
