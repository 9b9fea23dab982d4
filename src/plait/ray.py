"""Public module of `plait/integrations/ray.py`: `plait.ray.train("job.py", plan="dp=8")` and `python -m plait.ray job.py --plan dp=8`."""

import sys

from plait.integrations.ray import Trained as Trained
from plait.integrations.ray import main
from plait.integrations.ray import train as train

if __name__ == "__main__":
    sys.exit(main())
