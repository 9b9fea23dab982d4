"""SyncBatchNorm in a model of the user's: the BatchNorm that it is, whose statistics plait gathers where a plan needs it.

In a process with a process group torch's `SyncBatchNorm` raises on a CPU, and elsewhere sums over all ranks, whatever they
hold. A rank's model has it without communication, as torch itself computes it in a single process, and `parallel/data/batch_norm.py`
then gathers its statistics as those of any batch norm.
"""

from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem


class LocalSyncBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm that does not communicate: the forward of torch's other batch norms."""

    def forward(self, input: Tensor) -> Tensor:
        return super(nn.SyncBatchNorm, self).forward(input)


def make_local(model: nn.Module) -> None:
    """Let no SyncBatchNorm of the model communicate, also of a subclass that calls torch's forward. Names, parameters and
    buffers stay. J054 for one with a process group of its own."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm) or isinstance(module, LocalSyncBatchNorm):
            continue
        if module.process_group is not None:
            what = f"{name or 'the model'} is a SyncBatchNorm with a process group of its own"
            why = "its statistics are of some of the samples of a batch; which, depends on the ranks and not on the job"
            fix = ("nn.SyncBatchNorm.convert_sync_batchnorm(model)    without process_group: statistics of the batch",)
            raise PlaitError(Problem("J054", what, why=why, fix=fix))
        kind = type(module)
        local = LocalSyncBatchNorm if kind is nn.SyncBatchNorm else type(kind.__name__, (kind, LocalSyncBatchNorm), {})
        module.__class__ = local
