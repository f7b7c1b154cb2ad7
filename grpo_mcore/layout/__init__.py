"""How ranks are laid out: the policy's and an engine's layout, and `fits`, which says what is wrong with them.

policy.py    sizes of the policy's parallel dimensions: coordinates, layers and slices of each rank
engine.py    the ranks of one engine, and what each of them reads in a refit
fits.py      the one place that says whether a layout fits the ranks, the devices and the model

Nothing here needs torch or a process group. `recipe.layout_findings` calls `fits` for a recipe.
"""

from grpo_mcore.layout.engine import WHOLE, EngineLayout
from grpo_mcore.layout.findings import Finding, LayoutError
from grpo_mcore.layout.fits import DevicePool, EngineDevices, fits
from grpo_mcore.layout.policy import Coordinates, HeldSlice, PolicyLayout
