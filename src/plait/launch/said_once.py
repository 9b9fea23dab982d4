"""What every rank of torchrun would say alike is said by one of them."""

import hashlib
import os
from collections.abc import Mapping
from datetime import timedelta

STORE = timedelta(seconds=1.5)
"""How long the store of torchrun's agent may take to answer."""


def says(text: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is to show an error: of the ranks that torchrun started, the first that has this text."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        from torch.distributed import TCPStore

        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=STORE)
        name = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        attempt = f"{store.add('plait/epoch', 0)}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return store.add(f"plait/said/{attempt}/{name}", 1) == 1
    except Exception:  # no store, no agreement: said too often is better than not at all
        return True
