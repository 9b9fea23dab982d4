"""Replica groups in checkpoints: the global weights as any model's, and the state of each group.

model/<name>                             the global weights, read by other plans, exports and `--weights`
groups/<i>/model/<name>                  the weights and buffers of group i
groups/<i>/optimizer/<parameter>/<key>   the state of its optimizer, which is never averaged
groups/outer/<name>                      the momentum of the outer optimizer
groups/sent/<fragment>/<name>            the sum over the groups of a fragment that was sent and not applied yet

With the same number of groups a run resumes exactly. Other plans lack a matching optimizer state, so resuming is rejected unless
changes are allowed. Then every group starts from the global weights.
"""

from typing import Any

from msgspec import structs

from plait.checkpoint.carried_state import Training
from plait.checkpoint.manifest import MANIFEST_NAME, Manifest
from plait.checkpoint.safetensors_file import DamagedFileError
from plait.parallel.replica_groups.outer_synchronizer import OuterSynchronizer
from plait.tensors.rows import Part


def group_prefix(training: Training) -> str:
    """Return the prefix for names of this rank's group; "" without groups."""
    rank_model = training.rank_model
    return "" if rank_model.techniques.replica_groups is None else f"groups/{rank_model.mesh.coordinates['replica_groups']}/"


def has_same_group_count(training: Training, manifest: Manifest) -> bool:
    """Return whether the checkpoint has as many groups as this plan."""
    return training.rank_model.techniques.replica_groups is not None and manifest.replica_groups.count == training.plan.replica_groups


def group_parts(training: Training, model: dict[str, Part]) -> dict[str, Part]:
    """Return the model's parts for a checkpoint: the global weights, and this group's own. `model`: this rank's parts."""
    rare = training.rank_model.techniques.replica_groups
    if rare is None:
        return {f"model/{name}": part for name, part in model.items()}
    common = rare.reduce_global_parts()
    found = {f"model/{name}": common.get(name, part) for name, part in model.items()}
    return found | _extra_parts(training, rare, model)


def _extra_parts(training: Training, rare: OuterSynchronizer, model: dict[str, Part]) -> dict[str, Part]:
    """Return the parts other than the global weights: this group's weights, the outer momentum, and sums in flight."""
    own = {f"{group_prefix(training)}model/{name}": part for name, part in model.items() if _is_group_specific(training, name)}
    return own | {f"groups/{name}": part for name, part in rare.get_state_parts().items()}


def _is_group_specific(training: Training, name: str) -> bool:
    """Return whether the parameter may differ between groups; frozen parameters do not."""
    parameter = training.rank_model.params.get(name)
    return parameter is None or parameter.requires_grad


def group_values(training: Training) -> dict[str, Any]:
    """Return the manifest entry of the groups; {} without groups."""
    used = training.rank_model.techniques
    if used.replica_groups is None:
        return {}
    own = {"scaler": used.loss_scale.state_dict() if used.loss_scale else None, **used.replica_groups.get_group_values()}
    number = str(training.rank_model.mesh.coordinates["replica_groups"])
    return {"count": training.plan.replica_groups, "own": {number: own}, **used.replica_groups.get_state_values()}


def merge_group_values(said: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the manifest entries of all ranks. Sets of `met` groups are united."""
    own: dict[str, dict[str, Any]] = {}
    for word in said:
        for group, values in word.get("own", {}).items():
            known = own.setdefault(group, {**values, "met": []})
            known["met"] = sorted({*known["met"], *values["met"]})
    return {**said[0], "own": own} if said[0] else {}


def select_group_parts(training: Training, manifest: Manifest, model: dict[str, Part]) -> dict[str, Part]:
    """Return the model's parts to read: the global weights into their buffers, and this group's own."""
    rare = training.rank_model.techniques.replica_groups
    if rare is None or not has_same_group_count(training, manifest):
        return {f"model/{name}": part for name, part in model.items()}
    rare.prepare_restore(manifest.replica_groups.sent)
    base = rare.get_global_parts()
    found = {
        f"model/{name}": base.get(name, part)
        for name, part in model.items()
        if name in base or not _is_group_specific(training, name)
    }
    parts = found | _extra_parts(training, rare, model)
    if lost := sorted(parts.keys() - manifest.tensors.keys()):
        raise DamagedFileError(MANIFEST_NAME, f"{lost[0]} is missing in it")
    return parts


def restore_groups(training: Training, manifest: Manifest) -> None:
    """Restore the groups' values from the manifest, after their parts were read in place."""
    rank_model = training.rank_model
    if rank_model.techniques.replica_groups is None or not has_same_group_count(training, manifest):
        return
    own = manifest.replica_groups.own[str(rank_model.mesh.coordinates["replica_groups"])]
    rank_model.techniques.replica_groups.restore_group(own.met)
    if rank_model.techniques.loss_scale and own.scaler:
        rank_model.techniques.loss_scale.load_state_dict(structs.asdict(own.scaler))


def explain_group_mismatch(training: Training, manifest: Manifest) -> tuple[str, str] | None:
    """Return (what, why) if replica groups prevent an exact resume under this plan, else None."""
    count = manifest.replica_groups.count
    if not count or has_same_group_count(training, manifest):
        return None
    now = training.plan.replica_groups
    why = f"each of its {count} groups has weights and an optimizer state of its own; here they would begin with none"
    return f"replica_groups {count} → {now}", why
