"""The names that adapters use of the backend; the package has the steps."""

# ruff: noqa: PLC0414 (``as`` exports a name)

from __future__ import annotations

from precision_shim.adapting import collect

from ..frameworks import MEGATRON_EFFECTS, MEGATRON_PATHS
from .audit import seams
from .checkpoints import cpu_offload, optimizer_state, parameter_state
from .policy.optimizer_plan import OptimizerPlan as OptimizerPlan
from .policy.requested import ALIGNMENT as ALIGNMENT
from .policy.requested import APPLYING as APPLYING
from .policy.requested import BUILDING as BUILDING
from .policy.requested import DISPATCH as DISPATCH
from .policy.requested import GROUP as GROUP
from .policy.requested import PRECISION_AWARE as PRECISION_AWARE
from .policy.requested import SCALING as SCALING
from .policy.requested import RequestedConfig as RequestedConfig
from .training import config_dtypes, ddp, loss_scaling, masters, optimizer, overflow, wide_buffers
from .training.build import Build as Build
from .training.build import building as building
from .training.build import current_build as current_build
from .training.build import expect_reference as expect_reference
from .training.flags import CONFIG_INIT as CONFIG_INIT
from .training.flags import building_seams as building_seams
from .training.flags import fill_inline as fill_inline
from .training.flags import requested_by_flags as requested_by_flags
from .training.flags import where_present as where_present
from .training.masters import reload_masters as reload_masters
from .training.optimizer import apply_plan as apply_plan
from .training.optimizer import apply_to_config as apply_to_config
from .training.optimizer import check as check
from .training.optimizer import keep_layout as keep_layout
from .training.optimizer import with_fields as with_fields
from .training.overflow import answer_skips as answer_skips
from .training.overflow import answer_step as answer_step
from .training.overflow import dynamic_scalers as dynamic_scalers
from .training.overflow import metrics as metrics
from .training.overflow import skipping as skipping

EFFECTS, PATHS = MEGATRON_EFFECTS, MEGATRON_PATHS

SEAMS = collect(
    optimizer,
    config_dtypes,
    ddp,
    wide_buffers,
    optimizer_state,
    parameter_state,
    masters,
    cpu_offload,
    loss_scaling,
    overflow,
    seams,
)
"""The seams on Megatron's functions; an adapter passes ``SEAMS`` to ``collect``."""
