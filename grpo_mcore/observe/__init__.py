"""The outputs of a run for people and programs: metrics, seconds by phase, tables, curves, the summary."""

from grpo_mcore.observe.console.console import RunConsole, ShownSample
from grpo_mcore.observe.console.step_table import StepRow
from grpo_mcore.observe.ledger.ledger import LEDGER_FILE, Ledger, LedgerError, read_ledger
from grpo_mcore.observe.ledger.ledger_audit import Audit, audit
from grpo_mcore.observe.logger import (
    CustomLoggerError,
    Logger,
    check_custom_logger,
    messages_kept,
    run_folder,
    write_summary,
)
from grpo_mcore.observe.run_folder import read_metrics
from grpo_mcore.observe.timeline import Timeline
from grpo_mcore.observe.trackers.backends import MissingPackage
from grpo_mcore.observe.trackers.plots import reward_curve_png
