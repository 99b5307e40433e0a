"""Checks of what others made: ``speculators doctor`` examines a checkpoint before anyone serves it.

One module per topic, each a function from what is known of the checkpoint to findings; a kind of finding has a fixed id.
"""

from speculators.checks.doctor import Diagnosis, examine
from speculators.checks.findings import Finding, Kind, Level
from speculators.checks.readings import ReadingResult, ReadingSettings, ReadingsReport

__all__ = ["Diagnosis", "Finding", "Kind", "Level", "ReadingResult", "ReadingSettings", "ReadingsReport", "examine"]
