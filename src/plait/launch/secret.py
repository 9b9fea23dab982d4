"""The key of a job: who does not know it does not join. Every process makes it from a secret that all of a user's machines share.

The secret is PLAIT_SECRET, or else the user's own file, which the first run makes: ~/.config/plait/secret. Machines that share
home folders share that too. A job's key is made of the secret and the job's number, so that one job does not open another.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from plait.config.errors import PlaitError, Problem
from plait.config.files import read_plain

SHORTEST, LONGEST = 16, 4096
"""Characters of a secret."""


def key(job: str) -> bytes:
    """32 bytes. L008 when the secret is too short, or others can read the file it is in."""
    said = os.environ.get("PLAIT_SECRET")
    secret = said if said is not None else _kept(_file())
    if len(secret) < SHORTEST:
        where = "PLAIT_SECRET" if said is not None else str(_file())
        what = f"the secret in {where} has {len(secret)} characters: at least {SHORTEST} make one that is not guessed"
        raise PlaitError(
            Problem("L008", what, fix=("export PLAIT_SECRET=$(openssl rand -hex 16)    the same on all machines",))
        )
    return hmac.new(secret.encode("utf-8", "surrogateescape"), f"plait {job}".encode(), hashlib.sha256).digest()


def whence() -> str:
    """Where this machine has its secret from, in words."""
    return "PLAIT_SECRET" if "PLAIT_SECRET" in os.environ else str(_file())


def _file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "plait" / "secret"


def _kept(path: Path) -> str:
    """What the file says. It is made where there is none: whole at once, so that of several processes one makes it."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = path.with_name(f".secret-{secrets.token_hex(8)}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as out:
                out.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        facts = path.stat()
        text = read_plain(path, LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        what = f"the secret that keeps strangers out of a job cannot be kept in {path}"
        raise PlaitError(
            Problem("L008", what, why=str(error), fix=("export PLAIT_SECRET=<the same on all machines>",))
        ) from error
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        what = f"others can read {path}, in which the secret is that keeps strangers out of a job"
        raise PlaitError(
            Problem("L008", what, why=f"its mode is {stat.filemode(facts.st_mode)}", fix=(f"chmod 600 {path}",))
        )
    return text
