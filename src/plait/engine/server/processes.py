"""The processes of a run of groups and servers: forked together, watched, and what each returned."""

from dataclasses import replace
from typing import Any

from plait.engine.server import follower, group, lead
from plait.engine.server.setting import Doors, ServerSetting
from plait.launch import fork
from plait.launch.place import Place
from plait.launch.supervise import Listener, Spare


def start(
    setting: ServerSetting, spare: Spare, listener: Listener | None = None, patience: float | None = None
) -> list[dict[str, Any]]:
    """Fork groups and servers, and wait for the end: what each returned, groups first. `spare`: what becomes of a group that dies."""
    plan, doors = setting.plan, Doors.open(setting.plan.servers)
    groups = plan.replica_groups

    def work(place: Place) -> dict[str, Any]:
        if place.rank < groups:
            return group.run(setting, replace(place, world=groups), doors)
        return (lead if place.rank == groups else follower).run(setting, place, doors)

    try:
        return fork.run(work, plan.world, listener, patience=patience, alike=False, spare=spare)
    finally:
        doors.close()
