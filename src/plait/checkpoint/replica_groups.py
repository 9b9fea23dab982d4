"""What a checkpoint holds of replica groups: their global weights as any model's, and what each of them has of its own.

    model/<name>                             the global weights: what other plans, exports and `--weights` read
    groups/<i>/model/<name>                  the weights and buffers of group i
    groups/<i>/optimizer/<parameter>/<key>   the state of its optimizer, which is never averaged
    groups/outer/<name>                      the momentum of the outer optimizer
    groups/sent/<fragment>/<name>            the sum over the groups of a fragment that was sent and not applied yet

With the same number of groups a run goes on exactly. With another number, or under a plan without groups, there is no
optimizer state to go on with: that is refused, unless changes are allowed; then every group starts from the global weights.
"""

from typing import Any

from msgspec import structs

from plait.checkpoint.carried_state import Training
from plait.checkpoint.manifest import MANIFEST, Manifest
from plait.checkpoint.safetensors_file import Damaged
from plait.parallel.replica_groups.synchronise import RareSynchroniser
from plait.tensors.rows import Part


def prefix(training: Training) -> str:
    """How the names of what belongs to this rank's group begin; nothing without groups."""
    rank_model = training.rank_model
    return "" if rank_model.techniques.replica_groups is None else f"groups/{rank_model.mesh.at['replica_groups']}/"


def same(training: Training, manifest: Manifest) -> bool:
    """Whether the checkpoint has as many groups as this training."""
    return training.rank_model.techniques.replica_groups is not None and manifest.replica_groups.count == training.plan.replica_groups


def parts_of(training: Training, model: dict[str, Part]) -> dict[str, Part]:
    """Parts of the model for a checkpoint: the global weights, and this group's own. `model`: what this rank holds."""
    rare = training.rank_model.techniques.replica_groups
    if rare is None:
        return {f"model/{name}": part for name, part in model.items()}
    common = rare.global_parts()
    found = {f"model/{name}": common.get(name, part) for name, part in model.items()}
    return found | _beside(training, rare, model)


def _beside(training: Training, rare: RareSynchroniser, model: dict[str, Part]) -> dict[str, Part]:
    """What a checkpoint holds beside the global weights: this group's own, the outer momentum, what is on its way."""
    own = {f"{prefix(training)}model/{name}": part for name, part in model.items() if _own(training, name)}
    return own | {f"groups/{name}": part for name, part in rare.parts().items()}


def _own(training: Training, name: str) -> bool:
    """Whether groups may hold another one: all but frozen parameters."""
    parameter = training.rank_model.params.get(name)
    return parameter is None or parameter.requires_grad


def values_of(training: Training) -> dict[str, Any]:
    """What a manifest says of the groups; {} without any."""
    used = training.rank_model.techniques
    if used.replica_groups is None:
        return {}
    own = {"scaler": used.loss_scale.state_dict() if used.loss_scale else None, **used.replica_groups.own_values()}
    number = str(training.rank_model.mesh.at["replica_groups"])
    return {"count": training.plan.replica_groups, "own": {number: own}, **used.replica_groups.values()}


def merged(said: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say of the groups, in one. What ranks of a group met is put together."""
    own: dict[str, dict[str, Any]] = {}
    for word in said:
        for group, values in word.get("own", {}).items():
            known = own.setdefault(group, {**values, "met": []})
            known["met"] = sorted({*known["met"], *values["met"]})
    return {**said[0], "own": own} if said[0] else {}


def wanted(training: Training, manifest: Manifest, model: dict[str, Part]) -> dict[str, Part]:
    """The parts to read of the model: the global weights where they belong, and this group's own."""
    rare = training.rank_model.techniques.replica_groups
    if rare is None or not same(training, manifest):
        return {f"model/{name}": part for name, part in model.items()}
    rare.expect(manifest.replica_groups.sent)
    base = rare.base_parts()
    found = {
        f"model/{name}": base.get(name, part)
        for name, part in model.items()
        if name in base or not _own(training, name)
    }
    parts = found | _beside(training, rare, model)
    if lost := sorted(parts.keys() - manifest.tensors.keys()):
        raise Damaged(MANIFEST, f"{lost[0]} is missing in it")
    return parts


def give(training: Training, manifest: Manifest) -> None:
    """Take over what the manifest says of the groups; the parts were read in place."""
    rank_model = training.rank_model
    if rank_model.techniques.replica_groups is None or not same(training, manifest):
        return
    own = manifest.replica_groups.own[str(rank_model.mesh.at["replica_groups"])]
    rank_model.techniques.replica_groups.resume(own.met)
    if rank_model.techniques.loss_scale and own.scaler:
        rank_model.techniques.loss_scale.load_state_dict(structs.asdict(own.scaler))


def refused(training: Training, manifest: Manifest) -> tuple[str, str] | None:
    """(what, why) the checkpoint cannot be continued exactly under this plan, where its groups are the reason."""
    count = manifest.replica_groups.count
    if not count or same(training, manifest):
        return None
    now = training.plan.replica_groups
    why = f"each of its {count} groups has weights and an optimizer state of its own; here they would begin with none"
    return f"replica_groups {count} → {now}", why
