# SPDX-License-Identifier: Apache-2.0
"""Worker half: accelerator blocks, checked copy plans, and the engines that move the bytes.

The way in is `Copier`: it checks every plan, keeps the order of conflicting rows and blocks, asks
the `SliceProof`, and reports one `CopyOutcome` per job.  `cpu_copier` and `cuda_copier` build one.
"""

from kvsafe.device.copier import Copier, CopierError
from kvsafe.device.cpu import CpuEngine, cpu_copier
from kvsafe.device.cuda import BatchCopy, CudaEngine, cuda_copier
from kvsafe.device.document import GeometryDifference, compare
from kvsafe.device.expectation import (
    ExpectedGroup,
    GeometryExpectation,
    GeometryMismatch,
    check_expectation,
    require_expectation,
)
from kvsafe.device.geometry import DeviceTensor, Geometry, GeometryError, GroupPage, GroupRef
from kvsafe.device.order import CopyTask, TaskOrder
from kvsafe.device.pinning import HostRegistrar, PinnedRows, find_registrar, pin_rows
from kvsafe.device.plan import (
    CopyPlan,
    Direction,
    PlanError,
    PlanFault,
    RowPlan,
    RowWindow,
    check_plan,
)
from kvsafe.device.pool import HostPool, WorkPool
from kvsafe.device.slicemap import Gap, SliceMap, Span
from kvsafe.device.streams import StreamRuntime, TorchStreams
from kvsafe.device.work import CopyEngine, CopyFault, CopyOutcome, SliceProof, SourceNotLoaded

__all__ = [
    "BatchCopy",
    "Copier",
    "CopierError",
    "CopyEngine",
    "CopyFault",
    "CopyOutcome",
    "CopyPlan",
    "CopyTask",
    "CpuEngine",
    "CudaEngine",
    "DeviceTensor",
    "Direction",
    "ExpectedGroup",
    "Gap",
    "Geometry",
    "GeometryDifference",
    "GeometryError",
    "GeometryExpectation",
    "GeometryMismatch",
    "GroupPage",
    "GroupRef",
    "HostPool",
    "HostRegistrar",
    "PinnedRows",
    "PlanError",
    "PlanFault",
    "RowPlan",
    "RowWindow",
    "SliceMap",
    "SliceProof",
    "SourceNotLoaded",
    "Span",
    "StreamRuntime",
    "TaskOrder",
    "TorchStreams",
    "WorkPool",
    "check_expectation",
    "check_plan",
    "compare",
    "cpu_copier",
    "cuda_copier",
    "find_registrar",
    "pin_rows",
    "require_expectation",
]
