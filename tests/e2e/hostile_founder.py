"""A founder whose signed run spec has a model of 1.6e10 parameters, where it trains a small one.

python tests/e2e/hostile_founder.py COMMAND start RUN.toml ...
"""

import json
import sys

from peer.cli import main
from peer.daemon.provision import RealProvision, Supplies
from protocol.run.run_spec import RunSpec

SIZES = {
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 20,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
}

honestly = RealProvision.found


async def found(self: RealProvision, spec: RunSpec, expert: int | None) -> tuple[RunSpec, Supplies]:
    """The count of parameters stays the small one: the configuration alone is large."""
    frozen_spec, supplies = await honestly(self, spec, expert)
    assert frozen_spec.frozen is not None
    config = json.dumps(json.loads(frozen_spec.frozen.config) | SIZES)
    frozen = frozen_spec.frozen.model_copy(update={"config": config})
    return frozen_spec.model_copy(update={"frozen": frozen}), supplies


if __name__ == "__main__":
    del sys.argv[1]
    RealProvision.found = found  # type: ignore[method-assign]
    main()
