"""Adapters: small matrices beside those of a checkpoint, which stays as it is (LoRA).

    y = W x + (alpha / rank) * B (A x)     W frozen; A [rank, in] drawn, B [out, rank] zero at first

The flat vector holds A and B alone (`requires_grad`), so an average is some megabytes. All else is
*the base*, of which every peer has its own copy: the run spec has its digest, because replicas of
other bases would learn for one that nobody has.

The layers are peft's, so that an export is an adapter as peft reads it.

Source: LoRA (arXiv 2106.09685). That averages of A and of B by themselves are not the average of
B A, which a frozen A mends: arXiv 2403.12313; measured in docs/recipes/fine-tuning.md.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import blake3
import torch
from safetensors.torch import save_file
from torch import nn

from protocol.errors import InvalidRunSpec
from protocol.fragment.fragments import BLOCK_OF
from protocol.run.run_spec import RunSpec
from protocol.run.sections import AdapterSection

if TYPE_CHECKING:  # to import it takes seconds
    from peft import LoraConfig

_OURS: Final = ".default"
"""Stands in peft's names of parameters: several adapters can lie in one module."""


def adapted(module: nn.Module, spec: RunSpec) -> nn.Module:
    """The module with adapters in it, which alone are trained. Raises InvalidRunSpec."""
    from peft import inject_adapter_in_model

    assert spec.adapter is not None
    config = _config(module, spec, spec.adapter)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as for other first weights: the same bits on every machine
    torch.manual_seed(spec.seed)
    made: nn.Module = inject_adapter_in_model(config, module)
    torch.set_num_threads(threads)
    if spec.adapter.trains == "b":
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(".lora_B." in name)
    return made


def _config(module: nn.Module, spec: RunSpec, section: AdapterSection) -> "LoraConfig":
    from peft import LoraConfig

    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=_targets(module, section.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=spec.model.init_from,
    )


def _targets(module: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    """The layers that get an adapter: all of the blocks, where none are named."""
    there = sorted(
        {
            name.removesuffix(".base_layer").rpartition(".")[2]
            for name, each in module.named_modules()
            if isinstance(each, nn.Linear) and BLOCK_OF.search(name) and ".lora_" not in name
        }
    )
    if unknown := [name for name in wanted if name not in there]:
        raise InvalidRunSpec(
            f"adapter.targets: the model has no layers {', '.join(unknown)}, but {', '.join(there)}"
        )
    return list(wanted) or there


def base_digest(module: nn.Module) -> str:
    """Digest of all that is not trained, 32 hex digits."""
    digest = blake3.blake3()
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(
                parameter.detach().float().contiguous().view(-1).view(torch.uint8).numpy().data
            )
    return digest.hexdigest(length=16)


def check_base(module: nn.Module, spec: RunSpec) -> None:
    """Raises InvalidRunSpec: the checkpoint here is another one than the run's."""
    assert spec.adapter is not None
    if spec.adapter.base not in (None, base_digest(module)):
        raise InvalidRunSpec(
            f"{spec.model.init_from} here has other weights than the run's adapters were made for:"
            " give the founder's checkpoint, at that place"
        )


def halve(module: nn.Module) -> None:
    """Hold in bf16 what is not trained, as most checkpoints are."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


# --- export ---------------------------------------------------------------------------------------
def write_adapter(folder: Path, module: nn.Module, spec: RunSpec) -> None:
    """Write the adapters as a folder that peft reads."""
    assert spec.adapter is not None
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(module, spec, spec.adapter)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name.replace(_OURS, '')}": parameter.detach().contiguous()
        for name, parameter in module.named_parameters()
        if ".lora_" in name
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def merged(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of the model with its adapters added, by the names of the checkpoint."""
    from peft.tuners.lora import LoraLayer

    for each in module.modules():
        if isinstance(each, LoraLayer):
            layer: Any = each
            layer.merge()
    return {
        name.replace(".base_layer", ""): parameter.detach().contiguous()
        for name, parameter in module.named_parameters()
        if ".lora_" not in name
    }
