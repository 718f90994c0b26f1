"""Records what PEFT makes of adapters for the small models of ../golden/hf_models, and what the models say with them.

    pip install torch==2.11.0 transformers==5.17.0 peft==0.21.2
    python make.py
"""
import os
import shutil

import peft
import torch
import transformers
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = {
    "llama": ("llama_shared", ["q_proj", "v_proj", "down_proj"], {}),
    "llama_rank_stabilized": ("llama_shared", ["o_proj"], {"use_rslora": True}),
    "gpt2": ("gpt2_shared", ["c_attn", "c_fc"], {"fan_in_fan_out": True}),
    "qwen2": ("qwen2_shared", "all-linear", {}),
    "bert": ("bert_shared", ["query", "value"], {}),
}
torch.manual_seed(1)
for name, (base, targets, more) in CASES.items():
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(os.path.join(HERE, "../golden/hf_models", base)).eval()
    task = None if name == "bert" else "CAUSAL_LM"
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, task_type=task, **more)
    adapted = peft.get_peft_model(model, config).eval()
    for parameter, tensor in adapted.named_parameters():
        if "lora_" in parameter:
            tensor.data.normal_(0, 0.3)
    folder = os.path.join(HERE, name)
    shutil.rmtree(folder, ignore_errors=True)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        logits = adapted(input_ids=ids).logits
    save_file({"input_ids": ids, "logits": logits.contiguous()}, os.path.join(folder, "expected.safetensors"))
