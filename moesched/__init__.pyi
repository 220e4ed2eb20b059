"""The public names and their homes: type checkers read them here, and `moesched/__init__.py` loads them from here."""

from moesched.analysis.compare import compare_runs as compare_runs
from moesched.analysis.roofline import roofline_of as roofline_of
from moesched.analysis.roofline_picture import draw_roofline as draw_roofline
from moesched.calibration.calibrate import calibrate_machine as calibrate_machine
from moesched.cluster.cluster_jobs import run_cluster as run_cluster
from moesched.cluster.cluster_jobs import run_local as run_local
from moesched.errors import BadInput as BadInput
from moesched.errors import MoeschedError as MoeschedError
from moesched.errors import NodeLost as NodeLost
from moesched.errors import PolicyError as PolicyError
from moesched.errors import TaskFailed as TaskFailed
from moesched.jobs.profiling import profile_routing as profile_routing
from moesched.jobs.report import JobReport as JobReport
from moesched.jobs.report import write_report as write_report
from moesched.jobs.session import Session as Session
from moesched.jobs.session import run_model as run_model
from moesched.jobs.simulate_arrivals import simulate_arrivals as simulate_arrivals
from moesched.jobs.simulate_model import simulate_model as simulate_model
from moesched.jobs.sparsity import sparsity_of as sparsity_of
from moesched.machines import Machine as Machine
from moesched.machines import load_machine as load_machine
from moesched.machines.local import local_machine as local_machine
from moesched.models.layout import Page as Page
from moesched.models.prestack import prestack_model as prestack_model
from moesched.models.random_model import write_random_model as write_random_model
from moesched.planner.proposal import plan_model as plan_model
from moesched.reproduce import reproduce_paper as reproduce_paper
from moesched.requests.sampling import Sampling as Sampling
from moesched.requests.workloads import Workload as Workload
from moesched.requests.workloads import given_lengths as given_lengths
from moesched.requests.workloads import load_workload as load_workload
from moesched.routing.profile import read_routing_profile as read_routing_profile
from moesched.runs.listeners import Listener as Listener
from moesched.runs.service_report import ServiceReport as ServiceReport
from moesched.steps.plan import Plan as Plan
from moesched.steps.step import Step as Step
from moesched.trace import check_trace as check_trace
from moesched.trace import read_trace as read_trace

__version__: str

__all__: list[str]
