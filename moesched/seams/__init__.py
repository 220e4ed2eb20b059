"""The seams: protocols of everything that can be plugged in, with their promises.

All of them are structural: no base class is needed. `moesched.testing` has conformance suites for plug-in authors.
Three are defined in lower packages that use them, and imported here: cost models in `moesched.machines`, eviction rules
in `moesched.steps`, and rules of admission in `moesched.serving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesched.machines.cost_model import CostModel as CostModel
from moesched.machines.cost_model import at_once as at_once
from moesched.serving.admission import Admission as Admission
from moesched.steps.eviction import Eviction as Eviction
from moesched.work import Demand as Demand

from .device import ChecksMachine as ChecksMachine
from .device import ChoosesDtype as ChoosesDtype
from .device import CountsReads as CountsReads
from .device import DescribesMachine as DescribesMachine
from .device import Device as Device
from .device import Dilations as Dilations
from .device import EmulatedLane as EmulatedLane
from .device import Emulates as Emulates
from .device import Emulation as Emulation
from .device import GivesScores as GivesScores
from .device import HasOwnBytes as HasOwnBytes
from .device import IsCalibrated as IsCalibrated
from .device import Issued as Issued
from .device import JoinsRanks as JoinsRanks
from .device import KeepsRowsApart as KeepsRowsApart
from .device import KeepsTime as KeepsTime
from .device import Kernel as Kernel
from .device import KernelRow as KernelRow
from .device import LaneKind as LaneKind
from .device import ListsKernels as ListsKernels
from .device import NamesKernels as NamesKernels
from .device import ObservesActivations as ObservesActivations
from .device import ObservesRouting as ObservesRouting
from .device import Progress as Progress
from .device import ReplaysGraphs as ReplaysGraphs
from .device import ReportsHome as ReportsHome
from .device import Serves as Serves
from .device import StandsBy as StandsBy
from .device import Streams as Streams
from .device import TellsProgress as TellsProgress
from .device import WarmsUp as WarmsUp
from .device import ignore_progress as ignore_progress
from .observer import ActivationObserver as ActivationObserver
from .observer import Observer as Observer
from .observer import RoutingObserver as RoutingObserver
from .observer import TokenSpan as TokenSpan
from .policy import ExpertParallel as ExpertParallel
from .policy import KeepsState as KeepsState
from .policy import Pipelined as Pipelined
from .policy import Policy as Policy
from .policy import is_expert_parallel as is_expert_parallel
from .policy import is_pipelined as is_pipelined
from .policy import keeps_state as keeps_state
from .simulation import Delay as Delay
from .simulation import Routing as Routing
from .transport import Abandons as Abandons
from .transport import Exchange as Exchange
from .transport import Transport as Transport

if TYPE_CHECKING:
    from .transport import Array as Array
