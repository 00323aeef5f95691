"""What imports have to do with garbage, and what waits for them."""

import gc
import subprocess
import sys

import pytest

from peer.runtime.imports import large_imports


def test_nothing_is_collected_meanwhile_and_everything_afterwards():
    with pytest.raises(ImportError), large_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_what_was_imported_is_looked_through_no_more():
    with large_imports():
        stays: list[list[int]] = [[]]
    assert not any(each is stays for each in gc.get_objects())


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with large_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.slow
def test_checks_of_usage_wait_for_no_torch():
    """What was asked for wrongly is told at once: on a busy machine torch takes a minute."""
    modules = "peer.cli.run, peer.cli.app, peer.training.init_from, peer.training.corpus"
    heavy = ("torch", "transformers", "hivemind", "datasets", "pyarrow")
    said = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


STEP = """
import sys, torch
from peer.training.model import FlatModel
from peer.training.optimizer import Muon, inner_optimizer
from protocol.run.sections import OptimizerSection
module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 8)])})
model = FlatModel(module, torch.device("cpu"))
optimizer = inner_optimizer(model, OptimizerSection(name="muon"), "fp32")
optimizer.step(0.0)
assert any(isinstance(part.optimizer, Muon) and part.leaves for part in optimizer._parts)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_trainers_first_step_waits_for_no_compiler_of_torch():
    ran = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
