"""usage: [SEED=N] [COUNT=N] [OUT=FILE] python3 make.py

Settings of FSDP and DeepSpeed put together at random, and what Accelerate 1.15.0 (torch 2.11.0, DeepSpeed 0.19.8) makes of them: cases of the
kinds fsdp_config and deepspeed_config (tests/testdata/README.md). COUNT of each of three sorts: variables and arguments of the FSDP plugin, files and
flags of `accelerate launch --use_fsdp`, and DeepSpeed's. What docs/sharding_config.md decides otherwise is left out (`decided_otherwise`).
"""

import contextlib
import copy
import io
import json
import logging
import math
import os
import random
import tempfile
import types
import unittest.mock
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

import torch

# The machine is taken to have GPUs.
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.device_count = lambda: 2

import accelerate.accelerator
import accelerate.utils.dataclasses
import deepspeed
import deepspeed.runtime.config
from accelerate import Accelerator
from accelerate.commands import launch
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, FullyShardedDataParallelPlugin

accelerate.utils.dataclasses.is_cuda_available = lambda *_: True
accelerate.accelerator.logger = logging.getLogger("quiet")

PICK = random.Random(int(os.environ.get("SEED", 1)))


def forget_variables(*prefixes):
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        del os.environ[name]


def some(settings, most, least=0):
    return {key: settings[key]() for key in PICK.sample(sorted(settings), PICK.randint(least, most))}


def one_of(*values):
    return lambda: PICK.choice(values)


# FSDP


def dtype(value):
    return None if value is None else str(value).replace("torch.", "")


def fsdp_fields(plugin):
    policy, wrap, offload = plugin.mixed_precision_policy, plugin.auto_wrap_policy, plugin.cpu_offload
    strategy = plugin.sharding_strategy
    out = {"fsdp_version": plugin.fsdp_version}
    out["sharding_strategy"] = strategy.name.lstrip("_") if hasattr(strategy, "name") else strategy
    out["reshard_after_forward"] = plugin.reshard_after_forward if isinstance(plugin.reshard_after_forward, bool) else None
    out["backward_prefetch"] = plugin.backward_prefetch.name if plugin.backward_prefetch else None
    out["auto_wrap_policy"] = wrap and {"transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                                        "size_based_auto_wrap_policy": "SIZE_BASED_WRAP"}[wrap.__name__]
    if plugin.fsdp_version == 1:
        out["cpu_offload"] = bool(getattr(offload, "offload_params", None))
    else:
        out["cpu_offload"] = offload if isinstance(offload, bool) else type(offload).__name__ == "CPUOffloadPolicy"
    names = ("param_dtype", "reduce_dtype", "buffer_dtype" if plugin.fsdp_version == 1 else "output_dtype")
    out["mixed_precision_policy"] = policy and {name: dtype(getattr(policy, name)) for name in names}
    out["state_dict_type"] = plugin.state_dict_type.name
    for name in ("state_dict_config", "optim_state_dict_config"):
        config = getattr(plugin, name)
        out[name] = config and {"class": type(config).__name__, "offload_to_cpu": config.offload_to_cpu}
        if hasattr(config, "rank0_only"):
            out[name]["rank0_only"] = config.rank0_only
    for name in ("transformer_cls_names_to_wrap", "min_num_params", "limit_all_gathers", "use_orig_params", "sync_module_states",
                 "forward_prefetch", "activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading",
                 "ignored_modules"):
        out[name] = getattr(plugin, name)
    return out


def launched(given):
    """What `accelerate launch` hands on: variables, and the precision."""
    forget_variables("FSDP_", "ACCELERATE_", "OMP_")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        words = []
        if "config" in given:
            file.write(given["config"])
            file.flush()
            words = ["--config_file", file.name]
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                flags = launch.launch_command_parser().parse_args(words + given.get("args", []) + ["script.py"])
        except SystemExit:
            raise ValueError(said.getvalue())
        flags, _, _ = launch._validate_launch_command(flags)
        env = launch.prepare_multi_gpu_env(flags)
    return {name: text for name, text in env.items() if name.startswith("FSDP_")}, env.get("ACCELERATE_MIXED_PRECISION", "no")


def fsdp(given):
    env, precision = given["env"], given.get("mixed_precision", "no")
    if "config" in given or "args" in given:
        prepared, precision = launched(given)
        env = {**prepared, **env}
    forget_variables("FSDP_")
    os.environ.update(env)
    arguments = copy.deepcopy(given.get("plugin", {}))
    if isinstance(arguments.get("mixed_precision_policy"), dict):
        arguments["mixed_precision_policy"] = {k: getattr(torch, v) for k, v in arguments["mixed_precision_policy"].items()}
    plugin = FullyShardedDataParallelPlugin(**arguments)
    if precision in ("fp16", "bf16", "fp8"):
        plugin.set_mixed_precision(precision)
    return fsdp_fields(plugin)


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "full_shard", "1", "2", "3", "4", "5")
WORDS = ("true", "True", "1", "y", "YES", "on", "t", "false", "0", "no", "off", "n", "F", "FALSE")


def words():
    return PICK.choice(WORDS if PICK.random() < 0.95 else ("maybe", "", " true", "2", "None"))


VARIABLES = {
    "FSDP_VERSION": one_of("1", "1", "2", "2", "x"),
    "FSDP_SHARDING_STRATEGY": one_of(*STRATEGIES, "_hybrid_shard_zero2", "0", "6", "FULL", "true"),
    "FSDP_RESHARD_AFTER_FORWARD": words,
    "FSDP_BACKWARD_PREFETCH": one_of("BACKWARD_PRE", "backward_post", "NO_PREFETCH", "no_prefetch", "1", "2", "3", "0", "none"),
    "FSDP_STATE_DICT_TYPE": one_of("FULL_STATE_DICT", "sharded_state_dict", "LOCAL_STATE_DICT", "1", "2", "3", "0", "4", "full"),
    "FSDP_AUTO_WRAP_POLICY": one_of("TRANSFORMER_BASED_WRAP", "size_based_wrap", "NO_WRAP", "no_wrap", "none"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": one_of("GPT2Block", "A,B", "", ",", "A,", "A,,B"),
    "FSDP_MIN_NUM_PARAMS": one_of("0", "1000", "100000000", "-5", "1_000", " 7 ", "1e6", "", "+3", "007"),
    "FSDP_IGNORED_MODULES": one_of(".*embed.*", "", "lm_head"),
    **{"FSDP_" + name: words for name in (
        "OFFLOAD_PARAMS", "USE_ORIG_PARAMS", "SYNC_MODULE_STATES", "FORWARD_PREFETCH", "ACTIVATION_CHECKPOINTING",
        "ACTIVATION_CHECKPOINTING_OFFLOAD", "CPU_RAM_EFFICIENT_LOADING")},
}
ARGUMENTS = {
    "fsdp_version": one_of(1, 2),
    "sharding_strategy": one_of(*STRATEGIES, 2, 4),
    "reshard_after_forward": one_of(True, False, "true", "no"),
    "backward_prefetch": one_of("BACKWARD_PRE", "backward_post", "NO_PREFETCH", "2", 1, "x"),
    "mixed_precision_policy": one_of(
        "fp16", "bf16", "fp8", "fp32", "no", {"param_dtype": "bfloat16", "reduce_dtype": "float32", "buffer_dtype": "float32"},
        {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"},
        {"param_dtype": "float64", "reduce_dtype": "float32", "buffer_dtype": "float32"}),
    "auto_wrap_policy": one_of("TRANSFORMER_BASED_WRAP", "size_based_wrap", "no_wrap", "each"),
    "transformer_cls_names_to_wrap": one_of(["A"], ["A", "B"], [], "A", "A,B"),
    "min_num_params": one_of(0, 5, 100000000, -1),
    "state_dict_type": one_of("FULL_STATE_DICT", "sharded_state_dict", "LOCAL_STATE_DICT", "1", "2", "3"),
    "ignored_modules": one_of("x.*", ""),
    **{name: one_of(True, False) for name in (
        "cpu_offload", "use_orig_params", "sync_module_states", "forward_prefetch", "limit_all_gathers", "activation_checkpointing",
        "activation_checkpointing_offload", "cpu_ram_efficient_loading")},
}


def plugin_case():
    given = {"env": some(VARIABLES, 6)}
    if PICK.random() < 0.5:
        given["plugin"] = some(ARGUMENTS, 4, 1)
    given["mixed_precision"] = PICK.choice(("no", "no", "fp16", "bf16", "fp8"))
    return given


KEYS = {
    "version": one_of("1", "2"),
    "sharding_strategy": one_of(*STRATEGIES),
    "reshard_after_forward": one_of("true", "false"),
    "backward_prefetch": one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "backward_pre", "1", "2", "null"),
    "state_dict_type": one_of("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "full_state_dict", "1", "3"),
    "auto_wrap_policy": one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "no_wrap", "null"),
    "transformer_layer_cls_to_wrap": one_of("BertLayer", "A,B"),
    "min_num_params": one_of("2000", "100000000", "0", "'77'"),
    "ignored_modules": one_of("'.*emb.*'", "null"),
    **{name: one_of("true", "false", "'true'", "'False'", "'1'") for name in (
        "offload_params", "use_orig_params", "sync_module_states", "forward_prefetch", "activation_checkpointing",
        "activation_checkpointing_offload", "cpu_ram_efficient_loading")},
}


def launch_case():
    given = {"env": {}}
    has_file = PICK.random() < 0.85
    if has_file:
        section = some(KEYS, 9)
        section.setdefault("version", PICK.choice("12"))
        prefixed = PICK.random() < 0.85
        lines = ["  %s%s: %s" % ("fsdp_" if prefixed or key == "version" else "", key, text) for key, text in sorted(section.items())]
        given["config"] = "\n".join(
            ["compute_environment: LOCAL_MACHINE", "debug: false", "distributed_type: FSDP", "fsdp_config:", *lines, "machine_rank: 0",
             "main_training_function: main", "mixed_precision: " + PICK.choice(("'no'", "fp16", "bf16")), "num_machines: 1",
             "num_processes: 2", "use_cpu: false", ""])
    if not has_file or PICK.random() < 0.5:
        args = [] if has_file else ["--use_fsdp", "--num_processes", "2"]
        for key, text in some(KEYS, 4).items():
            text = text.strip("'")
            args += PICK.choice((["--fsdp_" + key, text], ["--fsdp-" + key.replace("_", "-") + "=" + text], ["--fsdp_" + key + "=" + text]))
        if PICK.random() < 0.2:
            args += ["--mixed_precision", PICK.choice(("no", "fp16", "bf16"))]
        if args:
            given["args"] = args
    return given


# DeepSpeed


def plain(value):
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


PLUGIN_FIELDS = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
                 "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model", "is_train_batch_min")


def batch_sizes(given):
    world = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_: given["world"], is_initialized=lambda: True)
    with unittest.mock.patch.object(deepspeed.runtime.config, "dist", world):
        config = deepspeed.runtime.config.DeepSpeedConfig(copy.deepcopy(given["config"]))
    return {name: getattr(config, name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}


def prepare(plugin, facts, prepared):
    """Accelerator._prepare_deepspeed of an accelerator with those facts, and without an engine."""
    model = torch.nn.Linear(2, 2)
    model.config = types.SimpleNamespace(**prepared["model"])
    optimizer = dict(prepared["optimizer"])
    made = torch.optim.AdamW if optimizer.pop("kind") == "torch" else DummyOptim
    optimizer = made(model.parameters(), **optimizer)
    objects = [model, optimizer]
    if "scheduler" in prepared:
        scheduler = dict(prepared["scheduler"])
        if scheduler.pop("kind") == "torch":
            real = optimizer if isinstance(optimizer, torch.optim.Optimizer) else torch.optim.SGD(model.parameters(), lr=1)
            objects.append(torch.optim.lr_scheduler.LambdaLR(real, lambda step: 1.0))
        else:
            makes = (lambda optimizer: None) if scheduler.pop("with_callable", False) else None
            objects.append(DummyScheduler(optimizer, lr_scheduler_callable=makes, **scheduler))
    objects += [torch.utils.data.DataLoader(range(64), batch_size=size) for size in prepared.get("dataloaders", [])]

    def prepare_loader(loader, first_pass=False):
        if facts["split_batches"] and loader.batch_size % facts["num_processes"]:
            raise ValueError("the batch size needs to be a round multiple of the number of processes")
        return loader

    seen = {"cpu_optimizer": False}

    def initialize(**given):
        seen["config"] = plain(given["config_params"])
        return object(), None, None, None

    def on_cpu(optimizer):
        seen["cpu_optimizer"] = True
        return optimizer

    stage = types.SimpleNamespace(
        fp8_backend=None, deepspeed_plugin=plugin, parallelism_config=None, _prepare_one=prepare_loader,
        split_batches=facts["split_batches"], num_processes=facts["num_processes"],
        gradient_accumulation_steps=facts["gradient_accumulation_steps"], device=torch.device("cpu"),
        state=types.SimpleNamespace(dynamo_plugin=types.SimpleNamespace(backend=accelerate.accelerator.DynamoBackend.NO)),
        deepspeed_engine_wrapped=None, _models=[], _optimizers=[], _schedulers=[], step_scheduler_with_optimizer=True)
    same = {"DeepSpeedEngineWrapper": lambda each: each, "DeepSpeedOptimizerWrapper": lambda each: each,
            "map_pytorch_optim_to_deepspeed": on_cpu}
    with unittest.mock.patch.multiple(accelerate.accelerator, **same), unittest.mock.patch.object(deepspeed, "initialize", initialize):
        Accelerator._prepare_deepspeed(stage, *objects)
    return {"gradient_accumulation_steps": stage.gradient_accumulation_steps, **seen}


def deepspeed_answer(given):
    if "world" in given:
        return batch_sizes(given)
    forget_variables("ACCELERATE_")
    os.environ.update(given.get("env", {}))
    facts = {"mixed_precision": "no", "gradient_accumulation_steps": 1, "num_processes": 1, "split_batches": False,
             **given.get("accelerator", {})}
    arguments = dict(given.get("plugin", {}))
    if "config" in given:
        arguments["hf_ds_config"] = copy.deepcopy(given["config"])
    plugin = DeepSpeedPlugin(**arguments)
    plugin.set_mixed_precision(facts["mixed_precision"])
    if "process" in given:
        plugin.deepspeed_config_process(must_match=given["process"]["must_match"], **given["process"]["values"])
        return {"config": plain(plugin.deepspeed_config)}
    if "prepare" in given:
        return prepare(plugin, facts, given["prepare"])
    return {"config": plain(plugin.deepspeed_config), "plugin": {name: plain(getattr(plugin, name)) for name in PLUGIN_FIELDS}}


def maybe(to, key, value, probability):
    if PICK.random() < probability:
        to[key] = value()


def or_auto(*values):
    return lambda: "auto" if PICK.random() < 0.5 else PICK.choice(values)


def offload():
    section = {"device": PICK.choice(("none", "cpu", "nvme", "auto"))}
    maybe(section, "nvme_path", one_of("/nvme", None, "auto"), 0.4)
    maybe(section, "pin_memory", one_of(True, False), 0.4)
    return section


def zero():
    section = {"stage": PICK.choice((0, 1, 2, 2, 3, 3))}
    if PICK.random() < 0.08:
        section["stage"] = "auto"
    if PICK.random() < 0.05:
        del section["stage"]
    maybe(section, "offload_optimizer", offload, 0.35)
    maybe(section, "offload_param", offload, 0.3)
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        maybe(section, key, or_auto(100, 5000, 5e8), 0.3)
    maybe(section, "stage3_gather_16bit_weights_on_model_save", one_of(True, False, "auto"), 0.3)
    return section


def sections(kind, of, values, probability):
    section = {"type": PICK.choice(of), "params": {}}
    for key, value in values.items():
        maybe(section["params"], key, value, probability)
    return section


def ds_config(prepares):
    config, often = {}, 0.8 if prepares else 0.5
    maybe(config, "train_batch_size", or_auto(8, 16, 32, 64), often)
    maybe(config, "train_micro_batch_size_per_gpu", or_auto(1, 2, 4, 8), often)
    maybe(config, "gradient_accumulation_steps", or_auto(1, 2, 4), often)
    maybe(config, "gradient_clipping", or_auto(0, 1.0, 0.5), 0.6)
    maybe(config, "zero_optimization", lambda: zero() if PICK.random() < 0.97 else None, 0.96)
    maybe(config, "optimizer", lambda: sections(
        "optimizer", ("AdamW", "Adam"),
        {"lr": or_auto(1e-3), "weight_decay": or_auto(0.1), "eps": one_of(1e-8), "betas": one_of([0.9, 0.95])}, 0.6), 0.3)
    maybe(config, "scheduler", lambda: sections(
        "scheduler", ("WarmupLR", "WarmupDecayLR"),
        {"warmup_min_lr": or_auto(0.1), "warmup_max_lr": or_auto(0.2), "warmup_num_steps": or_auto(7), "total_num_steps": or_auto(70)},
        0.6), 0.3)
    for precision in ("fp16", "bf16"):
        maybe(config, precision, one_of({"enabled": True}, {"enabled": False}, {"enabled": "auto"}, {}, None), 0.2)
    maybe(config, "steps_per_print", one_of(10), 0.1)
    maybe(config, "zero_force_ds_cpu_optimizer", one_of(True, False), 0.1)
    return config


DS_VARIABLES = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": one_of("0", "1", "2", "3", "x"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": one_of("none", "cpu", "nvme"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": one_of("none", "cpu", "nvme"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": one_of("/a", "none"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": one_of("/b", "none"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": one_of("1", "4"),
    "ACCELERATE_GRADIENT_CLIPPING": one_of("1.0", "0", "auto", "0.5", "x", "inf", "-inf", "nan"),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": one_of("true", "False", "TRUE", "1"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": one_of("true", "False", "1", "no", "maybe"),
    "ACCELERATE_CONFIG_DS_FIELDS": one_of("zero_stage", "deepspeed_config_file", "mixed_precision", "zero3_init_flag", ""),
}
DS_ARGUMENTS = {
    "zero_stage": one_of(0, 1, 2, 3),
    "gradient_clipping": one_of(0.0, 1.0, 0.3, "auto"),
    "gradient_accumulation_steps": one_of(1, 2, 8, "auto"),
    "offload_optimizer_device": one_of("none", "cpu", "nvme"),
    "offload_param_device": one_of("none", "cpu", "nvme"),
    "offload_optimizer_nvme_path": one_of("/p"),
    "offload_param_nvme_path": one_of("/q"),
    "zero3_init_flag": one_of(True, False),
    "zero3_save_16bit_model": one_of(True, False),
    "is_train_batch_min": one_of(True, False),
}
DS_KEYS = ["train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping", "gradient_accumulation_steps", "fp16.enabled", "bf16.enabled"] + [
    "zero_optimization." + key for key in (
        "stage", "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "offload_optimizer.device",
        "offload_param.device", "offload_optimizer.nvme_path", "offload_param.nvme_path", "stage3_gather_16bit_weights_on_model_save")
] + ["optimizer.params.lr", "optimizer.params.weight_decay"] + [
    "scheduler.params." + key for key in ("warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "total_num_steps")]


def prepared_case(config):
    real, dummy = {"kind": "torch", "lr": 0.001}, PICK.choice(({"kind": "dummy", "lr": 2e-4, "weight_decay": 0.01}, {"kind": "dummy", "lr": 2e-4}))
    fits = PICK.random() < 0.9
    prepared = {
        "model": PICK.choice(({"hidden_size": 64}, {"hidden_size": 7}, {"hidden_sizes": [8, 96, 32]}, {"width": 8})),
        "optimizer": dummy if ("optimizer" in config) == fits else real,
    }
    if PICK.random() < 0.5:
        if prepared["optimizer"]["kind"] == "torch" and PICK.random() < 0.4:
            prepared["scheduler"] = {"kind": "torch"}
        else:
            prepared["scheduler"] = {"kind": "dummy"}
            maybe(prepared["scheduler"], "total_num_steps", one_of(100, 7, 1), 0.8)
            maybe(prepared["scheduler"], "warmup_num_steps", one_of(0, 1, 10), 0.7)
            maybe(prepared["scheduler"], "with_callable", one_of(True), 0.2)
    maybe(prepared, "dataloaders", lambda: [PICK.choice((1, 2, 4, 6, 8, 9, 16)) for _ in range(PICK.choice((1, 1, 2, 3)))], 0.9)
    return prepared


def deepspeed_case():
    sort = PICK.choice(("plain", "plain", "process", "prepare", "prepare", "prepare", "world"))
    if sort == "world":
        config = {"zero_optimization": {"stage": PICK.choice((0, 1, 2, 3))}}
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            maybe(config, key, one_of(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 0, -1), 0.6)
        return {"label": sort, "config": config, "world": PICK.choice((1, 2, 3, 4, 8))}
    given = {"label": sort}
    if sort != "plain" or PICK.random() < 0.6:
        given["config"] = ds_config(sort == "prepare")
    if sort != "prepare" and PICK.random() < 0.5:
        given["env"] = some(DS_VARIABLES, 5)
    maybe(given, "plugin", lambda: some(DS_ARGUMENTS, 5), 0.5)
    maybe(given, "accelerator", lambda: {
        "mixed_precision": PICK.choice(("no", "no", "fp16", "bf16")),
        "gradient_accumulation_steps": PICK.choice((1, 1, 2, 4)) if sort == "prepare" else 1,
        "num_processes": PICK.choice((1, 2, 3, 4)), "split_batches": PICK.random() < 0.25}, 0.7)
    if sort == "process":
        given["process"] = {"must_match": PICK.random() < 0.5,
                            "values": {key: PICK.choice((1, 2, 0.5, "cpu", True, 4)) for key in PICK.sample(DS_KEYS, PICK.randint(1, 12))}}
    if sort == "prepare":
        given["prepare"] = prepared_case(given["config"])
    return given


# Settings that are decided otherwise


def batch_sizes_contradict(case):
    """Accelerate leaves this to DeepSpeed's engine."""
    config = case.get("out", {}).get("config", {})
    total, micro, steps = (config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    processes = case["in"].get("accelerator", {}).get("num_processes", 1)
    return "prepare" in case["in"] and all(isinstance(each, int) for each in (total, micro, steps)) and total != micro * steps * processes


def decided_otherwise(case):
    given, out, message = case["in"], case.get("out", {}), case.get("error", {}).get("hf_message", "")
    if case["kind"] == "deepspeed_config":
        # Null is as good as absent.
        if "'NoneType' object has no attribute 'get'" in message:
            return True
        # Accelerate takes 1 where the config says nothing, whatever the plugin and the accelerator say.
        silent = "config" in given and "gradient_accumulation_steps" not in given["config"] and "world" not in given
        others = (given.get("plugin", {}).get("gradient_accumulation_steps"), given.get("env", {}).get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
                  given.get("accelerator", {}).get("gradient_accumulation_steps"))
        return silent and any(str(each) not in ("None", "1") for each in others) or batch_sizes_contradict(case)
    env = given["env"]
    # Version 2 ignores it where it is a variable, and refuses it as an argument.
    said = " ".join([*env, given.get("config", ""), *given.get("args", [])]).replace("-", "_").lower()
    if out.get("fsdp_version") == 2 and "forward_prefetch" in said:
        return True
    # In version 1 `reshard_after_forward` is a strategy, which counts.
    if out.get("fsdp_version") == 1 and "FSDP_RESHARD_AFTER_FORWARD" in env:
        return True
    # The setting does not exist in version 2.
    return "set `--fsdp_sync_module_states`" in message


def cases():
    count = int(os.environ.get("COUNT", 80))
    for kind, name, make, answer in (("fsdp_config", "plugin", plugin_case, fsdp), ("fsdp_config", "launch", launch_case, fsdp),
                                     ("deepspeed_config", "deepspeed", deepspeed_case, deepspeed_answer)):
        made = 0
        while made < count:
            case = {"id": "%s/%d" % (name, made), "kind": kind, "in": make()}
            try:
                case["out"] = answer(copy.deepcopy(case["in"]))
            except Exception as error:
                case["error"] = {"contains": "", "hf_type": type(error).__name__, "hf_message": str(error)[:200]}
            if "NVIDIA driver" in str(case.get("error")) or decided_otherwise(case):
                continue
            # For these it only counts that they are refused.
            if "error" in case and PICK.random() < 0.8:
                continue
            made += 1
            yield case


if __name__ == "__main__":
    with open(os.environ.get("OUT", os.path.join(os.path.dirname(os.path.abspath(__file__)), "cases.jsonl")), "w") as out:
        for case in cases():
            out.write(json.dumps(case, separators=(",", ":")) + "\n")
