"""All schedulers by the name that `plait submit` takes. A new one is a file with a `Scheduler`, and its line here."""

from plait.submit.jobset import JOBSET
from plait.submit.ray import RAY
from plait.submit.skypilot import SKYPILOT
from plait.submit.slurm import SLURM
from plait.submit.ssh import SSH
from plait.submit.trainjob import TRAINJOB

KINDS = {"slurm": SLURM, "trainjob": TRAINJOB, "jobset": JOBSET, "skypilot": SKYPILOT, "ray": RAY, "ssh": SSH}
